"""Reads the safetensors files of a model folder. The files are memory-mapped.

Owns the record of which tensors have been read. A tensor is loaded only when `read` is called for it. Some checkpoints
hold several projections as one tensor, such as `qkv_proj`: this reader gives them one by one, under their own names.
"""

from collections.abc import Collection, Generator, Iterator, Mapping
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


Joined = Mapping[str, tuple[tuple[str, int], ...]]
"""By the name of a joined projection, such as `qkv_proj`: its projections in order, each with its number of rows."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor is: in a file, under a name, and there from a row on. `num_rows` is None for a tensor of its own."""

    path: Path
    name: str
    start: int = 0
    num_rows: int | None = None
    """The rows of the joined tensor."""


class TensorSource(Protocol):
    """Gives the tensors of a checkpoint, by name, and remembers which were not read yet. WeightReader implements it."""

    def __contains__(self, name: str) -> bool: ...

    @property
    def unread(self) -> frozenset[str]: ...

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...

    def read_bytes(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...


class WeightReader:
    """Reads single tensors from the weight files of a model folder, by name."""

    def __init__(self, folder: Path, joined: Joined | None = None) -> None:
        """Reads the files' headers. Raises InvalidRequest if a file is missing or is not a whole safetensors file."""
        self._files = weight_files(folder)
        self._stored_by_name: dict[str, _Stored] = {}
        for path in self._files:
            with _open(path) as tensors:
                for name in sorted(tensors.keys()):
                    self._stored_by_name.update(_places(path, name, joined or {}))
        self._unread = set(self._stored_by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._stored_by_name

    @property
    def unread(self) -> frozenset[str]:
        """The names of those tensors in the files that have not been read yet."""
        return frozenset(self._unread)

    def read(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> torch.Tensor:
        """Reads one tensor into CPU memory, in the dtype of its file. Reads only `part` of it, if a part is given.

        Raises InvalidRequest if the tensor is missing, has another shape, or has the dtype of a quantised model.
        """
        return self._load(name, shape, part, _DTYPES)

    def read_bytes(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Reads a tensor of bytes, as `read` does."""
        return self._load(name, shape, None, {torch.uint8})

    def _load(
        self, name: str, shape: tuple[int, ...], part: Part | None, dtypes: Collection[torch.dtype]
    ) -> torch.Tensor:
        """Reads one tensor of one of `dtypes`.

        `shape` is the shape of the whole tensor. Raises InvalidRequest if the tensor is missing, has another shape, or has the dtype of a quantised model.
        """
        place = self._stored_by_name.get(name)
        if place is None:
            raise InvalidRequest(f"The checkpoint has no tensor {name!r}.", param="model")
        whole = shape if place.num_rows is None else (place.num_rows, *shape[1:])
        with _open(place.path) as tensors:
            stored = tuple(tensors.get_slice(place.name).get_shape())
            if stored != whole:
                raise InvalidRequest(f"Tensor {place.name!r} has shape {stored}, not {whole}.", param="model")
            tensor = _read(tensors, place, shape, part)
        if tensor.dtype not in dtypes:
            served = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise InvalidRequest(
                f"Tensor {place.name!r} is of {tensor.dtype}, which is not served: {served} would be.",
                param="model",
            )
        self._unread.discard(name)
        return tensor


def _places(path: Path, name: str, joined: Joined) -> Iterator[tuple[str, _Stored]]:
    """Yields the tensors that a stored tensor holds, by name."""
    prefix, _, last = name.rpartition(".")
    parent, _, module = prefix.rpartition(".")
    if module not in joined:
        yield name, _Stored(path, name)
        return
    start, num_rows = 0, sum(rows for _, rows in joined[module])
    for target, rows in joined[module]:
        yield f"{parent}.{target}.{last}", _Stored(path, name, start, num_rows)
        start += rows


def _read(tensors: Any, place: _Stored, shape: tuple[int, ...], part: Part | None) -> torch.Tensor:
    """Reads a tensor of `shape`, or `part` of it."""
    tensor: torch.Tensor
    if part is None and place.num_rows is None:
        tensor = tensors.get_tensor(place.name)
        return tensor
    bounds = [(0, size) for size in shape]
    if part is not None:
        bounds[part.dim] = (part.start, part.end)
    bounds[0] = (place.start + bounds[0][0], place.start + bounds[0][1])
    tensor = tensors.get_slice(place.name)[tuple(slice(*one) for one in bounds)]
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
