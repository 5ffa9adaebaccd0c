"""Reads a safetensors file: which tensors it has, and where their bytes are.

    ┌──────────────┬──────────────────────────┬──────────────────────────────────┐
    │ N: u64, LE   │ N bytes of JSON, from {  │ tensors: no gap, no overlap      │
    └──────────────┴──────────────────────────┴──────────────────────────────────┘

Owns the check that the file is well-formed. Never interprets a tensor's name, and never copies tensor data.
Invariant: every byte after the header belongs to exactly one tensor.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from graftwork.adapters.format.specs import shown
from graftwork.platform.errors import ValidationFailed
from graftwork.platform.strict_json import read_object

Readable: TypeAlias = bytes | memoryview
"""The content of a whole file, as bytes or as a memoryview of bytes."""

MAX_TENSORS = 4096
"""The most tensors of a file, where the caller sets no other limit."""
_HEADER_BYTES_OF_TENSOR = 256
MAX_HEADER_BYTES = MAX_TENSORS * _HEADER_BYTES_OF_TENSOR
"""The most bytes of the header of such a file: 1 MiB."""
_LENGTH_BYTES = 8
_MAX_DIMENSION = 2**31 - 1
_CHUNK_ELEMENTS = 1 << 22  # limits the memory of the search for NaN

_FOREIGN_ARCHIVES = (
    (b"PK", "a zip archive, as torch.save writes them"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\x93NUMPY", "a NumPy file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"GGUF", "a GGUF file, which is pushed without a configuration, in parts"),
)
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """The bit layout of a floating point format. A value is NaN or infinite if all bits of its exponent are 1."""

    item_bytes: int
    exponent_mask: int

    @property
    def numpy_bits(self) -> str:
        """The NumPy dtype, as text, of a little-endian unsigned integer with the size of one element."""
        return f"<u{self.item_bytes}"


FORMATS = {
    "F32": TensorFormat(4, 0x7F80_0000),
    "F16": TensorFormat(2, 0x7C00),
    "BF16": TensorFormat(2, 0x7F80),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file. Its data is at the byte offsets [start, end), counted from the start of the
    file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def param(self) -> str:
        """The name of the tensor as the field `param` of an error shows it: `weights.<name>`."""
        return f"weights.{shown(self.name)}"

    def bits(self, weights: Readable) -> npt.NDArray[Any]:
        """Returns the bits of the elements as unsigned integers, [num_elements]. `weights` is the content of the file.

        The array shares the memory of `weights`, and its start may be unaligned.
        """
        number = math.prod(self.shape)
        return np.frombuffer(weights, dtype=FORMATS[self.dtype].numpy_bits, count=number, offset=self.start)

    def rows(self, first: int, end: int) -> "TensorEntry":
        """Returns an entry that describes rows [first, end) of this tensor. Copies no data."""
        row_bytes = (self.end - self.start) // self.shape[0]
        shape = (end - first, *self.shape[1:])
        return replace(self, shape=shape, start=self.start + first * row_bytes, end=self.start + end * row_bytes)

    def is_finite(self, weights: Readable) -> bool:
        """Returns True if all elements are finite, and False if an element is NaN or infinite. `weights` is the content
        of the file.
        """
        mask = FORMATS[self.dtype].exponent_mask
        bits = self.bits(weights)
        chunks = (bits[start : start + _CHUNK_ELEMENTS] for start in range(0, bits.size, _CHUNK_ELEMENTS))
        return not any(bool(((chunk & mask) == mask).any()) for chunk in chunks)


def read_entries(weights: Readable, most_tensors: int = MAX_TENSORS) -> tuple[TensorEntry, ...]:
    """Returns all tensors of the file, sorted by their offset in the file. `weights` is the content of the file.

    `most_tensors` is the most that the file may hold; it limits the header too.

    Raises ValidationFailed. The `param` of the error names the file or the wrong tensor.
    """
    data_start = _LENGTH_BYTES + _header_bytes(weights, most_tensors * _HEADER_BYTES_OF_TENSOR)
    header = read_object(bytes(weights[_LENGTH_BYTES:data_start]), "weights")
    _check_metadata(header.pop("__metadata__", None))
    if len(header) > most_tensors:
        raise _refused(f"the file holds {len(header)} tensors; {most_tensors} is the most that is read.")
    entries = tuple(sorted(_read_all(header, data_start), key=lambda entry: (entry.start, entry.end)))
    _check_coverage(entries, data_start, len(weights))
    return entries


def header_of(weights: Readable, most_tensors: int = MAX_TENSORS) -> bytes:
    """Returns everything in the file before the tensors: the 8 length bytes and the header.

    Returns no more of the header than `read_entries` would read, even if the length bytes say that it is longer.
    """
    length = int.from_bytes(weights[:_LENGTH_BYTES], "little")
    return bytes(weights[: _LENGTH_BYTES + min(length, most_tensors * _HEADER_BYTES_OF_TENSOR)])


def _header_bytes(weights: Readable, most_bytes: int) -> int:
    """Returns the length of the header in bytes. Raises ValidationFailed if the file is not safetensors."""
    length = int.from_bytes(weights[:_LENGTH_BYTES], "little")
    looks_right = weights[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"
    if not looks_right:
        _refuse_archive(weights)
    if len(weights) < _LENGTH_BYTES + 2:
        raise _refused("the file is too short to be safetensors.")
    if length > most_bytes:
        raise _refused(f"the header claims {length} bytes; {most_bytes} is the most that is read.")
    if length > len(weights) - _LENGTH_BYTES:
        raise _refused("the file is truncated: it ends inside its header.")
    if not looks_right or length < 2:
        raise _refused("not a safetensors file: its header does not begin with '{'.")
    return length


def _refuse_archive(weights: Readable) -> None:
    """Raises ValidationFailed for a file in a known other format, such as a pickle, and names that format."""
    beginning = bytes(weights[: _TAR_MAGIC_AT + len(_TAR_MAGIC)])
    found = next((what for magic, what in _FOREIGN_ARCHIVES if beginning.startswith(magic)), None)
    if beginning[_TAR_MAGIC_AT:] == _TAR_MAGIC:
        found = "a tar archive"
    if found is not None:
        message = f"weights: this is {found}, which is never opened here: send safetensors (adapter_model.safetensors)."
        raise ValidationFailed(message, param="weights", code="unsupported_format")


def _check_metadata(metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _refused("__metadata__ must map strings to strings.")


def _read_all(header: dict[str, Any], data_start: int) -> Iterator[TensorEntry]:
    for name, description in header.items():
        yield _read_entry(name, description, data_start)


def _read_entry(name: str, description: object, data_start: int) -> TensorEntry:
    if not isinstance(description, dict) or set(description) != {"dtype", "shape", "data_offsets"}:
        raise _refused("its entry must have dtype, shape and data_offsets, and nothing else.", name)
    dtype = description["dtype"]
    if not isinstance(dtype, str) or dtype not in FORMATS:
        raise _refused(f"dtype {shown(str(dtype))} is not served: use F32, F16 or BF16.", name)
    shape = _integers(description["shape"], _MAX_DIMENSION)
    offsets = _integers(description["data_offsets"], 2**63 - 1)
    if shape is None or len(shape) > 8:
        raise _refused("its shape must be a list of at most 8 integers from 0 up.", name)
    if offsets is None or len(offsets) != 2:
        raise _refused("its data_offsets must be two integers from 0 up.", name)
    start, end = offsets
    if end - start != math.prod(shape) * FORMATS[dtype].item_bytes:
        raise _refused(f"{end - start} bytes do not hold a {dtype} tensor of shape {list(shape)}.", name)
    return TensorEntry(name, dtype, shape, data_start + start, data_start + end)


def _integers(value: object, most: int) -> tuple[int, ...] | None:
    """Returns `value` as a tuple of integers from 0 to `most`; None if it is anything else, also for true and 1.0."""
    if not isinstance(value, list):
        return None
    if not all(type(item) is int and 0 <= item <= most for item in value):
        return None
    return tuple(value)


def _check_coverage(entries: tuple[TensorEntry, ...], data_start: int, file_bytes: int) -> None:
    """Checks that every byte after the header belongs to one tensor."""
    for entry in entries:
        if entry.end > file_bytes:
            raise _refused("the file is truncated: it ends before the end of this tensor.", entry.name)
    position = data_start
    for entry in entries:
        if entry.start != position:
            problem = "overlaps the one before it" if entry.start < position else "leaves a gap before it"
            raise _refused(f"this tensor's data {problem}.", entry.name)
        position = entry.end
    if position != file_bytes:
        raise _refused(f"{file_bytes - position} bytes behind the last tensor belong to none.")


def _refused(problem: str, tensor: str | None = None) -> ValidationFailed:
    param = "weights" if tensor is None else f"weights.{shown(tensor)}"
    return ValidationFailed(f"{param}: {problem}", param=param)
