"""An engine whose model and adapters are random numbers, made on the device from their sizes.

The engine is built as every engine is, except that its weights are not read from files.
"""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Empty
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from gpu.phase_run import ModelShape, PhaseRun
from our_engine import greedy_request
from safetensors.torch import save_file

from graftwork.engine.build import engine as building
from graftwork.engine.build.engine import Engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import RequestOutput
from graftwork.engine.lora.weights import TARGETS, AdapterWeights, LoraPair
from graftwork.engine.messages import Stop, SubmitRequest
from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.model.weights import DecoderWeights, load_decoder_weights
from graftwork.platform.ids import IsolationDomain, RequestId

MAX_ROWS = 128
RANK = 16
DOMAIN = IsolationDomain(b"gpu day")
_STD = 0.02
_HOST_BYTES = {"llama-8b": 8 * 2**30, "tiny": 2**26}


def write_config(shape: ModelShape, folder: Path) -> None:
    """Writes config.json, and a file of weights with nothing in it, which gives the model a fingerprint."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_tokens,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")


def model_config(shape: ModelShape) -> ModelConfig:
    with TemporaryDirectory() as folder:
        write_config(shape, Path(folder))
        return read_model_config(Path(folder))


class RandomReader:
    """Makes the tensors that a WeightReader would read, as a TensorSource. Norms are ones, the rest is normal."""

    unread: frozenset[str] = frozenset()

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._like: dict[str, Any] = {"device": device, "dtype": dtype}
        self._generator = torch.Generator(device).manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, **self._like)
        return torch.empty(shape, **self._like).normal_(std=_STD, generator=self._generator)

    def read_bytes(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        raise NotImplementedError("a random model has no quantised weights")

    def linear(self, module: str, shape: tuple[int, int]) -> torch.Tensor:
        return self.read(f"{module}.weight", shape)

    def close(self) -> None:
        """There is no file."""


def _random_weights(
    _: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype, tensors: object
) -> DecoderWeights:
    return load_decoder_weights(RandomReader(device, dtype), model, device, dtype)


@dataclass(frozen=True, slots=True)
class RandomAdapters:
    """An AdapterSource of any digest. All adapters have the same numbers, each in memory of its own on the device."""

    shapes: dict[str, tuple[int, int]]
    num_layers: int

    def load(self, digest: str) -> AdapterWeights:
        pairs = {target: _pair(*self.shapes[target]) for target in TARGETS}
        return AdapterWeights(
            digest, {(layer, target): pairs[target] for layer in range(self.num_layers) for target in TARGETS}
        )


@cache
def _pair(out_features: int, in_features: int) -> LoraPair:
    generator = torch.Generator().manual_seed(1)
    A, B = (
        torch.empty(shape, dtype=torch.bfloat16).normal_(std=_STD, generator=generator)
        for shape in ((RANK, in_features), (out_features, RANK))
    )
    return LoraPair(A, B, 2.0)


@contextmanager
def random_engine(run: PhaseRun, **settings: Any) -> Iterator[tuple[Engine, Path]]:
    """An engine of the run's shape, and the folder of its files. Drafting is off: random answers repeat themselves.

    The memory of an engine before it is freed first, if nobody holds that engine any more.
    """
    gc.collect()
    if not run.is_dry:
        torch.cuda.empty_cache()
    shape = run.shape
    options: dict[str, Any] = {
        "device": run.device,
        "dtype": "bfloat16",
        "device_bytes": shape.device_bytes,
        "host_kv_bytes": _HOST_BYTES[shape.name],
        "lora_host_bytes": _HOST_BYTES[shape.name],
        "max_batch_tokens": 2048,
        "max_running": MAX_ROWS,
        "max_draft_tokens": 0,
        "max_lora_rank": 64,
    }
    with TemporaryDirectory() as name, patch.object(building, "load_weights", _random_weights):
        folder = Path(name)
        write_config(shape, folder)
        config = EngineConfig(model=folder, kv_folder=folder / "kv", **(options | settings))
        engine = building.build_engine(
            config, lambda description: RandomAdapters(description.target_shapes, description.num_layers)
        )
        yield engine, folder


def submit(
    engine: Engine, prompt: list[int], adapter: str | None, num_tokens: int, outputs: list[RequestOutput]
) -> RequestId:
    """Submits a greedy request. Its outputs go to `outputs`. Returns its id."""
    request = greedy_request(prompt, adapter, num_tokens, DOMAIN)
    engine.loop.take(SubmitRequest(request, outputs.extend))
    return request.request_id


def close(engine: Engine) -> None:
    """Ends the threads of an engine whose loop has no thread of its own."""
    engine.loop.inbox.put(Stop())
    engine.loop.run()


def advance(engine: Engine) -> None:
    """Handles the messages that are there, and runs one step. Waits for a message where there is nothing to run."""
    while True:
        try:
            engine.loop.take(engine.loop.inbox.get_nowait())
        except Empty:
            break
    if not engine.loop.step():
        engine.loop.take(engine.loop.inbox.get(timeout=60))


def raise_failures(outputs: list[RequestOutput]) -> None:
    """Raises the error of a request that has failed."""
    for output in outputs:
        if isinstance(output.event, Exception):
            raise output.event


def random_prompt(shape: ModelShape, seed: object, num_tokens: int) -> list[int]:
    random = Random(str(seed))
    return [random.randrange(shape.vocab_size) for _ in range(num_tokens)]
