"""Reads the header of a GGUF file: its metadata, and where its tensors are.

    "GGUF" ‖ version u32 ‖ tensors u64 ‖ pairs u64 ‖ pairs: key, type, value ‖ tensors: name, dims, type, offset ‖ padding ‖ data

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Owns the check that the
file is well-formed. Never interprets a name, and never copies tensor data.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from graftwork.adapters.format.safetensors_file import FORMATS, MAX_TENSORS, Readable
from graftwork.adapters.format.specs import shown
from graftwork.platform.errors import ValidationFailed

GGUF_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_PAIRS = 1024
_MOST_STRING_BYTES = 2**20
_MOST_NAME_BYTES = 256
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""By type of the metadata, how `struct` reads its value."""
_STRING, _ARRAY = 8, 9
_DTYPES = {0: "F32", 1: "F16", 30: "BF16"}
"""The tensor types that are not quantised."""

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. Its data is at the byte offsets [start, end) of the file, row after row."""

    name: str
    dtype: str
    """`F32`, `F16` or `BF16`."""
    shape: tuple[int, ...]
    """As in PyTorch: the dimension that changes fastest comes last. GGUF itself has it first."""
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file."""

    metadata: Mapping[str, Value]
    """The values that are no arrays."""
    array_lengths: Mapping[str, int]
    """The lengths of the arrays."""
    tensors: tuple[GgufTensor, ...]


def read_gguf(content: Readable) -> GgufFile:
    """Reads the header of a file. Raises ValidationFailed for a file that is not well-formed, or is quantised."""
    cursor = _Cursor(content)
    if bytes(content[:4]) != GGUF_MAGIC:
        raise refused_gguf("this is no GGUF file.")
    cursor.position = 4
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        raise refused_gguf(f"GGUF version {version} is not read; use version 3, little-endian.")
    num_tensors, num_pairs = cursor.count(MAX_TENSORS, "tensors"), cursor.count(_MOST_PAIRS, "pairs of metadata")
    metadata, array_lengths = _read_metadata(cursor, num_pairs)
    found = [_read_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 65_536:
        raise refused_gguf("general.alignment is no number of bytes.")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = tuple(_placed(each, offset, data_start, len(content)) for each, offset in found)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise refused_gguf("two tensors have one name.")
    for former, later in pairwise(sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))):
        if later.start < former.end:
            raise refused_gguf("it shares data with another tensor.", later.name)
    return GgufFile(metadata, array_lengths, tensors)


def refused_gguf(problem: str, tensor: str | None = None) -> ValidationFailed:
    """Returns the error of a GGUF file, or of one of its tensors."""
    param = "weights" if tensor is None else f"weights.{shown(tensor)}"
    return ValidationFailed(f"{param}: {problem}", param=param)


class _Cursor:
    """Reads one value after another. Raises ValidationFailed at the end of the file."""

    def __init__(self, content: Readable) -> None:
        self._content = content
        self.position = 0

    def scalar(self, form: str) -> int | float | bool:
        size = struct.calcsize(form)
        self._require(size)
        (value,) = struct.unpack_from(form, self._content, self.position)
        self.position += size
        assert isinstance(value, int | float)
        return value

    def whole(self, form: str) -> int:
        return int(self.scalar(form))

    def count(self, most: int, what: str) -> int:
        number = self.whole("<Q")
        if number > most:
            raise refused_gguf(f"the file has {number} {what}, and may have {most}.")
        return number

    def text(self, most_bytes: int) -> str:
        length = self.count(most_bytes, "bytes in a text")
        self._require(length)
        raw = bytes(self._content[self.position : self.position + length])
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise refused_gguf("a text in its header is no UTF-8.") from None

    def skip(self, num_bytes: int) -> None:
        self._require(num_bytes)
        self.position += num_bytes

    def _require(self, num_bytes: int) -> None:
        if num_bytes > len(self._content) - self.position:
            raise refused_gguf("the file is truncated: it ends inside its header.")


def _read_metadata(cursor: _Cursor, num_pairs: int) -> tuple[dict[str, Value], dict[str, int]]:
    values: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for _ in range(num_pairs):
        key, kind = cursor.text(_MOST_NAME_BYTES), cursor.whole("<I")
        if key in values or key in lengths:
            raise refused_gguf(f"the metadata has {shown(key)} twice.")
        if kind == _STRING:
            values[key] = cursor.text(_MOST_STRING_BYTES)
        elif kind == _ARRAY:
            lengths[key] = _skip_array(cursor)
        elif kind in _SCALARS:
            values[key] = cursor.scalar(_SCALARS[kind])
        else:
            raise refused_gguf(f"the metadata {shown(key)} has the unknown type {kind}.")
    return values, lengths


def _skip_array(cursor: _Cursor) -> int:
    kind, length = cursor.whole("<I"), cursor.whole("<Q")
    if kind in _SCALARS:
        cursor.skip(length * struct.calcsize(_SCALARS[kind]))
    elif kind == _STRING:
        for _ in range(length):  # each takes eight bytes at least, so the end of the file ends the loop
            cursor.text(_MOST_STRING_BYTES)
    else:
        raise refused_gguf(f"the metadata has an array of the unknown type {kind}.")
    return length


def _read_tensor(cursor: _Cursor) -> tuple[GgufTensor, int]:
    """Returns a tensor that has no place yet, and its offset from the start of the data."""
    name, num_dimensions = cursor.text(_MOST_NAME_BYTES), cursor.whole("<I")
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        raise refused_gguf(f"{num_dimensions} dimensions are too few or too many.", name)
    dimensions = [cursor.count(2**31 - 1, "elements in a row") for _ in range(num_dimensions)]
    kind, offset = cursor.whole("<I"), cursor.whole("<Q")
    if kind not in _DTYPES:
        raise refused_gguf(f"its type {kind} is quantised or unknown: convert with --outtype f32, f16 or bf16.", name)
    return GgufTensor(name, _DTYPES[kind], tuple(reversed(dimensions)), 0, 0), offset


def _placed(tensor: GgufTensor, offset: int, data_start: int, file_bytes: int) -> GgufTensor:
    start = data_start + offset
    end = start + math.prod(tensor.shape) * FORMATS[tensor.dtype].item_bytes
    if end > file_bytes:
        raise refused_gguf("the file is truncated: it ends before the end of this tensor.", tensor.name)
    return GgufTensor(tensor.name, tensor.dtype, tensor.shape, start, end)
