"""How the keys and values of a layer are stored in a page: as they are, or as codes of one byte with scales.

Each head of a token has a scale of its own. A scale for each page would be smaller, but it would change with each token
that is appended, and then the codes of earlier tokens would too: answers would follow from how a prompt was divided into
steps, and a fork could not share its last page's content. So a stored token never changes, and it follows from its own key
or value alone.

    a layer's keys in a page    [ codes: page_tokens x kv_heads x head_dim bytes ][ scales: kv_heads x page_tokens x 2 bytes ]

All codes come before all scales, so that a GPU reads codes 16 bytes at a time, and the scales of a head at once.

Owns the layout of a layer's keys or values in a page. Never owns pages. Invariant: bytes of zeros stand for zeros, because
pages are zeroed when they begin.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from graftwork.platform.errors import InvalidRequest

SCALE_DTYPE = torch.bfloat16
"""Has the range of fp32, so that no key is too large for it."""
_SCALE_BYTES = 2


class StoredKv(NamedTuple):
    """Keys or values as they are stored: views of pages, or tokens that are to be written."""

    codes: torch.Tensor  # [..., head_dim] numbers of the model's dtype, or bytes
    scales: torch.Tensor | None = None  # [...] of SCALE_DTYPE; None if there are no scales

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return (self.codes,) if self.scales is None else (self.codes, self.scales)

    def at_pages(self, pages: torch.Tensor) -> "StoredKv":
        """Returns a copy of some pages, int64 [count]."""
        codes = self.codes.index_select(0, pages)
        return StoredKv(codes, None if self.scales is None else self.scales.index_select(0, pages))

    def put(self, places: tuple[torch.Tensor, torch.Tensor], rows: "StoredKv") -> None:
        """Writes tokens, [count, kv_heads, …], to their places: pages and positions in them, [count] each."""
        self.codes.index_put_(places, rows.codes)
        if self.scales is not None:
            assert rows.scales is not None
            self.scales.index_put_(places, rows.scales)

    def zero(self, pages: torch.Tensor) -> None:
        """Zeroes some pages, int64 [count]."""
        for part in self.parts:
            part.index_fill_(0, pages, 0)


class KvFormat(Protocol):
    """Stores heads of tokens, and reads them."""

    @property
    def name(self) -> str:
        """Names what is stored, for cache scopes and files: empty for the model's own dtype."""
        ...

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype of keys and values before they are stored."""
        ...

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of the items of a page."""
        ...

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype of codes as numbers."""
        ...

    def width(self, head_dim: int) -> int:
        """Returns how many items of `storage_dtype` a head of a token takes."""
        ...

    def of_pages(self, pages: torch.Tensor) -> StoredKv:
        """Returns views of what pages hold, [frames, page_tokens, kv_heads, …], for the keys or values of one layer.

        pages: [frames, page_tokens, kv_heads, width] of `storage_dtype`; what a page has of them is contiguous.
        """
        ...

    def encode(self, rows: torch.Tensor) -> StoredKv:
        """Returns rows [..., head_dim] of the model's dtype as they are stored."""
        ...

    def decode(self, stored: StoredKv) -> torch.Tensor:
        """Returns stored rows in the model's dtype, [..., head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class PlainKv:
    """Stores keys and values in the model's dtype."""

    model_dtype: torch.dtype
    name: str = ""

    @property
    def storage_dtype(self) -> torch.dtype:
        return self.model_dtype

    @property
    def code_dtype(self) -> torch.dtype:
        return self.model_dtype

    def width(self, head_dim: int) -> int:
        return head_dim

    def of_pages(self, pages: torch.Tensor) -> StoredKv:
        return StoredKv(pages)

    def encode(self, rows: torch.Tensor) -> StoredKv:
        return StoredKv(rows)

    def decode(self, stored: StoredKv) -> torch.Tensor:
        return stored.codes


@dataclass(frozen=True, slots=True)
class CodedKv:
    """Stores a byte for each feature, and a scale for each head of a token.

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

    def of_pages(self, pages: torch.Tensor) -> StoredKv:
        page_tokens, kv_heads, width = pages.shape[1:]
        num_codes = page_tokens * kv_heads * (width - _SCALE_BYTES)
        block = pages.flatten(1)
        codes = block[:, :num_codes].view(-1, page_tokens, kv_heads, width - _SCALE_BYTES)
        scales = block[:, num_codes:].view(SCALE_DTYPE).view(-1, kv_heads, page_tokens)
        return StoredKv(codes, scales.transpose(1, 2))

    def encode(self, rows: torch.Tensor) -> StoredKv:
        values = rows.float()
        scales = (values.abs().amax(dim=-1, keepdim=True) / self.most).to(SCALE_DTYPE)
        divisors = scales.float()
        codes = (values / divisors.masked_fill_(divisors == 0, 1.0)).clamp_(-self.most, self.most)
        if not self.code_dtype.is_floating_point:
            codes.round_()
        return StoredKv(codes.to(self.code_dtype).view(torch.uint8), scales.squeeze(-1))

    def decode(self, stored: StoredKv) -> torch.Tensor:
        codes, scales = stored
        assert scales is not None
        return (codes.view(self.code_dtype).float() * scales.float().unsqueeze(-1)).to(self.model_dtype)


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
    """Returns what a format adds to the names of cache scopes and files: nothing for the model's own dtype.

    It names the order of codes and scales too: earlier versions stored each scale behind its own codes.
    """
    return f"/kv {form.name}, scales last" if form.name else ""
