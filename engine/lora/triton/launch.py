"""The Triton kernels that add every adapter's delta to one fused layer's output, launched: shrink, then expand.

    v = x @ A.T                                          shrink: fp32, in as many planes as there are parallel spans
    y = column_scale * y + column_shift + scale * v @ B.T    expand: all slices in one launch, one rounding at the end

There are two pairs of them, for tiles of many rows (tile_kernels) and for single rows (row_kernels); which one runs
follows from the segments. Programs are launched by tile (see lora_segments) and reach weights by address (see
slice_table), so ranks differ freely and only real ranks are read; rows of the base, empty tiles, unused slots and rank
tails are neither read nor written.
No atomics: the input features are summed in spans, each in fp32, and the spans in order, so equal rows give equal bits.

Under the interpreter (TRITON_INTERPRET=1, tensors on the CPU) operands are upcast as soon as they are loaded, for its
bf16 arithmetic is wrong without a word. Only built-ins of the language are used, so that a copy of the kernels can be
interpreted in a process where triton itself is not.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from graftwork.engine.lora.triton.launch_plan import ROW_WISE, LaunchBounds, LaunchShape, LoraPlan, plan_for
from graftwork.engine.lora.triton.row_kernels import expand_rows_kernel, shrink_rows_kernel
from graftwork.engine.lora.triton.slice_table import SliceTable
from graftwork.engine.lora.triton.tile_kernels import expand_tiles_kernel, shrink_tiles_kernel
from graftwork.engine.lora.triton.tiles import LoraSegments

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LAUNCH_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def apply_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    table: SliceTable,
    segments: LoraSegments,
    plan: LoraPlan | None = None,
    bounds: LaunchBounds | None = None,
) -> None:
    """Turn one fused layer's base output into each row's own, in place.

    `x` is [num_rows, in_features], `y` [num_rows, sum of widths]; both may be views with any stride between rows.
    `bounds` hold for every row's adapter; by default they are those of the whole table.
    Raises ValueError if the shapes do not fit.
    """
    _check_fits(x, y, table, segments)
    if segments.num_tiles == 0:
        return
    bounds = bounds or bounds_of(table)
    shape = LaunchShape(
        num_tiles=segments.num_tiles,
        tile_rows=segments.tile_rows,
        num_slices=table.num_slices,
        in_features=table.in_features,
        max_rank=table.max_rank,
        launched_rank=bounds.rank,
        element_bytes=max(x.element_size(), table.dtype.itemsize),
    )
    chosen = plan or plan_for(shape)
    planes = empty_planes(table, segments, chosen, bounds.rank)
    if bounds.rank > 0:
        lora_shrink(x, planes, table, segments, chosen)
    lora_expand(planes, y, table, segments, chosen, bounds.has_columns)


def bounds_of(table: SliceTable) -> LaunchBounds:
    """What holds for every adapter that is, or may yet come, into the table; but for columns, only for those it has."""
    return LaunchBounds(table.max_rank, table.has_columns)


def empty_planes(table: SliceTable, segments: LoraSegments, plan: LoraPlan, rank: int) -> torch.Tensor:
    """Scratch for v, ranks rounded up to whole blocks: fp32 [num_planes, rows, ranks of all parts and slices].

    Shrink writes the blocks that hold real ranks, expand reads those alone, so it need not be cleared.
    """
    ranks_of_all = segments.num_parts * table.num_slices * plan.rank_blocks(rank)
    shape = (plan.num_planes, segments.permutation.shape[0], ranks_of_all * plan.block_rank)
    return torch.empty(shape, dtype=torch.float32, device=segments.packed.device)


def lora_shrink(
    x: torch.Tensor, planes: torch.Tensor, table: SliceTable, segments: LoraSegments, plan: LoraPlan
) -> None:
    """Write v = x @ A.T, by position in the tiles, into the planes; their sum, in order, is v."""
    shrink_launch(x, planes, table, segments, plan).run()


def lora_expand(
    planes: torch.Tensor,
    y: torch.Tensor,
    table: SliceTable,
    segments: LoraSegments,
    plan: LoraPlan,
    has_columns: bool,
) -> None:
    """y = column_scale * y + column_shift + scale * (v @ B.T), in place: summed in fp32, rounded once.

    Without `has_columns` no adapter's columns are looked at.
    """
    expand_launch(planes, y, table, segments, plan, has_columns).run()


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and all that it is told."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **LAUNCH_OPTIONS)


def shrink_launch(
    x: torch.Tensor, planes: torch.Tensor, table: SliceTable, segments: LoraSegments, plan: LoraPlan
) -> Launch:
    """What lora_shrink launches."""
    arguments = _common_arguments(planes, table, segments, plan)
    grid = (segments.num_tiles * segments.num_parts * table.num_slices * arguments["rank_blocks"], plan.num_planes)
    arguments |= {
        "x": x,
        "a_pointers": table.a_pointers,
        "in_features": table.in_features,
        "span_features": plan.span_features(table.in_features),
        "num_spans": plan.num_spans,
        "x_stride": x.stride(0),
        "PARALLEL_SPANS": plan.parallel_spans,
        "BLOCK_IN": plan.block_in,
    }
    if segments.tile_rows == ROW_WISE:
        return Launch(shrink_rows_kernel, grid, arguments)
    arguments |= _tile_arguments(segments) | {"UPCAST": not x.is_cuda or x.dtype != table.dtype}
    return Launch(shrink_tiles_kernel, grid, arguments)


def expand_launch(
    planes: torch.Tensor,
    y: torch.Tensor,
    table: SliceTable,
    segments: LoraSegments,
    plan: LoraPlan,
    has_columns: bool,
) -> Launch:
    """What lora_expand launches."""
    out_blocks = sum(-(-width // plan.block_out) for width in table.slice_widths)
    grid = (segments.num_tiles * out_blocks,)
    arguments = _common_arguments(planes, table, segments, plan) | {
        "y": y,
        "b_pointers": table.b_pointers,
        "column_scales": table.column_scales,
        "column_shifts": table.column_shifts,
        "scales": table.scales,
        "offsets": table.offsets,
        "widths": table.widths,
        "part_weight": segments.part_weight,
        "out_blocks": out_blocks,
        "y_stride": y.stride(0),
        "NUM_PLANES": plan.num_planes,
        "HAS_COLUMNS": has_columns,
        "COLUMN_ALIGNMENT": 16 if table.is_aligned else 1,
        "BLOCK_OUT": plan.block_out,
    }
    if segments.tile_rows == ROW_WISE:
        return Launch(expand_rows_kernel, grid, arguments)
    arguments |= _tile_arguments(segments) | expand_precision(table.dtype) | {"UPCAST": not y.is_cuda}
    return Launch(expand_tiles_kernel, grid, arguments)


def _common_arguments(
    planes: torch.Tensor, table: SliceTable, segments: LoraSegments, plan: LoraPlan
) -> dict[str, Any]:
    """What all four kernels are told."""
    return {
        "planes": planes,
        "ranks": table.ranks,
        "tile_parts": segments.tile_parts,
        "part_slot": segments.part_slot,
        "permutation": segments.permutation,
        "slot_words": table.words.stride(0),
        "rank_blocks": planes.shape[2] // (segments.num_parts * table.num_slices * plan.block_rank),
        "plane_stride": planes.stride(0),
        "plane_width": planes.stride(1),
        "NUM_SLICES": table.num_slices,
        "NUM_PARTS": segments.num_parts,
        "WEIGHT_DTYPE": TRITON_DTYPES[table.dtype],
        "ALIGNMENT": 16 if table.is_aligned else 1,
        "BLOCK_RANK": plan.block_rank,
        "num_stages": plan.num_stages,
    }


def _tile_arguments(segments: LoraSegments) -> dict[str, Any]:
    """What the kernels for tiles of many rows are told besides."""
    return {
        "tile_start": segments.tile_start,
        "tile_length": segments.tile_length,
        "BLOCK_ROWS": segments.tile_rows,
    }


def expand_precision(dtype: torch.dtype) -> dict[str, bool | str]:
    """How tiles are multiplied by weights of this dtype in expand, without losing the precision of v, which is fp32.

    v is not split into fp16 halves, for it may exceed fp16's range; fp16 weights are exact in tf32, so three of its
    products are as good as fp32.
    """
    return {"SPLIT_V": dtype == torch.bfloat16, "PRECISION": "tf32x3" if dtype == torch.float16 else "ieee"}


def _check_fits(x: torch.Tensor, y: torch.Tensor, table: SliceTable, segments: LoraSegments) -> None:
    if x.shape[1:] != (table.in_features,) or y.shape[1:] != (table.out_features,):
        raise ValueError(
            f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit a layer of {table.in_features} input "
            f"and {table.out_features} output features"
        )
    if x.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError("the features of a row must be adjacent in memory: pass a contiguous x and y")
    if min(x.shape[0], y.shape[0]) < segments.num_rows:
        raise ValueError(f"the segments speak of {segments.num_rows} rows, x has {x.shape[0]} and y {y.shape[0]}")
