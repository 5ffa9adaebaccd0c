# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines the last sampling kernel. It chooses the token of one row, and computes its log probabilities.

A row that is cut by top-k or top-p is never sorted. Its order is that of its keys, and of token ids where keys are
equal. A search finds the key at which the count or the mass of the tokens from the best one on exceeds a number: it
settles one digit of the key in each pass over the row's likely tokens (a radix search). Three searches choose the token:

    the last token that top-k keeps     its running count exceeds k - 1
    the last token that top-p keeps     its running mass exceeds the mass to keep, less 1
    the chosen token                    its running mass exceeds noise * (mass of the kept tokens)

Min-p needs no search, because what it keeps is also the beginning of this order. So the mass of the kept tokens is the
least of three masses. All masses are integers, so no rounding can make two of these figures disagree.
"""

import triton
import triton.language as tl

from graftwork.engine.kernels.blocks import max_of, running_sum, sum_of
from graftwork.engine.sampling.device.columns import Float, Int, Long, Way
from graftwork.engine.sampling.device.number_math import (
    key_of,
    mass_below,
    packed_token,
    packed_value,
    uniform_of,
    value_of,
    weight_of,
    whole_parts,
)
from graftwork.engine.sampling.device.weigh_kernels import (
    NUM_LEVELS,
    best_of_row,
    find_level,
    mass_to_keep,
    sum_of_row,
)

_IDLE = tl.constexpr(int(Way.IDLE))
_BY_TOKEN = tl.constexpr(int(Way.BY_TOKEN))
_BY_RANK = tl.constexpr(int(Way.BY_RANK))
_WAY = tl.constexpr(int(Int.WAY))
_TOP_K = tl.constexpr(int(Int.TOP_K))
_LOGPROBS = tl.constexpr(int(Int.LOGPROBS))
_TOP_P = tl.constexpr(int(Float.TOP_P))
_FARTHEST = tl.constexpr(int(Float.FARTHEST))
_SEED = tl.constexpr(int(Long.SEED))
_CHOICE = tl.constexpr(int(Long.CHOICE))
_POSITION = tl.constexpr(int(Long.POSITION))


@triton.jit
def load_chunk(values, start, num_values, best, CHUNK: tl.constexpr):
    """Returns the keys and the weights of the tokens [start, start + CHUNK). Places beyond the last weigh nothing."""
    places = start + tl.arange(0, CHUNK)
    x = tl.load(values + places, mask=places < num_values, other=float("-inf"))
    return key_of(x), weight_of(best - x)


@triton.jit
def amounts_from(thresholds, keys, weights, BY_COUNT: tl.constexpr):
    """Returns, for each threshold, the count or the mass of the tokens with at least this key. Counts only tokens with
    a weight.
    """
    amounts = weights
    if BY_COUNT:
        amounts = tl.where(weights > 0, 1, 0).to(tl.int64)
    return tl.where(keys[None, :] >= thresholds[:, None], amounts[None, :], 0)


@triton.jit
def find_key(
    values,
    num_values,
    best,
    keys,
    weights,
    target,
    BY_COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
    DIGITS: tl.constexpr,
    PASSES: tl.constexpr,
):
    """Returns the key of the first token, from the best on, whose running count or mass exceeds `target`.

    Returns the lowest int32 if all tokens together do not exceed the target. `keys` and `weights` are the first chunk,
    which stays in registers. A pass settles one digit of the key; DIGITS**PASSES is 2^32.
    """
    low = tl.full((), -0x80000000, tl.int32)
    step = tl.full((), 0x40000000 // (DIGITS // 4), tl.int32)
    for _ in range(PASSES):
        thresholds = low + tl.arange(0, DIGITS) * step
        amounts = amounts_from(thresholds, keys, weights, BY_COUNT)  # [DIGITS, CHUNK]
        for start in range(CHUNK, num_values, CHUNK):
            more_keys, more_weights = load_chunk(values, start, num_values, best, CHUNK)
            amounts += amounts_from(thresholds, more_keys, more_weights, BY_COUNT)
        sums = tl.reduce(amounts, 1, tl.standard._sum_combine)  # [DIGITS], descending
        low += tl.maximum(sum_of(tl.where(sums > target, 1, 0)) - 1, 0) * step
        step = step // DIGITS
    return low


@triton.jit
def above_key(values, num_values, best, keys, weights, key, CHUNK: tl.constexpr):
    """Returns how many tokens have a larger key, and their mass. Counts only tokens with a weight."""
    masses = tl.where(keys > key, weights, 0)
    counts = tl.where(masses > 0, 1, 0)
    for start in range(CHUNK, num_values, CHUNK):
        more_keys, more_weights = load_chunk(values, start, num_values, best, CHUNK)
        more = tl.where(more_keys > key, more_weights, 0)
        counts += tl.where(more > 0, 1, 0)
        masses += more
    return sum_of(counts), sum_of(masses)


@triton.jit
def place_among_equals(values, num_values, best, keys, key, number, CHUNK: tl.constexpr):
    """Returns the place of the token `number` (from 0) among those with this key, in the order of places."""
    places = tl.arange(0, CHUNK)
    is_equal = tl.where((places < num_values) & (keys == key), 1, 0)
    found = sum_of(tl.where((is_equal > 0) & (running_sum(is_equal) - 1 == number), places, 0))
    seen = sum_of(is_equal)
    for start in range(CHUNK, num_values, CHUNK):
        more_keys, _ = load_chunk(values, start, num_values, best, CHUNK)
        is_equal = tl.where((start + places < num_values) & (more_keys == key), 1, 0)
        is_found = (is_equal > 0) & (seen + running_sum(is_equal) - 1 == number)
        found += sum_of(tl.where(is_found, start + places, 0))
        seen += sum_of(is_equal)
    return found


@triton.jit
def draw_by_token(
    values, kept, row, num_blocks, vocab, best, farthest, noise, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Draws from all tokens that min-p keeps, in the order of token ids: first a block, then a token in it.

    kept: int64 [rows, num_blocks], the mass of what min-p keeps of each block. Some token must have a weight.
    """
    blocks = tl.arange(0, BLOCKS)
    masses = tl.load(kept + row * num_blocks + blocks, mask=blocks < num_blocks, other=0)
    aim = mass_below(noise, sum_of(masses))
    block = sum_of(tl.where(running_sum(masses) <= aim, 1, 0))
    aim -= sum_of(tl.where(blocks < block, masses, 0))
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    distance = best - tl.load(values + tokens, mask=tokens < vocab, other=float("-inf"))
    weights = tl.where(distance <= farthest, weight_of(distance), 0)
    return block * BLOCK + sum_of(tl.where(running_sum(weights) <= aim, 1, 0))


