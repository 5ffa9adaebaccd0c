# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines the grouped kernels. One program takes a tile (several rows of one adapter) and multiplies on matrix units.

    shrink_tiles  a program computes one tile, adapter, projection and block of ranks
    expand_tiles  a program computes one tile and one block of output columns of one projection

shrink_tiles writes x @ A.T, and expand_tiles reads it. Its rows are in the order of the tiles and not of the batch. The
input features may be cut into spans that are summed in parallel; then shrink_tiles has a program for each span.
"""

import triton
import triton.language as tl

from graftwork.engine.lora.triton.expand_blocks import (
    COUNTS,
    UNALIGNED,
    change_columns,
    find_slice,
    is_changed,
    load_part,
)


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
    """Returns the product of one tile (several rows of x) and one block of ranks of the low-rank factor A.

    Sums only over the input features [first, last). The result is fp32 [BLOCK_ROWS, BLOCK_RANK].
    """
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


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def shrink_tiles_kernel(
    x,
    planes,
    a_pointers,
    ranks,
    tile_start,
    tile_length,
    tile_parts,
    part_slot,
    permutation,
    slot_words,
    rank_blocks,
    in_features,
    span_features,
    num_spans,
    x_stride,
    plane_stride,
    plane_width,
    NUM_SLICES: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARALLEL_SPANS: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # in bytes, of every row of A
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Multiplies one tile (several rows of x) by one block of ranks of the low-rank factor A.

    A program serves one adapter and one projection. The input features are cut into spans. With PARALLEL_SPANS, each
    program sums over one span, and `planes` has an array of partial sums for each span. Otherwise one program sums over
    all spans, and `planes` has one array.
    """
    blocks_a_tile = NUM_PARTS * NUM_SLICES * rank_blocks
    tile = tl.program_id(0) // blocks_a_tile
    block = tl.program_id(0) % blocks_a_tile
    part = block // (NUM_SLICES * rank_blocks)
    slice_index = block // rank_blocks % NUM_SLICES
    first_rank = block % rank_blocks * BLOCK_RANK
    num_parts = tl.load(tile_parts + tile)
    slot = tl.load(part_slot + tile * NUM_PARTS + part)
    in_tile = tl.arange(0, BLOCK_ROWS)
    row_mask = in_tile < tl.load(tile_length + tile)
    positions = (tl.load(tile_start + tile) + in_tile).to(tl.int64)
    rank = tl.load(ranks + slot * slot_words * 2 + slice_index)
    address = tl.load(a_pointers + slot * slot_words + slice_index)
    rows = tl.load(permutation + positions, mask=row_mask, other=0).to(tl.int64)
    if (part >= num_parts) | (first_rank >= rank):
        return

    rank_ids = first_rank + tl.arange(0, BLOCK_RANK)
    rank_mask = rank_ids < rank
    x_rows = x + rows[:, None] * x_stride
    a = tl.multiple_of(address.to(tl.pointer_type(WEIGHT_DTYPE)), ALIGNMENT)
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

    v_columns = (part * NUM_SLICES + slice_index) * (rank_blocks * BLOCK_RANK) + rank_ids
    v_pointers = planes + positions[:, None] * plane_width + v_columns[None, :]
    if PARALLEL_SPANS:
        v_pointers += tl.program_id(1).to(tl.int64) * plane_stride
    tl.store(v_pointers, total, mask=row_mask[:, None])  # zeros above the rank


@triton.jit
def sum_planes(
    v_pointers, row_mask, plane_stride, NUM_PLANES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr
):
    """Returns the sum of NUM_PLANES arrays of partial sums, added in order: fp32 [BLOCK_ROWS, BLOCK_RANK].

    `v_pointers` are the addresses of the elements in the first array. The arrays are `plane_stride` elements apart.
    """
    v = tl.full((BLOCK_ROWS, BLOCK_RANK), 0.0, tl.float32)
    for _ in tl.static_range(NUM_PLANES):
        v += tl.load(v_pointers, mask=row_mask[:, None], other=0.0)
        v_pointers += plane_stride
    return v


