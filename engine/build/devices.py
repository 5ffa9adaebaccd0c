"""Reads the models of an engine, chooses its device and dtype, loads weights, sets up the memory allocator of the process,
and measures the memory of the device.

All this happens once, at the engine's start.
"""

import ctypes
import gc
import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import torch

from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.model.fingerprint import FingerprintReading
from graftwork.engine.model.weight_reader import TensorSource
from graftwork.engine.model.weights import DecoderWeights, load_decoder_weights, open_weights
from graftwork.engine.quantization.scheme import round_to_nearest
from graftwork.platform.errors import InvalidRequest

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


_KEPT_BYTES = 2**30


_OLDER_LIMIT = 2**25  # the largest threshold that older versions accept


def keep_freed_memory() -> None:
    """Makes glibc keep up to 1 GiB of freed memory in the process, instead of returning it to the system.

    Call it once, in a process that is an engine: it changes the whole process. Without it, the CPU benchmark's prefill
    of 2,048 tokens took 0.49 s instead of 0.32 s, because a prefill allocates and frees megabytes in every layer. Does
    nothing on systems other than Linux with glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        if not mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES):
            mallopt(_M_MMAP_THRESHOLD, _OLDER_LIMIT)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_served_model(config: EngineConfig) -> ModelConfig:
    """Reads the configuration of the model. Its context is not longer than `max_context_tokens`.

    Raises InvalidRequest if the model is not supported, if its context is shorter than `max_context_tokens`, or if it is
    quantised already and `quantization` asks for it.
    """
    model, longest = read_model_config(config.model), config.max_context_tokens
    if config.quantization is not None:
        if model.experts is not None and model.experts.is_mxfp4:
            raise InvalidRequest(
                f"--quantization {config.quantization} rounds plain weights, and the experts of this checkpoint are "
                "quantised already (mxfp4): leave --quantization out.",
                param="quantization",
            )
        if model.recurrence is not None:
            raise InvalidRequest(
                f"--quantization {config.quantization} is not served for a model with recurrent layers: leave it out.",
                param="quantization",
            )
        model = replace(model, quantization=round_to_nearest(config.quantization, model.quantization))
    if longest is None:
        return model
    if not 1 <= longest <= model.context_tokens:
        raise InvalidRequest(
            f"--max-context-tokens {longest} cannot be served: give 1 to {model.context_tokens}, which is the context of "
            "the model.",
            param="max_context_tokens",
        )
    return replace(model, context_tokens=longest)


def check_draft_model(config: EngineConfig, model: ModelConfig) -> ModelConfig | None:
    """Reads the configuration of the draft model; None without one. Needs neither its weights nor a device.

    Raises InvalidRequest if it is not supported, if it has another vocabulary than `model`, or if it cannot be used with
    other settings.
    """
    folder = config.draft_model
    if folder is None:
        return None
    if config.tensor_parallel > 1:
        raise InvalidRequest(
            "--draft-model does not work with --tensor-parallel: it runs on one device. Leave one out.",
            param="draft_model",
        )
    if not config.max_draft_tokens:
        raise InvalidRequest(
            "--draft-model drafts nothing with --max-draft-tokens 0: leave one out.", param="draft_model"
        )
    try:
        draft = read_model_config(folder)
    except InvalidRequest as error:
        raise InvalidRequest(f"The draft model {folder} is not served: {error.message}", param="draft_model") from error
    if draft.recurrence is not None:
        raise InvalidRequest(
            f"The draft model {folder} has recurrent layers, whose state cannot go back behind a rejected guess: "
            "--draft-model takes a model with attention in all layers.",
            param="draft_model",
        )
    own, served = _token_ids(folder), _token_ids(config.model)
    if own is not None and served is not None:
        _refuse_other_tokens(folder, own, served)
    elif draft.vocab_size != model.vocab_size:
        raise InvalidRequest(
            f"The draft model {folder} has {draft.vocab_size} tokens and the served model {model.vocab_size}, and one of "
            "them has no tokenizer.json to compare: --draft-model takes a model with the same vocabulary.",
            param="draft_model",
        )
    return draft


def _token_ids(folder: Path) -> dict[str, int] | None:
    """Returns the id of each token of a model's tokenizer.json; None if there is no such file."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        return _ids(content["model"]["vocab"]) | {one["content"]: one["id"] for one in content.get("added_tokens", ())}
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{path} holds no tokenizer ({type(error).__name__}: {error}): take the model's own file.",
            param="draft_model",
        ) from error


def _ids(vocab: Any) -> dict[str, int]:
    if isinstance(vocab, dict):
        return vocab
    return {piece: token_id for token_id, (piece, _) in enumerate(vocab)}  # unigram: pairs of piece and score


