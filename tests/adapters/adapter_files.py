"""Adapter files made byte by byte: the safetensors container, its header and its names."""

import io
import json
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.registry.artifact_store import ArtifactStore
from graftwork.engine.core.stats import EngineDescription

DESCRIPTION = EngineDescription(
    model_name="tiny",
    fingerprint="sha256:" + "b" * 64,
    vocab_size=64,
    context_tokens=128,
    eos_token_ids=(1,),
    num_layers=2,
    hidden_size=32,
    biased_targets=(),
    target_shapes={
        "q_proj": (32, 32),
        "k_proj": (16, 32),
        "v_proj": (16, 32),
        "o_proj": (32, 32),
        "gate_proj": (48, 32),
        "up_proj": (48, 32),
        "down_proj": (32, 48),
    },
    max_lora_rank=16,
    page_tokens=16,
    device_pages=64,
)
PREFIX = "base_model.model.model.layers"
Q0_A = f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"
Q0_B = f"{PREFIX}.0.self_attn.q_proj.lora_B.weight"
Tensors = dict[str, npt.NDArray[Any]]
_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int32": "I32", "float64": "F64"}


def config_bytes(**changes: Any) -> bytes:
    """Returns a config as PEFT writes it, with only the fields that matter."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "base_model_name_or_path": "somewhere/else",
    }
    return json.dumps(config | changes).encode()


@contextmanager
def open_files(config: bytes, weights: bytes) -> Generator[AdapterFiles]:
    """Yields the two files of an upload as the server holds them."""
    with tempfile.TemporaryFile() as file:
        file.write(weights)
        yield AdapterFiles.read(io.BytesIO(config), file)


def store_files(store: ArtifactStore, digest: str, config: bytes, weights: bytes) -> None:
    with open_files(config, weights) as files:
        store.put(digest, files)


def tensors(seed: int = 0, rank: int = 4, targets: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")) -> Tensors:
    """Returns random factors for every layer under PEFT's names."""
    random = np.random.default_rng(seed)
    found: Tensors = {}
    for layer in range(DESCRIPTION.num_layers):
        for target in targets:
            out_features, in_features = DESCRIPTION.target_shapes[target]
            parent = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            module = f"{PREFIX}.{layer}.{parent}.{target}"
            found[f"{module}.lora_A.weight"] = random.standard_normal((rank, in_features)).astype(np.float32)
            found[f"{module}.lora_B.weight"] = random.standard_normal((out_features, rank)).astype(np.float32)
    return found


def entries(found: Mapping[str, npt.NDArray[Any]]) -> tuple[dict[str, Any], bytes]:
    """Returns the header's object and the data. uint16 stands for bfloat16."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in found.items():
        raw = tensor.tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": _DTYPES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    return header, data


def container(header: object, data: bytes) -> bytes:
    """Returns a safetensors file with any header, valid or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def weights_bytes(found: Mapping[str, npt.NDArray[Any]] | None = None) -> bytes:
    """Returns a valid safetensors file."""
    return container(*entries(tensors() if found is None else found))
