# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines the second and the third sampling kernel: they weigh the tokens of a row, and gather its likely ones.

A program computes one block of tokens of one row, after edit_kernel has found the best token of each block.

    weigh   sums the weights of a block, and counts and sums its tokens within a few distances (levels) of the best
    gather  copies the tokens within one level side by side, in the order of their ids, for the rows that are cut by
            top-k or top-p

The level is the nearest one that surely holds all tokens that top-k and top-p keep, so the last kernel looks at a few
hundred tokens, not at the vocabulary. If this level has more tokens than there is room for, nothing is gathered, and
the last kernel looks at the whole row.
"""

import triton
import triton.language as tl

from graftwork.engine.kernels.blocks import max_of, running_sum, sum_of
from graftwork.engine.sampling.device.columns import Float, Int, Way
from graftwork.engine.sampling.device.number_math import packed_value, weight_of

NUM_LEVELS = tl.constexpr(4)
"""The number of levels. Level i holds the tokens at most 3, 7, 15 or 31 below the best. All others weigh nothing."""
_GREEDY = tl.constexpr(int(Way.GREEDY))
_BY_RANK = tl.constexpr(int(Way.BY_RANK))
_WAY = tl.constexpr(int(Int.WAY))
_TOP_K = tl.constexpr(int(Int.TOP_K))
_TOP_P = tl.constexpr(int(Float.TOP_P))
_FARTHEST = tl.constexpr(int(Float.FARTHEST))


@triton.jit
def level_limit(level):
    """Returns the largest distance from the best logit at which a token belongs to a level."""
    return ((4 << level) - 1).to(tl.float32)


@triton.jit
def best_of_row(bests, row, num_blocks, BLOCKS: tl.constexpr):
    """Returns the packed best token of a row. BLOCKS is a power of two, at least `num_blocks`."""
    blocks = tl.arange(0, BLOCKS)
    own = tl.load(bests + row * num_blocks + blocks, mask=blocks < num_blocks, other=-0x7FFFFFFFFFFFFFFF)
    return max_of(own)


@triton.jit
def sum_of_row(masses, row, num_blocks, BLOCKS: tl.constexpr):
    blocks = tl.arange(0, BLOCKS)
    return sum_of(tl.load(masses + row * num_blocks + blocks, mask=blocks < num_blocks, other=0))


@triton.jit
def mass_to_keep(total, top_p):
    """Returns the limit of top-p in int64: a token is kept while the tokens before it weigh less. At least 1.

    total: int64; top_p: fp32, infinite for no limit.
    """
    share = tl.minimum(top_p, 1.0).to(tl.float64)
    limit = tl.ceil(share * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.where(top_p <= 1.0, limit, total), 1)


@triton.jit
def find_level(
    level_counts, level_masses, row, num_blocks, top_k, to_keep, room, BLOCKS: tl.constexpr, LEVELS: tl.constexpr
):
    """Returns the nearest level of LEVELS that holds all tokens that top-k or top-p keep, and its number of tokens.

    Returns LEVELS instead of the level if it has more tokens than `room`.
    """
    level = tl.full((), LEVELS, tl.int32)
    count = tl.full((), 0, tl.int32)
    for offset in range(LEVELS):
        candidate = LEVELS - 1 - offset  # from the last level, which holds all tokens of any weight
        own_count = sum_of_row(level_counts, row * LEVELS + candidate, num_blocks, BLOCKS)
        own_mass = sum_of_row(level_masses, row * LEVELS + candidate, num_blocks, BLOCKS)
        is_enough = ((top_k > 0) & (own_count >= top_k)) | ((top_k == 0) & (own_mass >= to_keep)) | (offset == 0)
        level = tl.where(is_enough, candidate, level)
        count = tl.where(is_enough, own_count, count)
    return tl.where(count <= room, level, LEVELS), count


@triton.jit
def weigh_kernel(
    ints,
    floats,
    work,
    bests,
    totals,
    kept,
    level_counts,
    level_masses,
    vocab,
    columns,
    work_stride,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Writes the weight of one block of one row to `totals`, and the weight of what min-p leaves to `kept`.

    totals, kept: int64 [rows, num_blocks]; level_counts, level_masses: [rows, NUM_LEVELS, num_blocks]. Greedy rows have
    none. Grid: rows, blocks.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    way = tl.load(ints + columns * _WAY + row)
    if way <= _GREEDY:
        return
    best = packed_value(best_of_row(bests, row, num_blocks, BLOCKS))
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    distance = best - tl.load(work + row * work_stride + tokens, mask=inside, other=float("-inf"))
    weight = weight_of(distance)
    farthest = tl.load(floats + columns * _FARTHEST + row)
    tl.store(totals + row * num_blocks + block, sum_of(weight))
    tl.store(kept + row * num_blocks + block, sum_of(tl.where(distance <= farthest, weight, 0)))
    if way == _BY_RANK:
        for level in tl.static_range(NUM_LEVELS):
            at = (row * NUM_LEVELS + level) * num_blocks + block
            is_near = distance <= (4 << level) - 1
            tl.store(level_counts + at, sum_of(tl.where(is_near, 1, 0)))
            tl.store(level_masses + at, sum_of(tl.where(is_near, weight, 0)))


@triton.jit
def gather_kernel(
    ints,
    floats,
    work,
    bests,
    totals,
    level_counts,
    level_masses,
    near_tokens,
    vocab,
    columns,
    work_stride,
    room,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Copies the likely tokens of one block of one row: their logits to `work` behind the vocabulary, at `work_stride -
    room`, and their ids to `near_tokens`.

    near_tokens: int32 [rows, room]. Grid: rows, blocks.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if tl.load(ints + columns * _WAY + row) != _BY_RANK:
        return
    to_keep = mass_to_keep(sum_of_row(totals, row, num_blocks, BLOCKS), tl.load(floats + columns * _TOP_P + row))
    top_k = tl.load(ints + columns * _TOP_K + row)
    level, _ = find_level(level_counts, level_masses, row, num_blocks, top_k, to_keep, room, BLOCKS, NUM_LEVELS)
    if level == NUM_LEVELS:
        return
    blocks = tl.arange(0, BLOCKS)
    counts = level_counts + (row * NUM_LEVELS + level) * num_blocks
    before = sum_of(tl.load(counts + blocks, mask=blocks < block, other=0))
    best = packed_value(best_of_row(bests, row, num_blocks, BLOCKS))
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    x = tl.load(work + row * work_stride + tokens, mask=inside, other=float("-inf"))
    is_near = best - x <= level_limit(level)
    places = before + running_sum(tl.where(is_near, 1, 0)) - 1
    tl.store(work + row * work_stride + (work_stride - room) + places, x, mask=is_near)
    tl.store(near_tokens + row * room + places, tokens, mask=is_near)
