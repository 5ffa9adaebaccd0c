"""Reads the safetensors files of a model folder. The files are memory-mapped.

Owns the record of which tensors have been read. A tensor is loaded only when `read` is called for it. Some checkpoints
hold several projections as one tensor, such as `qkv_proj`: this reader gives them one by one, under their own names.
The weight of a linear layer may be several tensors, if it is quantised: `linear` gives it whole.
"""

import os
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from graftwork.engine.model.architectures import WrapperRules
from graftwork.engine.model.fingerprint import weight_files
from graftwork.engine.quantization.checkpoint import read_quantized
from graftwork.engine.quantization.linear import LinearWeight
from graftwork.engine.quantization.rounding import rounded
from graftwork.engine.quantization.scheme import Quantization
from graftwork.platform.errors import InvalidRequest

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}

_MOST_LOADING_THREADS = 4
"""With more, a disk or the memory is the limit."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part [start, end) of a tensor along one dimension."""

    dim: int
    start: int
    end: int


Joined = Mapping[str, tuple[tuple[str, int], ...]]
"""By the name of a joined projection, such as `qkv_proj`: its projections in order, each with its number of rows. The
name may begin with that of the module around it, as in `shared_mlp.input_linear`.
"""


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

    def close(self) -> None: ...

    def linear(self, module: str, shape: tuple[int, int]) -> LinearWeight:
        """Reads the weight [out_features, in_features] of a linear layer, such as "model.layers.0.mlp.down_proj"."""
        ...


QUANTIZED_PARTS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
"""A linear layer with one of these tensors is quantised in the checkpoint."""


def read_plain(reader: TensorSource, module: str, shape: tuple[int, int]) -> torch.Tensor:
    """Reads the weight of a linear layer that is never rounded, or makes it dense if the checkpoint has it quantised."""
    if not any(f"{module}.{part}" in reader for part in QUANTIZED_PARTS):
        return reader.read(f"{module}.weight", shape)
    weight = reader.linear(module, shape)
    return weight if isinstance(weight, torch.Tensor) else weight.dense(torch.float32)


def read_as_stored(
    reader: TensorSource, quantization: Quantization | None, module: str, shape: tuple[int, int]
) -> LinearWeight:
    """Reads the weight of a linear layer that libraries may leave plain in a quantised checkpoint without saying so."""
    is_rounded = quantization is None or quantization.is_rounded
    if is_rounded or any(f"{module}.{part}" in reader for part in QUANTIZED_PARTS):
        return reader.linear(module, shape)
    return reader.read(f"{module}.weight", shape)


def skip_zero_bias(reader: TensorSource, module: str, size: int) -> None:
    """Reads a bias that the model has none of, which some libraries write as zeros for quantised layers.

    Raises InvalidRequest if it is not zero.
    """
    name = f"{module}.bias"
    if name in reader and bool(reader.read(name, (size,)).any()):
        raise InvalidRequest(
            f"The checkpoint holds {name!r}, which is not zero, but its config.json says that there is no bias: "
            "one of the two belongs to another model.",
            param="model",
        )


