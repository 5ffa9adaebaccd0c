# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The Triton pair that adds every adapter's delta to one fused layer's output: shrink, then expand.

    v = x @ A.T             lora_shrink: fp32, in as many planes as there are parallel spans
    y += scale * (v @ B.T)  lora_expand: all slices in one launch, one rounding at the end

Programs are launched by tile (see lora_segments) and reach weights by address (see slice_table), so ranks differ freely
and only real ranks are read; rows of the base, empty tiles, unused slots and rank tails are neither read nor written.
No atomics: the input features are summed in spans, each in fp32, and the spans in order, so equal rows give equal bits.

`v` between the two is kept by position in the tiles, not by row of the batch.
Under the interpreter (TRITON_INTERPRET=1, tensors on the CPU) operands are upcast as soon as they are loaded, for its
bf16 arithmetic is wrong without a word. Only built-ins of the language are used, so that a copy of this module can be
interpreted in a process where triton itself is not.
"""

import torch
import triton
import triton.language as tl

from graftwork.engine.kernels.lora_plan import LoraPlan, plan_for
from graftwork.engine.kernels.lora_segments import LoraSegments
from graftwork.engine.kernels.slice_table import SliceTable

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LAUNCH_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def sum_span(
    x_rows,  # [BLOCK_ROWS, 1] pointers to the first feature of each row
    a_rows,  # [1, BLOCK_RANK] pointers to the first feature of each rank
    row_mask,
    rank_mask,
    first,
    last,
    UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """x @ A.T over the input features [first, last): fp32 [BLOCK_ROWS, BLOCK_RANK]."""
    total = tl.full((BLOCK_ROWS, BLOCK_RANK), 0.0, tl.float32)
    for block_start in range(first, last, BLOCK_IN):
        features = block_start + tl.arange(0, BLOCK_IN)
        feature_mask = features < last
        x_block = tl.load(x_rows + features[None, :], mask=row_mask[:, None] & feature_mask[None, :], other=0.0)
        a_block = tl.load(a_rows + features[:, None], mask=feature_mask[:, None] & rank_mask[None, :], other=0.0)
        if UPCAST:
            x_block = x_block.to(tl.float32)
            a_block = a_block.to(tl.float32)
        total = tl.dot(x_block, a_block, total, input_precision="ieee")
    return total


@triton.jit
def shrink_kernel(
    x,
    planes,
    a_pointers,
    ranks,
    tile_start,
    tile_length,
    tile_slot,
    permutation,
    in_features,
    span_features,
    num_spans,
    x_stride,
    plane_stride,
    plane_width,
    NUM_SLICES: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    PARALLEL_SPANS: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # in bytes, of every row of A
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """One program: one tile, one block of ranks of one slice, one span of the input features or all of them."""
    tile = tl.program_id(0) // (NUM_SLICES * RANK_BLOCKS)
    part = tl.program_id(0) % (NUM_SLICES * RANK_BLOCKS)
    slice_index = part // RANK_BLOCKS
    first_rank = (part % RANK_BLOCKS) * BLOCK_RANK
    length = tl.load(tile_length + tile)
    if length == 0:
        return
    entry = tl.load(tile_slot + tile) * NUM_SLICES + slice_index
    rank = tl.load(ranks + entry)
    if first_rank >= rank:
        return

    in_tile = tl.arange(0, BLOCK_ROWS)
    row_mask = in_tile < length
    positions = (tl.load(tile_start + tile) + in_tile).to(tl.int64)
    rows = tl.load(permutation + positions, mask=row_mask, other=0).to(tl.int64)
    rank_ids = first_rank + tl.arange(0, BLOCK_RANK)
    rank_mask = rank_ids < rank
    x_rows = x + rows[:, None] * x_stride
    a = tl.multiple_of(tl.load(a_pointers + entry).to(tl.pointer_type(WEIGHT_DTYPE)), ALIGNMENT)
    a_rows = a + rank_ids[None, :].to(tl.int64) * in_features

    if PARALLEL_SPANS:
        first = tl.program_id(1) * span_features
        last = min(first + span_features, in_features)
        total = sum_span(x_rows, a_rows, row_mask, rank_mask, first, last, UPCAST, BLOCK_ROWS, BLOCK_RANK, BLOCK_IN)
    else:
        total = tl.full((BLOCK_ROWS, BLOCK_RANK), 0.0, tl.float32)
        for span in range(num_spans):
            first = span * span_features
            last = min(first + span_features, in_features)
            total += sum_span(
                x_rows, a_rows, row_mask, rank_mask, first, last, UPCAST, BLOCK_ROWS, BLOCK_RANK, BLOCK_IN
            )

    v_columns = slice_index * (RANK_BLOCKS * BLOCK_RANK) + rank_ids
    v_pointers = planes + positions[:, None] * plane_width + v_columns[None, :]
    if PARALLEL_SPANS:
        v_pointers += tl.program_id(1).to(tl.int64) * plane_stride
    tl.store(v_pointers, total, mask=row_mask[:, None])  # zeros above the rank


@triton.jit
def find_slice(block, widths, NUM_SLICES: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """The slice that an output block lies in, and that slice's first block."""
    slice_index = 0
    first_block = 0
    blocks_before = 0
    for candidate in tl.static_range(NUM_SLICES):
        slice_index = tl.where(block >= blocks_before, candidate, slice_index)
        first_block = tl.where(block >= blocks_before, blocks_before, first_block)
        blocks_before += (tl.load(widths + candidate) + BLOCK_OUT - 1) // BLOCK_OUT
    return slice_index, first_block


