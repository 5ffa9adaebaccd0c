"""A fused layer of three adapters, small enough for the interpreter."""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import torch

from graftwork.engine.lora.triton.launch_plan import ROW_WISE, LoraPlan
from graftwork.engine.lora.triton.random_adapters import random_slots
from graftwork.engine.lora.triton.slice_table import build_table
from graftwork.engine.lora.triton.tiles import RowOwner, build_segments

IN_FEATURES = 104  # no multiple of a block, and no multiple of 16
WIDTHS = (72, 24, 24)  # as in grouped-query attention, and the widest takes two blocks
RANKS = ((1, 3, 8), (24, 0, 12), (16, 16, 64))
OWNERS: list[int | None] = [2, None, 0, 1, 1, 2, None, 0]
WAYS = (ROW_WISE, 16)
"""Rows to a tile: of the row-wise kernels, and of the grouped ones."""

SPLIT_PLAN = LoraPlan(
    block_in=32, block_rank=32, block_out=64, expanded_ranks=16, num_spans=2, parallel_spans=True, num_stages=1
)
SERIAL_PLAN = replace(SPLIT_PLAN, parallel_spans=False)


class FusedLayer:
    """A fused layer with three adapters, an input and a base output."""

    def __init__(self, dtype: torch.dtype = torch.float32, num_rows: int = len(OWNERS)) -> None:
        generator = torch.Generator().manual_seed(7)
        self.slots = random_slots(RANKS, IN_FEATURES, WIDTHS, dtype, generator)
        self.table = build_table(self.slots, WIDTHS, IN_FEATURES, dtype, "cpu")
        self.x = torch.randn(num_rows, IN_FEATURES, generator=generator).to(dtype)
        self.y = torch.randn(num_rows, sum(WIDTHS), generator=generator).to(dtype)

    def run(
        self,
        lora_matmul: ModuleType,
        owners: Sequence[RowOwner | None],
        tile_rows: int,
        plan: LoraPlan = SPLIT_PLAN,
    ) -> torch.Tensor:
        """The output that the kernels make of y, which is left as it is."""
        y = self.y.clone()
        lora_matmul.apply_lora(self.x, y, self.table, build_segments(owners, tile_rows=tile_rows), plan)
        return y


def assert_bits_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
