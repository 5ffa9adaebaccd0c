"""Launches the Triton kernels that add LoRA deltas to the output y of one fused layer: first shrink, then expand.

    v = x @ A.T                                            shrink: fp32, written to planes
    y = column_scale * y + column_shift + scale * v @ B.T  expand: all projections in one launch, one rounding at end

The input features are cut into spans. Each span is summed in fp32, and the spans are added in a fixed order, so equal
rows give equal bits. If several programs compute the spans in parallel, each span has its own array of partial sums of
v, called a plane. Otherwise one program computes all spans, and there is one plane.

There are two pairs of kernels: for tiles of many rows (tile_kernels.py) and for single rows (row_kernels.py). A row is
one token. The segments decide which pair runs. A program is launched for each tile (see tiles.py) and finds the weights
by their address (see slice_table.py), so adapters may have different ranks. Rows without an adapter, empty tiles,
unused slots and ranks beyond an adapter's own are neither read nor written. There are no atomics.

Under the interpreter (TRITON_INTERPRET=1, tensors on the CPU) values are converted to fp32 when they are loaded,
because the interpreter computes bf16 wrongly. The kernels use only functions of the language itself, so that a copy of
them can be interpreted in a process that compiles the others.
"""

from typing import Any

import torch

from graftwork.engine.kernels.launch import TRITON_DTYPES, Launch
from graftwork.engine.lora.triton.launch_plan import ROW_WISE, LaunchBounds, LaunchShape, LoraPlan, plan_for
from graftwork.engine.lora.triton.row_kernels import expand_rows_kernel, shrink_rows_kernel
from graftwork.engine.lora.triton.slice_table import SliceTable
from graftwork.engine.lora.triton.tile_kernels import expand_tiles_kernel, shrink_tiles_kernel
from graftwork.engine.lora.triton.tiles import LoraSegments

_WARPS = {(expand_tiles_kernel, 32): 8, (expand_rows_kernel, ROW_WISE): 8, (shrink_rows_kernel, ROW_WISE): 8}
"""The warps of one program, by kernel and rows of a tile, where they are not 4. With 4, expand spills in large tiles."""
MOST_PROGRAMS = 2048
"""The most programs that share the units of tiles: as many as a large GPU runs at a time, twice over."""


def apply_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    table: SliceTable,
    segments: LoraSegments,
    plan: LoraPlan | None = None,
    bounds: LaunchBounds | None = None,
) -> None:
    """Adds the LoRA delta of each row's adapter to `y`, in place. `y` is the base model's output of one fused layer.

    x: [num_rows, in_features], y: [num_rows, out_features], where out_features is the sum over the joined projections.
    Both may be views with any stride between rows.

    `bounds` are upper bounds of the ranks of the step's adapters. By default they cover every adapter in the table.
    Raises ValueError if the shapes do not fit.
    """
    _check_fits(x, y, table, segments)
    if segments.num_tiles == 0:
        return
    bounds = bounds or bounds_of(table)
    chosen = plan or plan_of(x, table, segments, bounds)
    planes = empty_planes(table, segments, chosen, bounds.rank)
    if bounds.rank > 0:
        lora_shrink(x, planes, table, segments, chosen)
    lora_expand(planes, y, table, segments, chosen, bounds.has_columns)


def plan_of(x: torch.Tensor, table: SliceTable, segments: LoraSegments, bounds: LaunchBounds) -> LoraPlan:
    """Returns the plan of one fused layer in one step: how the kernels are launched for x, [num_rows, in_features]."""
    return plan_for(
        LaunchShape(
            num_tiles=segments.num_tiles,
            tile_rows=segments.tile_rows,
            num_slices=table.num_slices,
            in_features=table.in_features,
            max_rank=table.max_rank,
            launched_rank=bounds.rank,
            element_bytes=max(x.element_size(), table.dtype.itemsize),
        )
    )


def bounds_of(table: SliceTable) -> LaunchBounds:
    """Returns launch bounds that hold for every adapter in the table.

    These are the largest rank that the table allows, and whether any adapter in the table scales or shifts output
    columns.
    """
    return LaunchBounds(table.max_rank, table.has_columns)


def empty_planes(table: SliceTable, segments: LoraSegments, plan: LoraPlan, rank: int) -> torch.Tensor:
    """Returns uninitialised memory for partial sums of x @ A.T: fp32 [num_planes, rows, ranks].

    A plane holds one partial sum, with a row for each token that has an adapter. Its columns are the ranks of all
    projections, and of all adapters if a token uses several. The ranks of each are padded to whole blocks. Shrink
    writes only blocks that hold real ranks, and expand reads only these. There is at least one block: without one, the
    strides would be others, and the kernels would be compiled for them.
    """
    ranks_of_all = segments.num_parts * table.num_slices * plan.rank_blocks(max(rank, 1))
    shape = (plan.num_planes, segments.permutation.shape[0], ranks_of_all * plan.block_rank)
    return torch.empty(shape, dtype=torch.float32, device=segments.packed.device)


def lora_shrink(
    x: torch.Tensor, planes: torch.Tensor, table: SliceTable, segments: LoraSegments, plan: LoraPlan
) -> None:
    """Computes x @ A.T for all rows that have an adapter, and writes it to `planes` as partial sums.

    x: [num_rows, in_features]. Each plane gets the sum over one part of the input features, so x @ A.T is the sum of
    the planes. The rows of a plane are in the order of the tiles (see tiles.py).
    """
    shrink_launch(x, planes, table, segments, plan).run()


