"""Reads the safetensors files of a model folder. The files are memory-mapped.

Owns the record of which tensors have been read. A tensor is loaded only when `read` is called for it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from graftwork.engine.model.fingerprint import weight_files
from graftwork.platform.errors import InvalidRequest

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True, slots=True)
class Part:
    """The part [start, end) of a tensor along one dimension."""

    dim: int
    start: int
    end: int


class TensorSource(Protocol):
    """Gives the tensors of a checkpoint, by name, and remembers which were not read yet. WeightReader implements it."""

    def __contains__(self, name: str) -> bool: ...

    @property
    def unread(self) -> frozenset[str]: ...

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...


class WeightReader:
    """Reads single tensors from the weight files of a model folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Reads the files' headers. Raises InvalidRequest if a file is missing or is not a whole safetensors file."""
        self._files = weight_files(folder)
        self._file_by_name: dict[str, Path] = {}
        for path in self._files:
            with _open(path) as tensors:
                self._file_by_name.update(dict.fromkeys(tensors.keys(), path))
        self._unread = set(self._file_by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._file_by_name

    @property
    def unread(self) -> frozenset[str]:
        """The names of those tensors in the files that have not been read yet."""
        return frozenset(self._unread)

    def read(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> torch.Tensor:
        """Reads one tensor into CPU memory, in the dtype of its file. Reads only `part` of it, if a part is given.

        `shape` is the shape of the whole tensor. Raises InvalidRequest if the tensor is missing, has another shape, or has the dtype of a quantised model.
        """
        path = self._file_by_name.get(name)
        if path is None:
            raise InvalidRequest(f"The checkpoint has no tensor {name!r}.", param="model")
        with _open(path) as tensors:
            stored = tuple(tensors.get_slice(name).get_shape())
            if stored != shape:
                raise InvalidRequest(f"Tensor {name!r} has shape {stored}, not {shape}.", param="model")
            tensor = _read(tensors, name, part)
        if tensor.dtype not in _DTYPES:
            raise InvalidRequest(
                f"Tensor {name!r} is of {tensor.dtype}, which is not served: float32, bfloat16 and float16 are.",
                param="model",
            )
        self._unread.discard(name)
        return tensor


def _read(tensors: Any, name: str, part: Part | None) -> torch.Tensor:
    tensor: torch.Tensor
    if part is None:
        tensor = tensors.get_tensor(name)
    else:
        before = (slice(None),) * part.dim
        tensor = tensors.get_slice(name)[(*before, slice(part.start, part.end))]
    return tensor


@contextmanager
def _open(path: Path) -> Generator[Any]:
    """Opens one file. Raises InvalidRequest if it cannot be read, or is damaged."""
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise InvalidRequest(
            f"{path} is not a whole safetensors file ({error}): download or copy it again.", param="model"
        ) from error