@triton.jit
def draw_by_rank(
    values,
    num_values,
    best,
    top_k,
    top_p,
    total,
    kept,
    noise,
    CHUNK: tl.constexpr,
    DIGITS: tl.constexpr,
    PASSES: tl.constexpr,
):
    """Draws from the tokens that top-k, top-p and min-p keep. Returns the token's place among the values. Some token
    must have a weight.

    `total` is the mass of all tokens of the row, `kept` the mass of those that min-p keeps.
    """
    keys, weights = load_chunk(values, 0, num_values, best, CHUNK)
    after_top_k = total
    if top_k > 0:
        key = find_key(values, num_values, best, keys, weights, top_k - 1, True, CHUNK, DIGITS, PASSES)
        count, mass = above_key(values, num_values, best, keys, weights, key, CHUNK)
        after_top_k = mass + (top_k - count) * weight_of(best - value_of(key))
    after_top_p = after_top_k
    if top_p <= 1.0:
        last = mass_to_keep(after_top_k, top_p) - 1
        key = find_key(values, num_values, best, keys, weights, last, False, CHUNK, DIGITS, PASSES)
        _, mass = above_key(values, num_values, best, keys, weights, key, CHUNK)
        weight = weight_of(best - value_of(key))
        after_top_p = tl.minimum(mass + (whole_parts(last - mass, weight) + 1) * weight, after_top_k)
    aim = mass_below(noise, tl.minimum(after_top_p, kept))
    key = find_key(values, num_values, best, keys, weights, aim, False, CHUNK, DIGITS, PASSES)
    _, mass = above_key(values, num_values, best, keys, weights, key, CHUNK)
    number = whole_parts(aim - mass, weight_of(best - value_of(key)))
    return place_among_equals(values, num_values, best, keys, key, number.to(tl.int32), CHUNK)