@triton.jit
def multiply_precisely(v, b_block, total, SPLIT_V: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Returns total + v @ b_block, as precise as in fp32 (see launch.expand_precision).

    v: fp32 [BLOCK_ROWS, BLOCK_RANK], b_block: [BLOCK_RANK, BLOCK_OUT], total: fp32 [BLOCK_ROWS, BLOCK_OUT].
    """
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
def tile_product(
    v_rows,  # [BLOCK_ROWS, 1] pointers to the first rank in the first plane
    address,
    rank,
    row_mask,
    columns,
    column_mask,
    width,
    plane_stride,
    NUM_PLANES: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    SPLIT_V: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Returns the product of a tile's rows of x @ A.T, the sum of the planes, and the columns of B at `address`: fp32
    [BLOCK_ROWS, BLOCK_OUT]. It is zero for rank 0.
    """
    b = tl.multiple_of(address.to(tl.pointer_type(WEIGHT_DTYPE)), ALIGNMENT)
    delta = tl.full((BLOCK_ROWS, BLOCK_OUT), 0.0, tl.float32)
    for first_rank in range(0, rank, BLOCK_RANK):
        rank_ids = first_rank + tl.arange(0, BLOCK_RANK)
        rank_mask = rank_ids < rank
        v = sum_planes(v_rows + rank_ids[None, :], row_mask, plane_stride, NUM_PLANES, BLOCK_ROWS, BLOCK_RANK)
        b_pointers = b + rank_ids[:, None].to(tl.int64) * width + columns[None, :]
        b_block = tl.load(b_pointers, mask=rank_mask[:, None] & column_mask[None, :], other=0.0)
        delta = multiply_precisely(v, b_block, delta, SPLIT_V, PRECISION, UPCAST)
    return delta


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def expand_tiles_kernel(
    planes,
    y,
    b_pointers,
    column_scales,
    column_shifts,
    ranks,
    scales,
    offsets,
    widths,
    num_live,
    tile_start,
    tile_length,
    tile_parts,
    part_slot,
    part_weight,
    permutation,
    slot_words,
    rank_blocks,
    out_blocks,
    y_stride,
    plane_stride,
    plane_width,
    NUM_SLICES: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
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
    """Applies the adapters of tiles (several rows) to blocks of output columns of y. A unit is one tile and one block.

    The programs take the units of the tiles that have rows in turn, so that a grid of any size computes all of them, and
    none is launched for padding. First scales and shifts y (DoRA, biases). Then multiplies the sum of `planes` by each
    adapter's scale and low-rank factor B, and adds the products to y. `planes` holds the partial sums that
    shrink_tiles_kernel has written.
    """
    num_units = tl.load(num_live) * out_blocks
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        tile = unit // out_blocks
        block = unit % out_blocks
        num_parts = tl.load(tile_parts + tile)
        in_tile = tl.arange(0, BLOCK_ROWS)
        row_mask = in_tile < tl.load(tile_length + tile)
        positions = (tl.load(tile_start + tile) + in_tile).to(tl.int64)
        parts = part_slot + tile * NUM_PARTS
        weights = part_weight + tile * NUM_PARTS
        slice_index, width, offset, first_block = find_slice(
            block, widths, offsets, NUM_SLICES, BLOCK_OUT, COLUMN_ALIGNMENT
        )
        rows = tl.load(permutation + positions, mask=row_mask, other=0).to(tl.int64)
        rank, address, scale = load_part(parts, weights, 0, ranks, b_pointers, scales, slice_index, slot_words)
        if is_changed(
            rank, ranks, column_scales, column_shifts, parts, num_parts, slice_index, slot_words,
            NUM_PARTS, HAS_COLUMNS,
        ):  # fmt: skip
            columns = (block - first_block) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
            column_mask = columns < width
            y_pointers = y + rows[:, None] * y_stride + (offset + columns)[None, :]
            y_mask = row_mask[:, None] & column_mask[None, :]
            y_block = tl.load(y_pointers, mask=y_mask, other=0.0).to(tl.float32)
            if HAS_COLUMNS:
                entry = tl.load(parts) * slot_words + slice_index
                y_block = change_columns(y_block, column_scales, column_shifts, entry, columns[None, :], width)

            v_rows = planes + positions[:, None] * plane_width + slice_index * (rank_blocks * BLOCK_RANK)
            y_block += scale * tile_product(
                v_rows, address, rank, row_mask, columns, column_mask, width, plane_stride,
                NUM_PLANES, WEIGHT_DTYPE, SPLIT_V, PRECISION, UPCAST, ALIGNMENT, BLOCK_ROWS, BLOCK_RANK, BLOCK_OUT,
            )  # fmt: skip
            if NUM_PARTS > 1:
                for part in range(1, num_parts):
                    v_rows += NUM_SLICES * (rank_blocks * BLOCK_RANK)
                    rank, address, scale = load_part(
                        parts, weights, part, ranks, b_pointers, scales, slice_index, slot_words
                    )
                    y_block += scale * tile_product(
                        v_rows, address, rank, row_mask, columns, column_mask, width, plane_stride,
                        NUM_PLANES, WEIGHT_DTYPE, SPLIT_V, PRECISION, UPCAST, ALIGNMENT,
                        BLOCK_ROWS, BLOCK_RANK, BLOCK_OUT,
                    )  # fmt: skip
            tl.store(y_pointers, y_block.to(y.dtype.element_ty), mask=y_mask)
