# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines the first sampling kernel. It changes the logits as each request asks, and finds the best token of a block.

A program computes one block of tokens of one row. The order is that of engine/sampling/torch_sampler.py: grammar mask,
banned tokens, biases, penalties, temperature. The logits themselves are only read; the changed ones go to `work`. For
rows that report log probabilities, the program also finds the sum and the likeliest tokens of its block of raw logits.

The lists of biases and of changed counts are short, and a token of them is changed by the one program that owns its
block: in memory, between two barriers.
"""

import triton
import triton.language as tl

from graftwork.engine.kernels.blocks import max_of, sum_of
from graftwork.engine.sampling.device.columns import Float, Int, Way
from graftwork.engine.sampling.device.number_math import pack, packed_value

_IDLE = tl.constexpr(int(Way.IDLE))
_GREEDY = tl.constexpr(int(Way.GREEDY))
_WAY = tl.constexpr(int(Int.WAY))
_LOGPROBS = tl.constexpr(int(Int.LOGPROBS))
_MASK = tl.constexpr(int(Int.MASK))
_COUNTS = tl.constexpr(int(Int.COUNTS))
_CHANGES = tl.constexpr(int(Int.CHANGES))
_CHANGES_END = tl.constexpr(int(Int.CHANGES_END))
_DRAFTS = tl.constexpr(int(Int.DRAFTS))
_DRAFTS_END = tl.constexpr(int(Int.DRAFTS_END))
_BIASES = tl.constexpr(int(Int.BIASES))
_BIASES_END = tl.constexpr(int(Int.BIASES_END))
_TEMPERATURE = tl.constexpr(int(Float.TEMPERATURE))
_REPETITION = tl.constexpr(int(Float.REPETITION))
_FREQUENCY = tl.constexpr(int(Float.FREQUENCY))
_PRESENCE = tl.constexpr(int(Float.PRESENCE))


@triton.jit
def add_biases(values, first_token, last_token, pairs, start, end, LIST_BLOCK: tl.constexpr):
    """Adds a row's biases to the tokens [first_token, last_token) of its values in memory. A bias of -inf sets -inf,
    even where the value is NaN.
    """
    for at in range(start, end, 2 * LIST_BLOCK):
        places = at + 2 * tl.arange(0, LIST_BLOCK)
        is_pair = places < end
        tokens = tl.load(pairs + places, mask=is_pair, other=-1)
        biases = tl.load(pairs + places + 1, mask=is_pair, other=0).to(tl.float32, bitcast=True)
        is_own = is_pair & (tokens >= first_token) & (tokens < last_token)
        old = tl.load(values + tokens, mask=is_own, other=0.0)
        tl.store(values + tokens, tl.where(biases == float("-inf"), float("-inf"), old + biases), mask=is_own)


@triton.jit
def write_counts(entries, first_token, last_token, pairs, start, end, LIST_BLOCK: tl.constexpr):
    """Writes the changed entries of a request's token counts, for the tokens [first_token, last_token)."""
    for at in range(start, end, 2 * LIST_BLOCK):
        places = at + 2 * tl.arange(0, LIST_BLOCK)
        is_pair = places < end
        tokens = tl.load(pairs + places, mask=is_pair, other=-1)
        new = tl.load(pairs + places + 1, mask=is_pair, other=0)
        is_own = is_pair & (tokens >= first_token) & (tokens < last_token)
        tl.store(entries + tokens, new.to(tl.int16), mask=is_own)


@triton.jit
def penalise(x, tokens, entries, lists, awaited, draft_start, draft_end, repetition, frequency, presence):
    """Returns x after the penalties. An entry is twice the token's count, plus 1 if the prompt has the token.

    A draft below 0 is an awaited token: -1 - its place in `awaited`.
    """
    count = entries >> 1
    for at in range(draft_start, draft_end):
        draft = tl.load(lists + at)
        if draft < 0:
            draft = tl.load(awaited + (-1 - draft))
        count += tl.where(tokens == draft, 1, 0)
    is_seen = (count > 0) | (entries > 0)
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    penalty = count.to(tl.float32) * frequency + tl.where(count > 0, presence, 0.0)
    return tl.where(is_seen, repeated - penalty, x)


