"""Reads a Hugging Face checkpoint: memory-mapped safetensors, and a fingerprint of their bytes."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from graftwork.platform.errors import InvalidRequest


class Checkpoint:
    """The tensors of a model folder by name, across its shards; read only when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = _weight_files(folder)
        self._file_by_name: dict[str, Path] = {}
        for path in self._files:
            with safe_open(path, framework="pt") as tensors:
                self._file_by_name.update(dict.fromkeys(tensors.keys(), path))

    def __contains__(self, name: str) -> bool:
        return name in self._file_by_name

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor on the CPU in its own dtype. Raises InvalidRequest if it is missing or of another shape."""
        path = self._file_by_name.get(name)
        if path is None:
            raise InvalidRequest(f"The checkpoint has no tensor {name!r}.", param="model")
        with safe_open(path, framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise InvalidRequest(f"Tensor {name!r} has shape {tuple(tensor.shape)}, not {shape}.", param="model")
        return tensor


def fingerprint(folder: Path) -> str:
    """`sha256:…` over config.json and every weight file: equal bytes, equal fingerprint, wherever they lie."""
    digest = hashlib.sha256(b"graftwork/base/1")
    for path in [folder / "config.json", *_weight_files(folder)]:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(_indexed_files(folder)) or sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.exists()]
    if missing or not files:
        wanted = ", ".join(missing) or "*.safetensors"
        raise InvalidRequest(f"{folder} has no {wanted}: --model must name a Hugging Face folder.", param="model")
    return files


def _indexed_files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        yield from {folder / name for name in names}
