"""Reads a Hugging Face checkpoint from memory-mapped safetensors."""

from pathlib import Path

import torch
from safetensors import safe_open

from graftwork.engine.fingerprint import weight_files
from graftwork.platform.errors import InvalidRequest


class Checkpoint:
    """The tensors of a model folder by name, across its shards; read only when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = weight_files(folder)
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
