# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines the row-wise kernels, for decoding. One program takes one row (token), and each row may have another adapter.

    shrink_rows  a program computes one row, adapter, projection and block of ranks
    expand_rows  a program computes one row and one block of output columns of one projection

The input features may be cut into spans that are summed in parallel; then shrink_rows has a program for each span. A
program loads weights once into registers and sums products there in fp32. It needs no shared memory and no matrix unit.

A program is over within microseconds, so it must not wait for one number after another: it loads all that it can before
it decides whether there is anything to do. Padding tiles name slot 0 and row 0, which may be read.

The order of a sum does not depend on the batch. Position i of a block sums element i of all blocks of a span. The sums
of the positions are then added in a tree, and the sums of the spans are added in order. A tile has one row here: tile t
is the t-th row in the order of the tiles (see tiles.py).
"""

import triton
import triton.language as tl

from graftwork.engine.kernels.blocks import sum_of
from graftwork.engine.lora.triton.expand_blocks import (
    COUNTS,
    UNALIGNED,
    change_columns,
    find_slice,
    is_changed,
    is_missing,
    load_part,
)


@triton.jit
def dot_span(x_row, a_rows, rank_mask, first, last, BLOCK_RANK: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Returns the products of one row of x with rows of the low-rank factor A: fp32 [BLOCK_RANK].

    Sums only over the input features [first, last).
    """
    total = tl.full((BLOCK_RANK, BLOCK_IN), 0.0, tl.float32)
    for block_start in range(first, last, BLOCK_IN):
        features = block_start + tl.arange(0, BLOCK_IN)
        feature_mask = features < last
        # A comes first: its loads are on their way while x is passed between the threads.
        a_block = tl.load(a_rows + features[None, :], mask=rank_mask[:, None] & feature_mask[None, :], other=0.0)
        x_block = tl.load(x_row + features, mask=feature_mask, other=0.0).to(tl.float32)
        total += x_block[None, :] * a_block.to(tl.float32)
    return sum_of(total, 1)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def shrink_rows_kernel(
    x,
    planes,
    a_pointers,
    ranks,
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
    ALIGNMENT: tl.constexpr,  # in bytes, of every row of A
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Multiplies one row of x by one block of ranks of the low-rank factor A, for one adapter and one projection.

    The input features are cut into spans. With PARALLEL_SPANS, each program sums over one span, and `planes` has an
    array of partial sums for each span. Otherwise one program sums over all spans, and `planes` has one array.
    """
    blocks_a_row = NUM_PARTS * NUM_SLICES * rank_blocks
    position = tl.program_id(0) // blocks_a_row
    block = tl.program_id(0) % blocks_a_row
    part = block // (NUM_SLICES * rank_blocks)
    slice_index = block // rank_blocks % NUM_SLICES
    first_rank = block % rank_blocks * BLOCK_RANK
    num_parts = tl.load(tile_parts + position)
    slot = tl.load(part_slot + position * NUM_PARTS + part)
    row = tl.load(permutation + position).to(tl.int64)
    rank = tl.load(ranks + slot * slot_words * 2 + slice_index)
    address = tl.load(a_pointers + slot * slot_words + slice_index)
    if (part >= num_parts) | (first_rank >= rank) | is_missing(row, address):
        return

    rank_ids = first_rank + tl.arange(0, BLOCK_RANK)
    rank_mask = rank_ids < rank
    a = tl.multiple_of(address.to(tl.pointer_type(WEIGHT_DTYPE)), ALIGNMENT)
    a_rows = a + rank_ids[:, None].to(tl.int64) * in_features
    x_row = x + row * x_stride

    if PARALLEL_SPANS:
        first = tl.program_id(1) * span_features
        last = min(first + span_features, in_features)
        total = dot_span(x_row, a_rows, rank_mask, first, last, BLOCK_RANK, BLOCK_IN)
    else:
        total = tl.full((BLOCK_RANK,), 0.0, tl.float32)
        for span in range(num_spans):
            first = span * span_features
            last = min(first + span_features, in_features)
            total += dot_span(x_row, a_rows, rank_mask, first, last, BLOCK_RANK, BLOCK_IN)

    v_row = planes + position.to(tl.int64) * plane_width
    v_pointers = v_row + (part * NUM_SLICES + slice_index) * (rank_blocks * BLOCK_RANK) + rank_ids
    if PARALLEL_SPANS:
        v_pointers += tl.program_id(1).to(tl.int64) * plane_stride
    tl.store(v_pointers, total)  # zeros above the rank


@triton.jit
def load_ranks(
    v_row,  # pointer to the first rank in the first plane
    b,  # pointer to the first column of the first rank
    first_rank,
    rank,
    columns,
    column_mask,
    width,
    plane_stride,
    NUM_PLANES: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Returns a block of ranks of one row of x @ A.T, the sum of the planes, fp32 [BLOCK_RANK], and these ranks of B,
    [BLOCK_RANK, BLOCK_OUT]. Both are zero from `rank` on.
    """
    rank_ids = first_rank + tl.arange(0, BLOCK_RANK)
    rank_mask = rank_ids < rank
    b_pointers = b + rank_ids[:, None].to(tl.int64) * width + columns[None, :]
    b_block = tl.load(b_pointers, mask=rank_mask[:, None] & column_mask[None, :], other=0.0)
    v = tl.full((BLOCK_RANK,), 0.0, tl.float32)
    v_pointers = v_row + rank_ids
    for _ in tl.static_range(NUM_PLANES):
        v += tl.load(v_pointers, mask=rank_mask, other=0.0)
        v_pointers += plane_stride
    return v, b_block


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def expand_rows_kernel(
    planes,
    y,
    b_pointers,
    column_scales,
    column_shifts,
    ranks,
    scales,
    offsets,
    widths,
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
    ALIGNMENT: tl.constexpr,  # in bytes, of every row of B
    COLUMN_ALIGNMENT: tl.constexpr,  # in elements, of offsets and widths
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Applies the adapters of one row to one block of output columns of y.

    First scales and shifts y (DoRA, biases). Then multiplies the sum of `planes` by each adapter's scale and low-rank
    factor B, and adds the products to y. `planes` holds the partial sums that shrink_rows_kernel has written.
    """
    position = tl.program_id(0) // out_blocks
    block = tl.program_id(0) % out_blocks
    num_parts = tl.load(tile_parts + position)
    row = tl.load(permutation + position).to(tl.int64)
    parts = part_slot + position * NUM_PARTS
    weights = part_weight + position * NUM_PARTS
    slice_index, width, offset, first_block = find_slice(
        block, widths, offsets, NUM_SLICES, BLOCK_OUT, COLUMN_ALIGNMENT
    )
    rank, address, scale = load_part(parts, weights, 0, ranks, b_pointers, scales, slice_index, slot_words)
    if is_missing(row, address) | ~is_changed(
        rank, ranks, column_scales, column_shifts, parts, num_parts, slice_index, slot_words, NUM_PARTS, HAS_COLUMNS
    ):
        return

    columns = (block - first_block) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column_mask = columns < width
    v_row = planes + position.to(tl.int64) * plane_width + slice_index * (rank_blocks * BLOCK_RANK)
    b = tl.multiple_of(address.to(tl.pointer_type(WEIGHT_DTYPE)), ALIGNMENT)
    v, b_block = load_ranks(
        v_row, b, 0, rank, columns, column_mask, width, plane_stride, NUM_PLANES, BLOCK_RANK
    )  # fmt: skip
    # y comes last: the other loads are on their way while it is passed between the threads.
    y_pointers = y + row * y_stride + offset + columns
    y_block = tl.load(y_pointers, mask=column_mask, other=0.0).to(tl.float32)
    if HAS_COLUMNS:
        entry = tl.load(parts) * slot_words + slice_index
        y_block = change_columns(y_block, column_scales, column_shifts, entry, columns, width)

    products = v[:, None] * b_block.to(tl.float32)
    for first_rank in range(BLOCK_RANK, rank, BLOCK_RANK):
        v, b_block = load_ranks(
            v_row, b, first_rank, rank, columns, column_mask, width, plane_stride, NUM_PLANES, BLOCK_RANK
        )  # fmt: skip
        products += v[:, None] * b_block.to(tl.float32)
    y_block += scale * sum_of(products)
    if NUM_PARTS > 1:
        for part in range(1, num_parts):
            v_row += NUM_SLICES * (rank_blocks * BLOCK_RANK)
            rank, address, scale = load_part(parts, weights, part, ranks, b_pointers, scales, slice_index, slot_words)
            b = tl.multiple_of(address.to(tl.pointer_type(WEIGHT_DTYPE)), ALIGNMENT)
            products = tl.full((BLOCK_RANK, BLOCK_OUT), 0.0, tl.float32)
            for first_rank in range(0, rank, BLOCK_RANK):
                v, b_block = load_ranks(
                    v_row, b, first_rank, rank, columns, column_mask, width, plane_stride, NUM_PLANES, BLOCK_RANK
                )  # fmt: skip
                products += v[:, None] * b_block.to(tl.float32)
            y_block += scale * sum_of(products)
    tl.store(y_pointers, y_block.to(y.dtype.element_ty), mask=column_mask)
