"""Lists the variants of the kernels of routed layers that are compiled ahead (see engine/kernels/compile_ahead.py).

A variant is made from the launch itself, with tensors of the device `meta`: they have shapes and dtypes but no memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from graftwork.engine.experts.triton.launch import (
    TILE_ROWS,
    ExpertTable,
    TileGrid,
    arrange_launches,
    empty_rows,
    multiply_launch,
)
from graftwork.engine.kernels.compile_ahead import KernelVariant, variant_of
from graftwork.engine.model.config import ModelConfig

_META = torch.device("meta")
_FEW_TOKENS, _MANY_TOKENS = 2, 1 << 16
"""Numbers of tokens for which tiles are small, and large."""


@dataclass(frozen=True, slots=True)
class RoutedShape:
    """The sizes of a routed layer that decide which variants are compiled."""

    name: str
    num_experts: int
    num_chosen: int
    gate_up: tuple[int, int]
    down: tuple[int, int]
    has_biases: bool
    dtype: torch.dtype

    @property
    def variants(self) -> Iterator[KernelVariant]:
        """The variants of all kernels, for tiles of each size."""
        for num_tokens in (_FEW_TOKENS, _MANY_TOKENS):
            grid = TileGrid(num_tokens, self.num_chosen, self.num_experts)
            rows, size = empty_rows(grid, _META), f"{grid.tile_rows} rows"
            assert grid.tile_rows in TILE_ROWS
            for launch in arrange_launches(rows.places, rows):
                yield variant_of(f"{self.name} {size}", launch)
            for word, (out_features, in_features) in (("gate_up", self.gate_up), ("down", self.down)):
                table = self._table(out_features, in_features)
                x, y = (
                    torch.empty(grid.num_rows, width, dtype=self.dtype, device=_META)
                    for width in (in_features, out_features)
                )
                yield variant_of(f"{self.name} {word} {size}", multiply_launch(x, y, table, rows))

    def _table(self, out_features: int, in_features: int) -> ExpertTable:
        addresses = torch.empty(self.num_experts, dtype=torch.int64, device=_META)
        alignment = 16 if in_features * self.dtype.itemsize % 16 == 0 else 1
        biases = addresses if self.has_biases else None
        return ExpertTable(addresses, biases, out_features, in_features, self.dtype, alignment)


SHAPES = (
    RoutedShape("qwen3-30b bf16", 128, 8, (1536, 2048), (2048, 768), False, torch.bfloat16),
    RoutedShape("gpt-oss-20b bf16", 32, 4, (5760, 2880), (2880, 2880), True, torch.bfloat16),
    RoutedShape("mixtral-8x7b fp16", 8, 2, (28672, 4096), (4096, 14336), False, torch.float16),
    RoutedShape("glm-4.5-air fp32", 128, 8, (2816, 4096), (4096, 1408), False, torch.float32),
)
"""The models that are compiled. Together they cover every dtype, with and without biases."""


def expert_variants() -> Iterator[KernelVariant]:
    """Yields the variants of all kernels for each model."""
    for shape in SHAPES:
        yield from shape.variants


def served_expert_variants(model: ModelConfig, dtype: torch.dtype) -> Iterator[KernelVariant]:
    """Yields what an engine may launch for the routed layers of a model."""
    experts = model.experts
    if experts is None:
        return
    shapes = experts.shapes
    yield from RoutedShape(
        "experts",
        shapes.num_experts,
        experts.router.num_chosen,
        shapes.gate_up,
        shapes.down,
        experts.has_biases,
        dtype,
    ).variants