@triton.jit
def store_raw_stats(x, tokens, raw_bests, raw_sums, raw_tops, at, wants_tops, NUM_TOPS: tl.constexpr):
    """Writes a block's best raw logit, the sum of exp(logit - best), and its NUM_TOPS likeliest tokens, packed."""
    packed = pack(x, tokens)
    best = packed_value(max_of(packed))
    tl.store(raw_bests + at, best)
    tl.store(raw_sums + at, sum_of(tl.where(x == float("-inf"), 0.0, tl.exp(x - best))))
    if wants_tops:
        for place in range(NUM_TOPS):
            top = max_of(packed)
            tl.store(raw_tops + at * NUM_TOPS + place, top)
            packed = tl.where(packed == top, -0x7FFFFFFFFFFFFFFF, packed)


@triton.jit
def edit_kernel(
    logits,
    ints,
    floats,
    lists,
    masks,
    awaited,
    counts,
    work,
    bests,
    raw_bests,
    raw_sums,
    raw_tops,
    vocab,
    logits_stride,
    columns,
    mask_stride,
    work_stride,
    num_blocks,
    BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    NUM_TOPS: tl.constexpr,
):
    """Writes the changed logits of one block of one row to `work`, and the block's best token to `bests`.

    logits: [rows, vocab]; masks: int32 [masks, mask_stride] one bit a token, perhaps in pinned host memory, so each word
    is loaded once; awaited: int32, the tokens of the step before; counts: int16 [slots, vocab]; work: fp32
    [rows, work_stride]; bests: int64 [rows, num_blocks], packed; raw_*: the same for raw logits. Grid: rows, blocks.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    way = tl.load(ints + columns * _WAY + row)
    if way == _IDLE:
        return
    first = block * BLOCK
    last = tl.minimum(first + BLOCK, vocab)
    tokens = first + tl.arange(0, BLOCK)
    inside = tokens < vocab
    own = work + row * work_stride
    x = tl.load(logits + row * logits_stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)

    wants_logprobs = tl.load(ints + columns * _LOGPROBS + row)
    if wants_logprobs > 0:
        at = row * num_blocks + block
        store_raw_stats(x, tokens, raw_bests, raw_sums, raw_tops, at, wants_logprobs > 1, NUM_TOPS)

    mask = tl.load(ints + columns * _MASK + row).to(tl.int64)
    if mask >= 0:
        word_ids = first // 32 + tl.arange(0, BLOCK // 32)
        words = tl.load(masks + mask * mask_stride + word_ids, mask=word_ids < mask_stride, other=0)
        bits = (words[:, None] >> tl.arange(0, 32)[None, :]) & 1
        x = tl.where(tl.reshape(bits, (BLOCK,)) == 1, x, float("-inf"))

    bias_start = tl.load(ints + columns * _BIASES + row)
    bias_end = tl.load(ints + columns * _BIASES_END + row)
    if bias_start < bias_end:
        tl.store(own + tokens, x, mask=inside)
        tl.debug_barrier()
        add_biases(own, first, last, lists, bias_start, bias_end, LIST_BLOCK)
        tl.debug_barrier()
        x = tl.load(own + tokens, mask=inside, other=float("-inf"))

    slot = tl.load(ints + columns * _COUNTS + row).to(tl.int64)
    if slot >= 0:
        change_start = tl.load(ints + columns * _CHANGES + row)
        change_end = tl.load(ints + columns * _CHANGES_END + row)
        if change_start < change_end:
            write_counts(counts + slot * vocab, first, last, lists, change_start, change_end, LIST_BLOCK)
            tl.debug_barrier()
        x = penalise(
            x,
            tokens,
            tl.load(counts + slot * vocab + tokens, mask=inside, other=0).to(tl.int32),
            lists,
            awaited,
            tl.load(ints + columns * _DRAFTS + row),
            tl.load(ints + columns * _DRAFTS_END + row),
            tl.load(floats + columns * _REPETITION + row),
            tl.load(floats + columns * _FREQUENCY + row),
            tl.load(floats + columns * _PRESENCE + row),
        )

    if way != _GREEDY:
        x = tl.div_rn(x, tl.load(floats + columns * _TEMPERATURE + row))
        if bias_start < bias_end:
            tl.debug_barrier()
        tl.store(own + tokens, x, mask=inside)
    tl.store(bests + row * num_blocks + block, max_of(pack(x, tokens)))