def loading_threads() -> int:
    """Returns how many threads load layers: as many as the process has cores for, each with torch's own threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_LOADING_THREADS, cores // torch.get_num_threads()))


class WeightReader:
    """Reads single tensors from the weight files of a model folder, by name."""

    def __init__(
        self,
        folder: Path,
        joined: Joined | None = None,
        quantization: Quantization | None = None,
        renamed: Mapping[str, str] | None = None,
        wrapper: WrapperRules | None = None,
    ) -> None:
        """Reads the files' headers. `renamed` has, by the end of a tensor's name in the files, the end that it is read by.
        `wrapper` says which tensors are of other parts of the model, and how those of the language model begin.

        Raises InvalidRequest if a file is missing or is not a whole safetensors file."""
        self._files = weight_files(folder)
        self._opened: dict[Path, Any] = {}
        self._joined = joined or {}
        self._quantization = quantization
        self._stored_by_name: dict[str, _Stored] = {}
        for path in self._files:
            with self._open(path) as tensors:
                for name in sorted(tensors.keys()):
                    module = name.rpartition(".")[0]
                    joined_here = {} if self._is_stored_quantized(module) else self._joined
                    if wrapper is None:
                        self._stored_by_name.update(_places(path, name, joined_here, renamed or {}))
                    elif not name.startswith(wrapper.other_tensors):
                        for own, place in _places(path, name, joined_here, renamed or {}):
                            self._stored_by_name[_unwrapped(own, wrapper)] = place
        self._unread = {name for name in self._stored_by_name if not self._is_unused(name)}

    def close(self) -> None:
        """Closes the files, which stay open between reads otherwise. The next read opens them again.

        Opening a file reads the names of all its tensors, which takes milliseconds where there are thousands of experts.
        """
        self._opened.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._stored_by_name

    @property
    def unread(self) -> frozenset[str]:
        """The names of those tensors in the files that have not been read yet."""
        return frozenset(self._unread)

    def take(self, name: str) -> torch.Tensor:
        """Reads one tensor into CPU memory as it is stored, whatever its shape and dtype."""
        place = self._stored_by_name[name]
        with self._open(place.path) as tensors:
            tensor: torch.Tensor = tensors.get_tensor(place.name)
        self._unread.discard(name)
        return tensor

    def quantizes(self, module: str) -> bool:
        """Returns whether the weight of a linear layer is quantised, by the checkpoint or when it is read."""
        return self._quantization is not None and not self._quantization.excludes(self._holder(module)[0])

    def linear(self, module: str, shape: tuple[int, int]) -> LinearWeight:
        """Reads the weight of a linear layer, [out_features, in_features], quantised if `quantizes` says so.

        Raises InvalidRequest as `read` does, and if the tensors do not fit the quantisation.
        """
        quantization = self._quantization
        if quantization is None or not self.quantizes(module):
            return self.read(f"{module}.weight", shape)
        if quantization.is_rounded:
            return rounded(self.read(f"{module}.weight", shape), quantization.scheme)
        holder, start, num_rows = self._holder(module)
        if num_rows is None:
            return read_quantized(self, module, shape, quantization.scheme)
        joined = read_quantized(self, holder, (num_rows, shape[1]), quantization.scheme)
        return joined.rows(start, start + shape[0])

    def _holder(self, module: str) -> tuple[str, int, int | None]:
        """Returns the layer in the checkpoint that holds a projection, such as `qkv_proj`, the projection's first row in
        it, and the number of its rows. The number is None for a layer of its own.
        """
        parent, _, target = module.rpartition(".")
        for name, members in self._joined.items():
            around, _, own_name = name.rpartition(".")
            if around not in ("", parent.rpartition(".")[2]):
                continue
            start = 0
            for member, rows in members:
                if member == target:
                    return f"{parent}.{own_name}", start, sum(each for _, each in members)
                start += rows
        return module, 0, None

    def _is_stored_quantized(self, module: str) -> bool:
        """Returns whether a layer in the checkpoint, joined or not, is quantised there."""
        quantization = self._quantization
        return quantization is not None and not quantization.is_rounded and not quantization.excludes(module)

    def _is_unused(self, name: str) -> bool:
        """Returns whether a tensor is one that products with quantised weights do not need."""
        return self._quantization is not None and name.rpartition(".")[2] in self._quantization.unused_tensors

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
        with self._open(place.path) as tensors:
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

    @contextmanager
    def _open(self, path: Path) -> Generator[Any]:
        """Opens one file, unless it is open. Raises InvalidRequest if it cannot be read, or is damaged."""
        try:
            tensors = self._opened.get(path)
            if tensors is None:
                tensors = self._opened[path] = safe_open(path, framework="pt")
            yield tensors
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(
                f"{path} is not a whole safetensors file ({error}): download or copy it again.", param="model"
            ) from error


def _unwrapped(name: str, wrapper: WrapperRules) -> str:
    """Returns the name that a tensor of the language model has where there is nothing else."""
    return f"model.{name.removeprefix(wrapper.prefix)}" if name.startswith(wrapper.prefix) else name


def _places(path: Path, name: str, joined: Joined, renamed: Mapping[str, str]) -> Iterator[tuple[str, _Stored]]:
    """Yields the tensors that a stored tensor holds, by name."""
    for end, other in renamed.items():
        if name.endswith(f".{end}"):
            yield name.removesuffix(end) + other, _Stored(path, name)
            return
    prefix, _, last = name.rpartition(".")
    parent, _, module = prefix.rpartition(".")
    members = joined.get(module) or joined.get(f"{parent.rpartition('.')[2]}.{module}")
    if members is None:
        yield name, _Stored(path, name)
        return
    start, num_rows = 0, sum(rows for _, rows in members)
    for target, rows in members:
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
