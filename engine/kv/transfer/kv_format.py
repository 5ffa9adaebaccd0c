"""How the keys and values of one token are stored in a page: as they are, or as codes of one byte with a scale.

Each head of a token has a scale of its own, stored behind its codes. A scale for each page would be smaller, but it would
change with each token that is appended, and then the codes of earlier tokens would too: answers would follow from how a
prompt was divided into steps, and a fork could not share its last page's content. So a stored token never changes, and it
follows from its own key or value alone.

Owns the layout of one head of one token. Never owns pages. Invariant: bytes of zeros stand for zeros, because pages are
zeroed when they begin.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from graftwork.platform.errors import InvalidRequest

SCALE_DTYPE = torch.bfloat16
"""Has the range of fp32, so that no key is too large for it."""
_SCALE_BYTES = 2


class KvFormat(Protocol):
    """Stores heads of tokens, and reads them."""

    @property
    def name(self) -> str:
        """Names what is stored, for cache scopes and files: empty for the model's own dtype."""
        ...

    @property
    def storage_dtype(self) -> torch.dtype: ...

    def width(self, head_dim: int) -> int:
        """Returns how many items of `storage_dtype` a head of a token takes."""
        ...

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows [..., head_dim] of the model's dtype as they are stored, [..., width]."""
        ...

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns stored rows [..., width] in the model's dtype, [..., head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class PlainKv:
    """Stores keys and values in the model's dtype."""

    storage_dtype: torch.dtype
    name: str = ""

    def width(self, head_dim: int) -> int:
        return head_dim

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        return stored


@dataclass(frozen=True, slots=True)
class CodedKv:
    """Stores a byte for each feature, and a scale behind the features of a head.

    The scale is the largest absolute value by `most`, rounded to SCALE_DTYPE. Codes are to the nearest.
    """

    name: str
    code_dtype: torch.dtype
    """int8 or float8_e4m3fn."""
    most: float
    """The largest code."""
    model_dtype: torch.dtype
    storage_dtype: torch.dtype = torch.uint8

    def width(self, head_dim: int) -> int:
        return head_dim + _SCALE_BYTES

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        values = rows.float()
        scales = (values.abs().amax(dim=-1, keepdim=True) / self.most).to(SCALE_DTYPE)
        divisors = scales.float()
        codes = (values / divisors.masked_fill_(divisors == 0, 1.0)).clamp_(-self.most, self.most)
        if not self.code_dtype.is_floating_point:
            codes.round_()
        return torch.cat([codes.to(self.code_dtype).view(torch.uint8), scales.view(torch.uint8)], dim=-1)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        codes = stored[..., :-_SCALE_BYTES].view(self.code_dtype)
        scales = stored[..., -_SCALE_BYTES:].contiguous().view(SCALE_DTYPE)  # [..., 1]
        return (codes.float() * scales.float()).to(self.model_dtype)


def kv_format(name: str, dtype: torch.dtype) -> KvFormat:
    """Returns the format that the setting `kv_dtype` names: `auto` (the model's dtype, `dtype`), `int8` or `fp8`.

    Raises InvalidRequest for any other name.
    """
    match name:
        case "auto":
            return PlainKv(dtype)
        case "int8":
            return CodedKv("int8", torch.int8, 127.0, dtype)
        case "fp8":
            return CodedKv("fp8", torch.float8_e4m3fn, 448.0, dtype)
    raise InvalidRequest(f"kv_dtype {name!r} is not served: give auto, int8 or fp8.", param="kv_dtype")


def scope_suffix(form: KvFormat) -> str:
    """Returns what a format adds to the names of cache scopes and files: nothing for the model's own dtype."""
    return f"/kv {form.name}" if form.name else ""
