"""Chooses the blocks of the attention kernels for a model: which variants of the kernels are compiled and launched.

The choice follows from the model alone. It never follows from a step, so all steps use the same few variants.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

_LARGEST_ROWS = 128
_SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of a model's attention, of its pages, and its dtypes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype
    """The dtype of queries and results: fp32, bf16 or fp16."""
    kv_dtype: torch.dtype
    """The dtype of keys and values in the pages: `dtype`, or that of codes with scales, int8 or float8_e4m3fn. The kernels
    convert codes to `dtype`.
    """

    def __post_init__(self) -> None:
        if self.dtype not in _SOURCE_DTYPES:
            raise ValueError(f"attention computes in fp32, bf16 or fp16, not in {self.dtype}")
        if self.group > _LARGEST_ROWS:
            raise ValueError(f"{self.group} query heads share one KV head: the kernels serve at most {_LARGEST_ROWS}")

    @property
    def has_codes(self) -> bool:
        """Whether pages have codes with scales."""
        return self.kv_dtype != self.dtype

    @property
    def group(self) -> int:
        """The number of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_dim(self) -> int:
        """`head_dim` rounded up to a power of two, which matrix units need."""
        return max(_power_of_two(self.head_dim), 16)

    @property
    def row_bytes(self) -> int:
        """Bytes of one key as the matrix units read it."""
        return self.block_dim * self.dtype.itemsize

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time arguments that all kernels over pages take."""
        return {
            "PAGE_TOKENS": self.page_tokens,
            "KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_DIM": self.block_dim,
        }


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one kernel, and the options that it is compiled with."""

    rows: int
    """Rows of the matrix product: queries times the heads of a group."""
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """The most registers of one thread; None leaves the number to ptxas."""

    @property
    def options(self) -> dict[str, int | bool]:
        chosen = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        return chosen if self.max_registers is None else chosen | {"maxnreg": self.max_registers}


def decode_blocks(shape: AttentionShape) -> Blocks:
    """Returns the blocks for decoding: the smallest matrix product, and two blocks of keys and values in flight.

    Blocks of 32 keys take so few registers that four programs run on a multiprocessor at a time; with 64 keys it is two,
    and a layer takes 9 % longer for 128 rows on an H200 (benchmarks/results/gpu_day-2026-11-28.json). In fp32 one block is in flight,
    because matrix units do not compute its products, which take many registers. Codes take more registers there: blocks of 16
    keys and eight warps spill nothing.
    """
    is_fp32 = shape.dtype == torch.float32
    if is_fp32 and shape.has_codes:
        return Blocks(max(_power_of_two(shape.group), 16), keys=16, num_warps=8, num_stages=3)
    keys = max(min(32, 16 * 1024 // shape.row_bytes), 16)
    is_small = not is_fp32 and shape.head_dim == shape.block_dim <= 128
    return Blocks(
        max(_power_of_two(shape.group), 16),
        keys,
        num_warps=4,
        num_stages=3 if is_fp32 else 5,
        max_registers=128 if is_small else None,
    )


def rolling_decode_blocks(shape: AttentionShape) -> Blocks:
    """Returns the blocks for decoding with a rolling window: those of other rows. Over codes, queries that are turned leave too
    few of 128 registers, so three programs run on a multiprocessor at a time.
    """
    blocks = decode_blocks(shape)
    return replace(blocks, max_registers=168) if shape.has_codes and blocks.max_registers is not None else blocks


def chunk_blocks(shape: AttentionShape) -> Blocks:
    """Returns the blocks for prefill: as many queries as registers can hold, so that keys are read seldom.

    Products in fp32 take many registers, because matrix units do not compute them. So their blocks have half as many
    keys: with more, ptxas spills up to 432 bytes of a thread.
    """
    if shape.dtype == torch.float32:
        rows, block_bytes = 32 if shape.row_bytes < 1024 else 16, 8 * 1024
    else:
        rows, block_bytes = 128 if shape.row_bytes <= 256 else 64, 16 * 1024
    keys = max(min(64, block_bytes // shape.row_bytes), 16)
    stages = 3 if shape.dtype == torch.float32 else 5
    return Blocks(max(rows, _power_of_two(shape.group)), keys, num_warps=8, num_stages=stages)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