@triton.jit
def sum_planes(
    v_pointers, row_mask, plane_stride, NUM_PLANES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr
):
    """v, the planes added in order: fp32 [BLOCK_ROWS, BLOCK_RANK]."""
    v = tl.full((BLOCK_ROWS, BLOCK_RANK), 0.0, tl.float32)
    for _ in tl.static_range(NUM_PLANES):
        v += tl.load(v_pointers, mask=row_mask[:, None], other=0.0)
        v_pointers += plane_stride
    return v


@triton.jit
def multiply_precisely(v, b_block, total, SPLIT_V: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """total + v @ b_block, with v's fp32 precision (see expand_precision)."""
    if SPLIT_V:
        v_high = v.to(b_block.dtype)
        v_low = (v - v_high.to(tl.float32)).to(b_block.dtype)
        if UPCAST:
            v_high = v_high.to(tl.float32)
            v_low = v_low.to(tl.float32)
            b_block = b_block.to(tl.float32)
        total = tl.dot(v_high, b_block, total)
        total = tl.dot(v_low, b_block, total)
    else:
        total = tl.dot(v, b_block.to(tl.float32), total, input_precision=PRECISION)
    return total


@triton.jit
def expand_kernel(
    planes,
    y,
    b_pointers,
    ranks,
    scales,
    offsets,
    widths,
    tile_start,
    tile_length,
    tile_slot,
    permutation,
    out_blocks,
    y_stride,
    plane_stride,
    plane_width,
    NUM_SLICES: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    SPLIT_V: tl.constexpr,  # v as the sum of two halves in the weights' dtype: fp32's precision on 16-bit units
    PRECISION: tl.constexpr,  # where v is not split: how fp32 operands are multiplied
    UPCAST: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # in bytes, of every row of B
    COLUMN_ALIGNMENT: tl.constexpr,  # in elements, of offsets and widths
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """One program: one tile, one block of output columns of one slice."""
    tile = tl.program_id(0) // out_blocks
    block = tl.program_id(0) % out_blocks
    length = tl.load(tile_length + tile)
    if length == 0:
        return
    slice_index, first_block = find_slice(block, widths, NUM_SLICES, BLOCK_OUT)
    entry = tl.load(tile_slot + tile) * NUM_SLICES + slice_index
    rank = tl.load(ranks + entry)
    if rank == 0:
        return

    in_tile = tl.arange(0, BLOCK_ROWS)
    row_mask = in_tile < length
    positions = (tl.load(tile_start + tile) + in_tile).to(tl.int64)
    rows = tl.load(permutation + positions, mask=row_mask, other=0).to(tl.int64)
    width = tl.multiple_of(tl.load(widths + slice_index), COLUMN_ALIGNMENT)
    offset = tl.multiple_of(tl.load(offsets + slice_index), COLUMN_ALIGNMENT)
    columns = (block - first_block) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column_mask = columns < width
    y_pointers = y + rows[:, None] * y_stride + (offset + columns)[None, :]
    y_mask = row_mask[:, None] & column_mask[None, :]
    y_block = tl.load(y_pointers, mask=y_mask, other=0.0).to(tl.float32)

    b = tl.multiple_of(tl.load(b_pointers + entry).to(tl.pointer_type(WEIGHT_DTYPE)), ALIGNMENT)
    v_rows = planes + positions[:, None] * plane_width + slice_index * (RANK_BLOCKS * BLOCK_RANK)
    delta = tl.full((BLOCK_ROWS, BLOCK_OUT), 0.0, tl.float32)
    for first_rank in range(0, rank, BLOCK_RANK):
        rank_ids = first_rank + tl.arange(0, BLOCK_RANK)
        rank_mask = rank_ids < rank
        v_pointers = v_rows + rank_ids[None, :]
        v = sum_planes(v_pointers, row_mask, plane_stride, NUM_PLANES, BLOCK_ROWS, BLOCK_RANK)
        b_pointers_block = b + rank_ids[:, None].to(tl.int64) * width + columns[None, :]
        b_block = tl.load(b_pointers_block, mask=rank_mask[:, None] & column_mask[None, :], other=0.0)
        delta = multiply_precisely(v, b_block, delta, SPLIT_V, PRECISION, UPCAST)

    scale = tl.load(scales + entry)
    tl.store(y_pointers, (y_block + scale * delta).to(y.dtype.element_ty), mask=y_mask)


def apply_lora(
    x: torch.Tensor, y: torch.Tensor, table: SliceTable, segments: LoraSegments, plan: LoraPlan | None = None
) -> None:
    """Add the adapters' deltas of one fused layer to its output, in place.

    `x` is [num_rows, in_features], `y` [num_rows, sum of widths]; both may be views with any stride between rows.
    Raises ValueError if the shapes do not fit.
    """
    _check_fits(x, y, table, segments)
    if segments.num_tiles == 0:
        return
    chosen = plan or plan_for(
        segments.num_tiles,
        table.num_slices,
        table.in_features,
        table.max_rank,
        max(x.element_size(), table.dtype.itemsize),
    )
    planes = empty_planes(table, segments, chosen)
    lora_shrink(x, planes, table, segments, chosen)
    lora_expand(planes, y, table, segments, chosen)


def empty_planes(table: SliceTable, segments: LoraSegments, plan: LoraPlan) -> torch.Tensor:
    """Scratch for v, each slice's ranks rounded up to whole blocks: fp32 [num_planes, rows, ranks of all slices].

    Shrink writes the blocks that hold real ranks, expand reads those alone, so it need not be cleared.
    """
    ranks_per_slice = plan.rank_blocks(table.max_rank) * plan.block_rank
    shape = (plan.num_planes, segments.permutation.shape[0], table.num_slices * ranks_per_slice)
    return torch.empty(shape, dtype=torch.float32, device=segments.packed.device)


def lora_shrink(
    x: torch.Tensor, planes: torch.Tensor, table: SliceTable, segments: LoraSegments, plan: LoraPlan
) -> None:
    """Write v = x @ A.T, by position in the tiles, into the planes; their sum, in order, is v."""
    rank_blocks = plan.rank_blocks(table.max_rank)
    grid = (segments.num_tiles * table.num_slices * rank_blocks, plan.num_planes)
    shrink_kernel[grid](
        x,
        planes,
        table.a_pointers,
        table.ranks,
        segments.tile_start,
        segments.tile_length,
        segments.tile_slot,
        segments.permutation,
        table.in_features,
        plan.span_features(table.in_features),
        plan.num_spans,
        x.stride(0),
        planes.stride(0),
        planes.stride(1),
        NUM_SLICES=table.num_slices,
        RANK_BLOCKS=rank_blocks,
        PARALLEL_SPANS=plan.parallel_spans,
        WEIGHT_DTYPE=TRITON_DTYPES[table.dtype],
        UPCAST=not x.is_cuda or x.dtype != table.dtype,
        ALIGNMENT=16 if table.is_aligned else 1,
        BLOCK_ROWS=segments.tile_rows,
        BLOCK_RANK=plan.block_rank,
        BLOCK_IN=plan.block_in,
        num_stages=plan.num_stages,
        **LAUNCH_OPTIONS,
    )


def lora_expand(
    planes: torch.Tensor, y: torch.Tensor, table: SliceTable, segments: LoraSegments, plan: LoraPlan
) -> None:
    """y += scale * (v @ B.T), in place: summed in fp32 together with y, rounded once."""
    out_blocks = sum(-(-width // plan.block_out) for width in table.slice_widths)
    expand_kernel[(segments.num_tiles * out_blocks,)](
        planes,
        y,
        table.b_pointers,
        table.ranks,
        table.scales,
        table.offsets,
        table.widths,
        segments.tile_start,
        segments.tile_length,
        segments.tile_slot,
        segments.permutation,
        out_blocks,
        y.stride(0),
        planes.stride(0),
        planes.stride(1),
        NUM_SLICES=table.num_slices,
        RANK_BLOCKS=plan.rank_blocks(table.max_rank),
        NUM_PLANES=plan.num_planes,
        WEIGHT_DTYPE=TRITON_DTYPES[table.dtype],
        UPCAST=not y.is_cuda,
        **expand_precision(table.dtype),
        ALIGNMENT=16 if table.is_aligned else 1,
        COLUMN_ALIGNMENT=16 if table.is_aligned else 1,
        BLOCK_ROWS=segments.tile_rows,
        BLOCK_RANK=plan.block_rank,
        BLOCK_OUT=plan.block_out,
        num_stages=plan.num_stages,
        **LAUNCH_OPTIONS,
    )


def expand_precision(dtype: torch.dtype) -> dict[str, bool | str]:
    """How expand multiplies v, which is fp32, by weights of this dtype without losing v's precision.

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