def lora_expand(
    planes: torch.Tensor,
    y: torch.Tensor,
    table: SliceTable,
    segments: LoraSegments,
    plan: LoraPlan,
    has_columns: bool,
) -> None:
    """Applies the adapters to y, in place. `planes` are the partial sums of x @ A.T that `lora_shrink` has written.

    First multiplies y by column_scale and adds column_shift (DoRA, biases), unless `has_columns` is False. Then adds
    scale * (x @ A.T) @ B.T for each adapter. Sums are fp32 and are rounded once, to y's dtype.
    """
    expand_launch(planes, y, table, segments, plan, has_columns).run()


def shrink_launch(
    x: torch.Tensor, planes: torch.Tensor, table: SliceTable, segments: LoraSegments, plan: LoraPlan
) -> Launch:
    """Returns the launch of the shrink kernel, without running it.

    The kernel multiplies `x` by the first low-rank factor (A) of each adapter. It writes partial sums of the product to
    `planes`, fp32 [num_planes, rows, ranks].
    """
    arguments = _common_arguments(planes, table, segments, plan.block_rank)
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
        return Launch(
            shrink_rows_kernel, grid, arguments, launch_options(shrink_rows_kernel, plan, ROW_WISE, table.dtype)
        )
    arguments |= _tile_arguments(segments) | {"UPCAST": x.device.type == "cpu" or x.dtype != table.dtype}
    options = launch_options(shrink_tiles_kernel, plan, segments.tile_rows, table.dtype)
    return Launch(shrink_tiles_kernel, grid, arguments, options)


def expand_launch(
    planes: torch.Tensor,
    y: torch.Tensor,
    table: SliceTable,
    segments: LoraSegments,
    plan: LoraPlan,
    has_columns: bool,
) -> Launch:
    """Returns the launch of the expand kernel, without running it.

    The kernel multiplies the sum of `planes` by the second low-rank factor (B) of each adapter, and adds the product to
    `y`. `planes` are the output of the shrink kernel. If `has_columns` is True, it first scales and shifts columns of
    `y`.
    """
    out_blocks = sum(-(-width // plan.block_out) for width in table.slice_widths)
    num_units = segments.num_tiles * out_blocks
    arguments = _common_arguments(planes, table, segments, plan.expanded_ranks) | {
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
        options = launch_options(expand_rows_kernel, plan, ROW_WISE, table.dtype)
        return Launch(expand_rows_kernel, (num_units,), arguments, options)
    arguments |= _tile_arguments(segments) | expand_precision(table.dtype)
    arguments |= {"UPCAST": y.device.type == "cpu", "num_live": segments.num_live}
    options = launch_options(expand_tiles_kernel, plan, segments.tile_rows, table.dtype)
    return Launch(expand_tiles_kernel, (min(num_units, MOST_PROGRAMS),), arguments, options)


def launch_options(kernel: Any, plan: LoraPlan, tile_rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the options that Triton compiles one of the four kernels with, for weights of this dtype.

    They change no bit of the result.
    """
    num_warps = _WARPS.get((kernel, tile_rows), 4)
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": True, "num_stages": plan.num_stages}
    most = _most_registers(kernel, tile_rows, dtype)
    return options if most is None else options | {"maxnreg": most}


def _most_registers(kernel: Any, tile_rows: int, dtype: torch.dtype) -> int | None:
    """Returns the most registers of one thread; None leaves the number to ptxas.

    Where there is a limit, ptxas without it aims at more programs at a time, and spills for that, or takes so many
    registers that fewer programs run. The numbers are those with which no variant spills, or fewest bytes
    (benchmarks/results/kernel_builds-2026-11-28.json).
    """
    if kernel is shrink_rows_kernel:
        return 128 if dtype == torch.float32 else 96
    if kernel is expand_rows_kernel:
        return 168 if dtype == torch.float32 else 104
    if kernel is expand_tiles_kernel and tile_rows == 32:
        return {torch.float32: 128, torch.float16: 160}.get(dtype)
    return None


def _common_arguments(
    planes: torch.Tensor, table: SliceTable, segments: LoraSegments, block_rank: int
) -> dict[str, Any]:
    """Returns the arguments that all four kernels take. `block_rank` are the ranks that a program loads at once."""
    return {
        "planes": planes,
        "ranks": table.ranks,
        "tile_parts": segments.tile_parts,
        "part_slot": segments.part_slot,
        "permutation": segments.permutation,
        "slot_words": table.words.stride(0),
        "rank_blocks": planes.shape[2] // (segments.num_parts * table.num_slices * block_rank),
        "plane_stride": planes.stride(0),
        "plane_width": planes.stride(1),
        "NUM_SLICES": table.num_slices,
        "NUM_PARTS": segments.num_parts,
        "WEIGHT_DTYPE": TRITON_DTYPES[table.dtype],
        "ALIGNMENT": 16 if table.is_aligned else 1,
        "BLOCK_RANK": block_rank,
    }


def _tile_arguments(segments: LoraSegments) -> dict[str, Any]:
    """Returns the arguments that only the kernels for tiles of many rows take."""
    return {
        "tile_start": segments.tile_start,
        "tile_length": segments.tile_length,
        "BLOCK_ROWS": segments.tile_rows,
    }


def expand_precision(dtype: torch.dtype) -> dict[str, bool | str]:
    """Returns the kernel options for multiplying fp32 values by weights of this dtype, as precisely as in fp32.

    With bf16 weights, each fp32 value is split into two bf16 values. With fp16 weights there is no split, because the
    values may be too large for fp16. In that case three tf32 products are added. This is as precise as fp32, because
    tf32 can hold every fp16 weight exactly.
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
