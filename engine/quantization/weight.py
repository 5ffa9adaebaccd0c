"""The quantised weight of one linear layer, in the one form that all published forms are brought into.

    value[o, k] = (code[o, k] - zero[o, g]) * scale[o, g],    g the group of column k

Owns the codes, scales and zero points, and how they lie in memory. Never reads a file and never multiplies. Invariant:
`dense` gives the values that the library that wrote the checkpoint computes, bit by bit: the product is rounded to the
dtype of the scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch.nn import functional

from graftwork.engine.quantization.mxfp4 import float4_values, nibbles_of, powers_of_two

BLOCK = 128
"""Rows of codes are padded to a multiple of this many."""
LANES = 16
WHOLE_ROW = 1 << 40
"""The group size of a weight with one scale for each output."""


class Codes(Enum):
    """What a code is."""

    INT4 = "int4"
    """From -8 to 7, two in a byte."""
    INT8 = "int8"
    """From -128 to 127."""
    FLOAT8 = "float8_e4m3fn"
    FLOAT4 = "float4_e2m1"
    """From -6 to 6, two in a byte, with scales that are powers of two: MXFP4 (see mxfp4.py)."""

    @property
    def is_half(self) -> bool:
        """Whether two codes are in a byte."""
        return self in (Codes.INT4, Codes.FLOAT4)

    @property
    def block_bytes(self) -> int:
        """The bytes of BLOCK codes."""
        return BLOCK // 2 if self.is_half else BLOCK


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out_features, in_features] as codes with scales."""

    kind: Codes
    packed: torch.Tensor  # [out_features, blocks * block_bytes] uint8
    """In INT4 and FLOAT4, word l of a block's sixteen 32-bit words has in its nibble j the code j * 16 + l of the block."""
    scales: torch.Tensor  # [out_features, groups] fp32; in FLOAT4 uint8, of which the scale is 2 ** (number - 127)
    """Rows are padded as codes are: a group of padding has the scale 0, or in FLOAT4 the smallest one."""
    zeros: torch.Tensor | None  # [out_features, groups] int16
    group_size: int
    """Columns of a group, as they are stored: 32, 64, 128, a larger power of two, or WHOLE_ROW."""
    in_features: int
    scale_dtype: torch.dtype
    """The dtype to which values are rounded."""
    order: torch.Tensor | None = None  # [in_features] int64
    """The input feature of each stored column, if columns are sorted by groups."""
    in_words: bool = False
    """Whether codes of FLOAT8 are in words, as kernels on a GPU read them: word l of a block's 32 words has in its byte j the
    code j * 32 + l of the block."""

    @classmethod
    def of(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        *,
        kind: Codes,
        group_size: int,
        order: torch.Tensor | None = None,
    ) -> "QuantizedWeight":
        """Packs codes [out_features, in_features] of int8 or float8_e4m3fn, with scales and zeros [out_features, groups].

        Codes of FLOAT4 are uint8, from 0 to 15, and their scales uint8 too. Columns are in the order in which they are to
        be stored.
        """
        in_features = codes.shape[1]
        bytes_ = functional.pad(codes.view(torch.uint8), (0, -in_features % BLOCK))
        missing = (0, -(-bytes_.shape[1] // group_size) - scales.shape[1])
        are_powers = kind is Codes.FLOAT4
        return cls(
            kind=kind,
            packed=_nibbles(bytes_) if kind.is_half else bytes_.contiguous(),
            scales=functional.pad(scales if are_powers else scales.float(), missing).contiguous(),
            zeros=None
            if zeros is None or not zeros.any()
            else functional.pad(zeros.to(torch.int16), missing).contiguous(),
            group_size=group_size,
            in_features=in_features,
            scale_dtype=torch.float32 if are_powers else scales.dtype,
            order=order,
        )

    @classmethod
    def of_mxfp4(cls, blocks: torch.Tensor, scales: torch.Tensor) -> "QuantizedWeight":
        """Packs a weight of MXFP4: blocks uint8 [out_features, num_blocks, 16], scales uint8 [out_features, num_blocks]."""
        return cls.of(nibbles_of(blocks), scales, kind=Codes.FLOAT4, group_size=2 * blocks.shape[-1])

    @property
    def out_features(self) -> int:
        return self.packed.shape[0]

    @property
    def num_bytes(self) -> int:
        tensors = (self.packed, self.scales, self.zeros, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def to(self, device: torch.device) -> "QuantizedWeight":
        return replace(
            self,
            packed=self.packed.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            order=None if self.order is None else self.order.to(device),
        )

    @property
    def for_kernels(self) -> "QuantizedWeight":
        """The same weight as kernels on a GPU read it: scales adjacent along the outputs, codes of FLOAT8 in words."""
        moves = self.kind is Codes.FLOAT8 and not self.in_words
        return replace(
            self,
            packed=_into_words(self.packed) if moves else self.packed,
            scales=self.scales.t().contiguous().t(),
            in_words=self.in_words or moves,
        )

    @classmethod
    def joined(cls, weights: Sequence["QuantizedWeight"]) -> "QuantizedWeight | None":
        """Returns weights with the same input as one, their outputs in order. None if they have not the same form."""
        first = weights[0]
        forms = {(one.kind, one.group_size, one.in_features, one.scale_dtype, one.in_words) for one in weights}
        orders = [one.order for one in weights]
        if len(forms) > 1 or any((order is None) != (first.order is None) for order in orders):
            return None
        if first.order is not None and not all(
            order is not None and torch.equal(order, first.order) for order in orders
        ):
            return None
        zeros = None
        if any(one.zeros is not None for one in weights):
            zeros = torch.cat(
                [torch.zeros_like(one.scales, dtype=torch.int16) if one.zeros is None else one.zeros for one in weights]
            )
        packed, scales = torch.cat([one.packed for one in weights]), torch.cat([one.scales for one in weights])
        return replace(first, packed=packed, scales=scales, zeros=zeros)

    def codes(self) -> torch.Tensor:
        """Returns the codes in the stored order: [out_features, in_features] int8, float8_e4m3fn, or uint8 in FLOAT4."""
        if not self.kind.is_half:
            dtype = torch.int8 if self.kind is Codes.INT8 else torch.float8_e4m3fn
            stored = _out_of_words(self.packed) if self.in_words else self.packed
            return stored[:, : self.in_features].view(dtype)
        words = self.packed.view(torch.int32).view(self.out_features, -1, 1, LANES)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)[:, None]
        nibbles = ((words >> shifts) & 15).to(torch.int8).flatten(1)  # [out_features, blocks * 128]
        codes = nibbles.view(torch.uint8) if self.kind is Codes.FLOAT4 else (nibbles ^ 8) - 8
        return codes[:, : self.in_features]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight as the library that wrote it computes it, in `dtype`: [out_features, in_features]."""
        values = self.codes()
        groups = torch.arange(self.in_features, device=values.device) // self.group_size
        if self.kind is Codes.FLOAT4:
            products = float4_values(values) * powers_of_two(self.scales)[:, groups]
            return self.sorted_back(products.to(dtype))
        if self.zeros is not None:
            values = values.to(torch.int16) - self.zeros[:, groups]
        products = (values.float() * self.scales[:, groups]).to(self.scale_dtype)
        return self.sorted_back(products.to(dtype))

    def sorted_back(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns columns in the order of the input features: [out_features, in_features]."""
        if self.order is None:
            return stored
        return torch.empty_like(stored).index_copy_(1, self.order, stored)

    def rows(self, start: int, end: int) -> "QuantizedWeight":
        """Returns the outputs [start, end) as a copy."""
        return replace(
            self,
            packed=self.packed[start:end].clone(),
            scales=self.scales[start:end].clone(),
            zeros=None if self.zeros is None else self.zeros[start:end].clone(),
        )

    def columns(self, start: int, end: int) -> "QuantizedWeight | None":
        """Returns the input features [start, end) as a copy. None if a group would be cut, or columns are sorted."""
        cuts = self.group_size != WHOLE_ROW and (start % self.group_size or (end - start) % self.group_size)
        if self.order is not None or (cuts and (start, end) != (0, self.in_features)):
            return None
        groups = (
            slice(None) if self.group_size == WHOLE_ROW else slice(start // self.group_size, end // self.group_size)
        )
        codes = self.codes()[:, start:end].contiguous()
        part = QuantizedWeight.of(
            codes,
            self.scales[:, groups],
            None if self.zeros is None else self.zeros[:, groups],
            kind=self.kind,
            group_size=self.group_size,
        )
        return replace(part, scale_dtype=self.scale_dtype)


_WORD_BYTES = 4


def _into_words(packed: torch.Tensor) -> torch.Tensor:
    """Puts codes of FLOAT8 into words. See `in_words`."""
    return packed.view(len(packed), -1, _WORD_BYTES, BLOCK // _WORD_BYTES).transpose(2, 3).reshape(packed.shape)


def _out_of_words(packed: torch.Tensor) -> torch.Tensor:
    return packed.view(len(packed), -1, BLOCK // _WORD_BYTES, _WORD_BYTES).transpose(2, 3).reshape(packed.shape)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Packs bytes, two in one: [out_features, blocks * 64] uint8 from [out_features, blocks * 128] uint8."""
    blocks = (codes & 15).view(len(codes), -1, BLOCK // LANES, LANES)  # [out, blocks, nibble, word]
    pairs = blocks[:, :, 0::2] | (blocks[:, :, 1::2] << 4)  # [out, blocks, byte of the word, word]
    return pairs.transpose(2, 3).reshape(len(codes), -1).contiguous()
