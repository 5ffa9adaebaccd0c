"""Lists the variants of the Triton LoRA kernels that are compiled ahead (see engine/kernels/compile_ahead.py).

A variant is made from the launch itself, with tensors of the device `meta`: they have shapes and dtypes but no memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from graftwork.engine.kernels.compile_ahead import KernelVariant, variant_of
from graftwork.engine.kernels.launch import Launch
from graftwork.engine.lora.resident_adapter import pages_of_ranks
from graftwork.engine.lora.triton.launch import empty_planes, expand_launch, shrink_launch
from graftwork.engine.lora.triton.launch_plan import GROUPED_TILE_ROWS, ROW_WISE, TILE_ROWS, LaunchShape, plan_for
from graftwork.engine.lora.triton.slice_table import empty_table
from graftwork.engine.lora.triton.tiles import SegmentCapacity, cut_segments
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.projections import GroupShape, group_shapes

_META = torch.device("meta")
_FEW_TILES, _MANY_TILES = 1, 1024
"""Numbers of tiles for which the spans of the input features are summed by several programs, or by one."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of one fused layer (such as qkv) in one step. They decide which kernel variants are launched."""

    name: str
    num_tiles: int
    tile_rows: int
    group: GroupShape
    max_rank: int
    dtype: torch.dtype
    has_mixtures: bool = False
    has_columns: bool = False

    @property
    def launches(self) -> tuple[Launch, Launch]:
        """The launches of shrink and expand. Their tensors have no memory."""
        shape = self.group
        table = empty_table(1, shape.widths, shape.in_features, self.max_rank, self.dtype, _META)
        num_rows = self.num_tiles
        capacity = SegmentCapacity(num_rows, num_rows, self.tile_rows, self.has_mixtures)
        segments = cut_segments([], capacity).on(torch.empty(capacity.num_words, dtype=torch.int32, device=_META))
        plan = plan_for(
            LaunchShape(
                num_tiles=self.num_tiles,
                tile_rows=self.tile_rows,
                num_slices=len(shape.widths),
                in_features=shape.in_features,
                max_rank=self.max_rank,
                launched_rank=self.max_rank,
                element_bytes=self.dtype.itemsize,
            )
        )
        planes = empty_planes(table, segments, plan, self.max_rank)
        x, y = (
            torch.empty(num_rows, width, dtype=self.dtype, device=_META)
            for width in (shape.in_features, table.out_features)
        )
        return (
            shrink_launch(x, planes, table, segments, plan),
            expand_launch(planes, y, table, segments, plan, self.has_columns),
        )

    @property
    def variants(self) -> list[KernelVariant]:
        """The variants of shrink and expand."""
        name = f"{self.name} {str(self.dtype).removeprefix('torch.')} r{self.max_rank}"
        return [variant_of(name, launch) for launch in self.launches]


_QKV, _OUTPUT = GroupShape(4096, (4096, 1024, 1024)), GroupShape(4096, (4096,))
_GATE_UP, _DOWN = GroupShape(4096, (14336, 14336)), GroupShape(14336, (4096,))
SHAPES = (
    LayerShape("qkv prefill", 256, GROUPED_TILE_ROWS[1], _QKV, 128, torch.bfloat16),
    LayerShape("qkv decode", 32, ROW_WISE, _QKV, 64, torch.bfloat16),
    LayerShape("down grouped", 32, GROUPED_TILE_ROWS[0], _DOWN, 64, torch.bfloat16, True, True),
    LayerShape("down decode", 512, ROW_WISE, _DOWN, 64, torch.bfloat16, True, True),
    LayerShape("gate_up small", 8, GROUPED_TILE_ROWS[0], _GATE_UP, 16, torch.float16),
    LayerShape("gate_up row", 8, ROW_WISE, _GATE_UP, 16, torch.float16),
    LayerShape("o prefill", 256, GROUPED_TILE_ROWS[1], _OUTPUT, 128, torch.float32),
    LayerShape("o decode", 32, ROW_WISE, _OUTPUT, 128, torch.float32),
)
"""The shapes that are compiled. Together they cover every dtype and tile size, parallel and serial spans, one and
several blocks of ranks, and layers with and without mixtures and columns.
"""


def lora_variants() -> Iterator[KernelVariant]:
    """Yields the variants of the shrink and the expand kernel for each layer shape."""
    for shape in SHAPES:
        yield from shape.variants


def served_lora_variants(model: ModelConfig, dtype: torch.dtype, max_rank: int) -> Iterator[KernelVariant]:
    """Yields what an engine may launch for adapters of up to `max_rank` ranks: in each group of projections, for tiles
    of each size, with and without mixtures and changes of columns, and with few and many tiles.
    """
    rank, flags = pages_of_ranks(max_rank), (False, True)
    groups = dict.fromkeys((name, shape) for (_, name), shape in group_shapes(model).items())
    for (group, shape), tile_rows, has_mixtures, has_columns in product(groups, TILE_ROWS, flags, flags):
        words = [group, f"{tile_rows} rows", *(["mixtures"] * has_mixtures), *(["columns"] * has_columns)]
        name = " ".join(words)
        for num_tiles in (_FEW_TILES, _MANY_TILES):
            layer = LayerShape(name, num_tiles, tile_rows, shape, rank, dtype, has_mixtures, has_columns)
            yield from layer.variants