@triton.jit
def store_logprobs(
    raw_bests,
    raw_sums,
    raw_tops,
    logit,
    output,
    row,
    num_blocks,
    wants_tops,
    columns,
    BLOCKS: tl.constexpr,
    NUM_TOPS: tl.constexpr,
    TOP_LANES: tl.constexpr,
):
    """Writes the log probability of the chosen token, whose raw logit is `logit`, and the row's likeliest tokens."""
    blocks = tl.arange(0, BLOCKS)
    is_block = blocks < num_blocks
    bests = tl.load(raw_bests + row * num_blocks + blocks, mask=is_block, other=float("-inf"))
    sums = tl.load(raw_sums + row * num_blocks + blocks, mask=is_block, other=0.0)
    best = value_of(max_of(key_of(bests)))  # a NaN is the largest
    parts = tl.where(is_block & (bests > float("-inf")), sums * tl.exp(bests - best), 0.0)
    log_total = best + tl.log(sum_of(parts))
    tl.store(output + columns + row, (logit - log_total).to(tl.int32, bitcast=True))
    if wants_tops:
        lanes = tl.arange(0, BLOCKS * TOP_LANES)
        lane_block, lane_place = lanes // TOP_LANES, lanes % TOP_LANES
        packed = tl.load(
            raw_tops + (row * num_blocks + lane_block) * NUM_TOPS + lane_place,
            mask=(lane_block < num_blocks) & (lane_place < NUM_TOPS),
            other=-0x7FFFFFFFFFFFFFFF,
        )
        for place in range(NUM_TOPS):
            top = max_of(packed)
            packed = tl.where(packed == top, -0x7FFFFFFFFFFFFFFF, packed)
            tl.store(output + (2 + place) * columns + row, packed_token(top))
            logprob = packed_value(top) - log_total
            tl.store(output + (2 + NUM_TOPS + place) * columns + row, logprob.to(tl.int32, bitcast=True))


@triton.jit
def choose_kernel(
    logits,
    ints,
    floats,
    longs,
    work,
    near_tokens,
    bests,
    totals,
    kept,
    level_counts,
    level_masses,
    raw_bests,
    raw_sums,
    raw_tops,
    output,
    vocab,
    logits_stride,
    columns,
    work_stride,
    room,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    DIGITS: tl.constexpr,
    PASSES: tl.constexpr,
    NUM_TOPS: tl.constexpr,
    TOP_LANES: tl.constexpr,
):
    """Writes one row of `output`: the token, its log probability, the likeliest tokens, their log probabilities.

    output: int32 [2 + 2 * NUM_TOPS, columns]; log probabilities are the bits of fp32 numbers. A row without any token
    (all forbidden, or NaN) gets its best token. Grid: rows.
    """
    row = tl.program_id(0).to(tl.int64)
    way = tl.load(ints + columns * _WAY + row)
    if way == _IDLE:
        return
    packed = best_of_row(bests, row, num_blocks, BLOCKS)
    best = packed_value(packed)
    token = tl.minimum(packed_token(packed), vocab - 1)
    if way >= _BY_TOKEN:
        total = sum_of_row(totals, row, num_blocks, BLOCKS)
        left = sum_of_row(kept, row, num_blocks, BLOCKS)
        noise = uniform_of(
            tl.load(longs + columns * _SEED + row),
            tl.load(longs + columns * _CHOICE + row),
            tl.load(longs + columns * _POSITION + row),
        )
        values = work + row * work_stride
        if left > 0:
            if way == _BY_TOKEN:
                farthest = tl.load(floats + columns * _FARTHEST + row)
                token = draw_by_token(values, kept, row, num_blocks, vocab, best, farthest, noise, BLOCK, BLOCKS)
            else:
                top_k = tl.load(ints + columns * _TOP_K + row)
                top_p = tl.load(floats + columns * _TOP_P + row)
                to_keep = mass_to_keep(total, top_p)
                level, count = find_level(
                    level_counts, level_masses, row, num_blocks, top_k, to_keep, room, BLOCKS, NUM_LEVELS
                )
                is_near = level < NUM_LEVELS
                values += tl.where(is_near, work_stride - room, 0)
                num_values = tl.where(is_near, count, vocab)
                token = draw_by_rank(values, num_values, best, top_k, top_p, total, left, noise, CHUNK, DIGITS, PASSES)
                if is_near:
                    token = tl.load(near_tokens + row * room + token)
    token = tl.minimum(token, vocab - 1)
    tl.store(output + row, token)
    wants_logprobs = tl.load(ints + columns * _LOGPROBS + row)
    if wants_logprobs > 0:
        logit = tl.load(logits + row * logits_stride + token).to(tl.float32)
        store_logprobs(
            raw_bests,
            raw_sums,
            raw_tops,
            logit,
            output,
            row,
            num_blocks,
            wants_logprobs > 1,
            columns,
            BLOCKS,
            NUM_TOPS,
            TOP_LANES,
        )
