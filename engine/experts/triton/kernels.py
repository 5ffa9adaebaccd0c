# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines the kernels of routed layers on GPUs.

    count_rows      a program counts the rows of one expert
    arrange_rows    a program gives the rows of one expert their places, and cuts them into tiles
    multiply_tiles  a program multiplies one tile with one block of its expert's outputs

code_kernels.py multiplies the same tiles with experts whose weights are codes.

A row is one token at one of its experts. Rows are sorted by expert, and within an expert by token. The number of programs
follows from how many rows and experts there are, never from the choice: tiles that no expert needs are empty.
"""

import triton
import triton.language as tl

from graftwork.engine.kernels.blocks import running_sum, sum_of

COUNTS = ("num_rows", "num_tiles", "num_chosen", "out_blocks")
"""Counts that are passed to the kernels. Without this list Triton would compile variants for special values."""
UNALIGNED = ("chosen", "counts", "tokens", "places", "weights", "biases")
"""Arguments whose alignment does not matter."""


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def count_rows_kernel(chosen, counts, num_rows, BLOCK: tl.constexpr):
    """Counts the rows of the expert with the program's number. `chosen` has the expert of each choice."""
    expert = tl.program_id(0)
    total = tl.full((BLOCK,), 0, tl.int32)
    for first in range(0, num_rows, BLOCK):
        choices = first + tl.arange(0, BLOCK)
        found = tl.load(chosen + choices, mask=choices < num_rows, other=-1)
        total += (found == expert).to(tl.int32)
    tl.store(counts + expert, sum_of(total))


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def arrange_rows_kernel(
    chosen,
    counts,
    tokens,
    places,
    tile_expert,
    tile_start,
    tile_length,
    num_rows,
    num_tiles,
    num_chosen,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,  # the power of two that is not below NUM_EXPERTS
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gives each row of one expert its place, in the order of tokens, and writes the expert's tiles.

    The rows of an expert begin behind those of all experts before it, and so do its tiles. The last expert also empties
    the tiles behind its own.
    """
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_BLOCK)
    before = tl.load(counts + experts, mask=experts < expert, other=0)
    start = sum_of(before)
    first_tile = sum_of((before + TILE_ROWS - 1) // TILE_ROWS)
    length = tl.load(counts + expert)
    end_tile = first_tile + (length + TILE_ROWS - 1) // TILE_ROWS
    last_tile = tl.where(expert == NUM_EXPERTS - 1, num_tiles, end_tile)
    for first in range(first_tile, last_tile, BLOCK):
        tiles = first + tl.arange(0, BLOCK)
        done = (tiles - first_tile) * TILE_ROWS
        own = tl.maximum(tl.minimum(length - done, TILE_ROWS), 0)
        tl.store(tile_expert + tiles, tl.full((BLOCK,), 0, tl.int32) + expert, mask=tiles < last_tile)
        tl.store(tile_start + tiles, start + done, mask=tiles < last_tile)
        tl.store(tile_length + tiles, own, mask=tiles < last_tile)

    place = start
    for first in range(0, num_rows, BLOCK):
        choices = first + tl.arange(0, BLOCK)
        found = tl.load(chosen + choices, mask=choices < num_rows, other=-1)
        mine = (found == expert).to(tl.int32)
        rows = place + running_sum(mine) - 1
        tl.store(tokens + rows, (choices // num_chosen).to(tl.int64), mask=mine != 0)
        tl.store(places + choices, rows.to(tl.int64), mask=mine != 0)
        place += sum_of(mine)


@triton.jit
def rows_of_tile(tile, tile_start, length, BLOCK_ROWS: tl.constexpr):
    """Returns the rows of a tile, [BLOCK_ROWS, 1], and which of them it has: `length` of them."""
    in_tile = tl.arange(0, BLOCK_ROWS)[:, None]
    return (tl.load(tile_start + tile) + in_tile).to(tl.int64), in_tile < length


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def multiply_tiles_kernel(
    x,
    y,
    weights,
    biases,
    tile_expert,
    tile_start,
    tile_length,
    in_features,
    out_features,
    out_blocks,
    x_stride,
    y_stride,
    HAS_BIAS: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # in bytes, of every row of a weight
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Multiplies one tile, up to BLOCK_ROWS rows of one expert, with BLOCK_OUT outputs of the expert's weight.

    `weights` and `biases` have the address of each expert's. All input features are summed in one program, in fp32, in
    blocks of BLOCK_IN from the first to the last, and the sum is rounded once.
    """
    tile = tl.program_id(0) // out_blocks
    block = tl.program_id(0) % out_blocks
    length = tl.load(tile_length + tile)
    if length == 0:
        return
    expert = tl.load(tile_expert + tile)
    rows, row_mask = rows_of_tile(tile, tile_start, length, BLOCK_ROWS)
    columns = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column_mask = columns < out_features
    weight = tl.multiple_of(tl.load(weights + expert).to(tl.pointer_type(WEIGHT_DTYPE)), ALIGNMENT)
    x_rows = x + rows * x_stride
    weight_rows = weight + columns[None, :].to(tl.int64) * in_features

    total = tl.full((BLOCK_ROWS, BLOCK_OUT), 0.0, tl.float32)
    for first in range(0, in_features, BLOCK_IN):
        features = first + tl.arange(0, BLOCK_IN)
        feature_mask = features < in_features
        x_block = tl.load(x_rows + features[None, :], mask=row_mask & feature_mask[None, :], other=0.0)
        weight_block = tl.load(
            weight_rows + features[:, None], mask=feature_mask[:, None] & column_mask[None, :], other=0.0
        )
        if UPCAST:
            x_block = x_block.to(tl.float32)
            weight_block = weight_block.to(tl.float32)
        total = tl.dot(x_block, weight_block, total, input_precision="ieee")

    if HAS_BIAS:
        bias = tl.load(biases + expert).to(tl.pointer_type(WEIGHT_DTYPE))
        total += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    y_pointers = y + rows * y_stride + columns[None, :]
    tl.store(y_pointers, total.to(y.dtype.element_ty), mask=row_mask & column_mask[None, :])