def _refuse_other_tokens(folder: Path, own: dict[str, int], served: dict[str, int]) -> None:
    """Raises InvalidRequest if the two vocabularies differ, and names a token."""
    different = min(own.items() ^ served.items(), key=lambda pair: (pair[1], pair[0]), default=None)
    if different is not None:
        token, _ = different
        raise InvalidRequest(
            f"The draft model {folder} has another vocabulary than the served model: the token {token!r} has the id "
            f"{own.get(token, 'none')} there and {served.get(token, 'none')} here. --draft-model takes a model with the "
            "same tokenizer, usually a small one of the same family.",
            param="draft_model",
        )


def load_weights(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    tensors: TensorSource | None = None,
) -> DecoderWeights:
    """Reads the model's weights onto the device, in `dtype`. Reads them from `tensors`, or else from the model's folder.

    Raises InvalidRequest if a file is damaged or the weights do not fit into the device's memory.
    """
    try:
        return load_decoder_weights(tensors or open_weights(config.model, model), model, device, dtype)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InvalidRequest(
            f"The weights of {config.model} do not fit into the memory of {device}: take a smaller model, "
            "or a device with more memory.",
            param="model",
        ) from error


class ModelReading:
    """Reads a model on threads, so that a process can import the rest of its code meanwhile."""

    def __init__(self, config: EngineConfig, files: FingerprintReading | None = None) -> None:
        """Begins to load the weights, unless several ranks divide them. `files` are those of the model, being hashed."""
        self._config = config
        self._files = files or FingerprintReading(config.model)
        self._weights: Future[DecoderWeights] | None = None
        if config.tensor_parallel == 1:
            self._weights = Future()
            # a daemon: a process that fails meanwhile ends at once
            Thread(target=self._load, args=(self._weights,), name="weights", daemon=True).start()

    def fingerprint(self) -> str:
        """Waits for the end of the hashing, and returns the model's fingerprint. Raises InvalidRequest."""
        return self._files.result(self._config.quantization)

    def weights(self) -> DecoderWeights | None:
        """Waits for the weights, and returns them. None if they are not being loaded. Raises as `load_weights` does."""
        return None if self._weights is None else self._weights.result()

    def _load(self, found: "Future[DecoderWeights]") -> None:
        config = self._config
        try:
            torch.set_num_threads(config.threads)
            model, device = read_served_model(config), choose_device(config.device)
            found.set_result(load_weights(config, model, device, choose_dtype(config.dtype, model, device)))
        except BaseException as error:  # noqa: BLE001 - whatever a load meets, its caller is told
            found.set_exception(error)


def _cpu_multiplies_bfloat16() -> bool:
    """Returns whether the CPU has instructions for bf16 products. Without them, torch computes bf16 products ten times
    slower than fp32 ones (measured).
    """
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def choose_device(name: str) -> torch.device:
    """Returns the device with this name. The name `auto` takes CUDA if it is available, else the CPU.

    Raises InvalidRequest if the name is unknown, or if this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise InvalidRequest(f"device {name!r} is not served: give auto, cpu, cuda or cuda:N.", param="device")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(name.partition(":")[2] or 0) >= found:
        raise InvalidRequest(
            f"device {name!r} is not there: torch {torch.__version__} finds {found} CUDA devices. Give --device cpu, "
            "or install the GPU's driver and a torch for CUDA.",
            param="device",
        )
    return torch.device(name)


def check_recurrent(model: ModelConfig, device: torch.device) -> None:
    """Raises InvalidRequest if a model has recurrent layers and the device cannot compute them."""
    if model.recurrence is not None and device.type != "cpu":
        raise InvalidRequest(
            f"A model with recurrent layers is not served on {device}, only on a CPU: give --device cpu.",
            param="device",
        )


def choose_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype of weights and KV: `float32`, `bfloat16` or `float16`.

    The name `auto` takes the dtype of the model's files, but float32 on a CPU without bf16 instructions. Raises
    InvalidRequest for any other name.
    """
    wanted = model.dtype if name == "auto" else name
    if name == "auto" and device.type == "cpu" and not _cpu_multiplies_bfloat16():
        wanted = "float32"
    if wanted not in _DTYPES:
        raise InvalidRequest(f"dtype {wanted!r} is not served: choose one of {', '.join(_DTYPES)}.", param="dtype")
    return _DTYPES[wanted]


class DeviceMeter(Protocol):
    """Measures the memory of one device. CudaMeter implements it."""

    @property
    def device(self) -> torch.device: ...

    def peak_of(self, act: Callable[[], None]) -> int:
        """Calls `act`. Returns the most bytes that it took at a time, besides those that were taken before.

        Raises torch.OutOfMemoryError if `act` does.
        """
        ...

    def free_bytes(self) -> int:
        """Returns the free memory of the device in bytes, after memory that nothing uses was given back."""
        ...


class CudaMeter:
    """Measures the memory of a CUDA device, as the driver and torch's allocator see it.

    Memory that nothing uses is given back to the driver first, so that two measurements can be compared.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def peak_of(self, act: Callable[[], None]) -> int:
        self._give_back()
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        act()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_reserved(self.device)) - before

    def free_bytes(self) -> int:
        self._give_back()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def _give_back(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
