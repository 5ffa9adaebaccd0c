# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines what the attention kernels share: they add blocks of keys to the running softmax of a tile of queries.

All query heads that share a KV head are rows of one matrix, so keys and values are read once for all of them. Scores
and sums are fp32.

Keys and values may be codes of one byte, which are exact in the dtype of queries, with a scale for each head of a token. A
score is multiplied by its key's scale, and a weight by its value's. In fp16, values are multiplied themselves: products of
weights and scales could be too small for it.

Softmax is computed online, in blocks of BLOCK_KEYS keys that begin at multiples of BLOCK_KEYS. A block in which a query
sees no key changes none of its bits: its maximum stays, it is multiplied by one, and exact zeros are added. So the bits
of a query do not depend on the other queries of its tile, nor on how a prompt was cut into chunks.
"""

import triton
import triton.language as tl

from graftwork.engine.kernels.blocks import max_of, sum_of

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_cap(scores, cap):
    """Returns cap * tanh(scores / cap)."""
    return cap * (2.0 / (1.0 + tl.math.exp2(scores * (-2.0 * LOG2_E / cap))) - 1.0)


@triton.jit
def load_queries(
    query,
    first_row,
    kv_head,
    num_queries,
    row_stride,
    head_stride,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Returns the queries of a tile for one KV head: [BLOCK_ROWS, BLOCK_DIM].

    Row r is query r // GROUP and the head r % GROUP of its group. Other rows and columns are zero.
    """
    rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    heads = kv_head * GROUP + rows % GROUP
    offsets = (first_row + rows // GROUP).to(tl.int64) * row_stride + heads * head_stride
    mask = (rows // GROUP < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    block = tl.load(query + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    if UPCAST:
        block = block.to(tl.float32)
    return block


@triton.jit
def load_block(
    pages,  # pointer to the first element of the KV head in page 0
    offsets,  # [BLOCK_KEYS] int64 offset of each key
    key_mask,
    DTYPE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Returns the keys or the values at `offsets`, in DTYPE: [BLOCK_KEYS, BLOCK_DIM]."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = pages + offsets[:, None] + dims[None, :]
    if IS_MASKED:
        block = tl.load(pointers, mask=key_mask[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM != BLOCK_DIM:
        block = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        block = tl.load(pointers)
    return block.to(DTYPE)


@triton.jit
def load_scales(key_scales, value_scales, table, places, first_key, end_key, scale_stride, PAGE_TOKENS: tl.constexpr):
    """Returns the scales of the keys and of the values at `places`, fp32 [BLOCK_KEYS]. They are zero outside of [first_key,
    end_key).
    """
    mask = (places >= first_key) & (places < end_key)
    page = tl.load(table + places // PAGE_TOKENS, mask=mask, other=0)
    offsets = page.to(tl.int64) * scale_stride + places % PAGE_TOKENS
    key_scale = tl.load(key_scales + offsets, mask=mask, other=0.0).to(tl.float32)
    return key_scale, tl.load(value_scales + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def attend_keys(
    q,  # [BLOCK_ROWS, BLOCK_DIM]
    total,  # fp32 [BLOCK_ROWS, BLOCK_DIM] weighted sum of values
    mass,  # fp32 [BLOCK_ROWS] sum of weights
    peak,  # fp32 [BLOCK_ROWS] largest score
    keys,
    values,
    key_scales,  # pointer to the scales of the KV head in page 0; None if keys and values are not scaled
    value_scales,
    table,  # pointer to the page table of the request
    first_block,  # a multiple of BLOCK_KEYS
    end_block,
    first_key,  # keys before it are not read
    end_key,  # nor from here on
    first_visible,  # [BLOCK_ROWS]
    end_visible,  # [BLOCK_ROWS]
    page_stride,
    token_stride,
    scale_stride,
    score_scale,
    exponent_scale,
    cap,
    IS_MASKED: tl.constexpr,
    SCALES_VALUES: tl.constexpr,  # whether values are multiplied by their scales, and not weights
    UPCAST: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Adds the keys of the blocks in [first_block, end_block) to the sums of a tile, and returns the new sums.

    A row sees the keys [first_visible, end_visible). If IS_MASKED is False, all rows must see all keys of these blocks.
    A weight is 2 ** (exponent_scale * (score - peak)).
    """
    DTYPE: tl.constexpr = tl.float32 if UPCAST else q.dtype
    if key_scales is not None:
        first_places = first_block + tl.arange(0, BLOCK_KEYS)
        key_scale, value_scale = load_scales(
            key_scales, value_scales, table, first_places, first_key, end_key, scale_stride, PAGE_TOKENS
        )
    # Over codes, nothing is taken out of the loop: registers would be too few for it on Blackwell.
    for block_start in tl.range(first_block, end_block, BLOCK_KEYS, disable_licm=key_scales is not None):
        places = block_start + tl.arange(0, BLOCK_KEYS)
        key_mask = (places >= first_key) & (places < end_key)
        if IS_MASKED:
            page = tl.load(table + places // PAGE_TOKENS, mask=key_mask, other=0)
        else:
            page = tl.load(table + places // PAGE_TOKENS)
        offsets = page.to(tl.int64) * page_stride + (places % PAGE_TOKENS) * token_stride
        if key_scales is not None:  # those of the next block are on their way while this one is computed
            next_places = places + BLOCK_KEYS
            next_scales = load_scales(
                key_scales, value_scales, table, next_places, first_key, end_key, scale_stride, PAGE_TOKENS
            )
        k = load_block(keys, offsets, key_mask, DTYPE, IS_MASKED, HEAD_DIM, BLOCK_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if key_scales is not None:
            # Fused with zero by name, or the compiler would fuse it with the difference below in some loops and not in others.
            zeros = tl.full(scores.shape, 0.0, tl.float32)
            scores = tl.fma(scores, tl.broadcast_to(key_scale[None, :], scores.shape), zeros)
        if cap is not None:
            scores = soft_cap(scores * score_scale, cap)
        if IS_MASKED:
            is_visible = (places[None, :] >= first_visible[:, None]) & (places[None, :] < end_visible[:, None])
            scores = tl.where(is_visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, max_of(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        # Where the maximum stays, `shrinking` is exactly 1. A product of a difference rounds alike in every loop.
        weights = tl.math.exp2((scores - base[:, None]) * exponent_scale)
        shrinking = tl.math.exp2((peak - base) * exponent_scale)
        mass = tl.fma(mass, shrinking, sum_of(weights, 1))
        v = load_block(values, offsets, key_mask, DTYPE, IS_MASKED, HEAD_DIM, BLOCK_DIM)
        if value_scales is not None:
            if SCALES_VALUES:
                v = (v.to(tl.float32) * value_scale[:, None]).to(DTYPE)
            else:
                weights *= value_scale[None, :]
        total = tl.dot(weights.to(DTYPE), v, total * shrinking[:, None], input_precision="ieee")
        peak = new_peak
        if key_scales is not None:
            key_scale, value_scale = next_scales
    return total, mass, peak


@triton.jit
def store_attention(
    output,  # [rows of the step, KV_HEADS * GROUP, HEAD_DIM]
    total,
    mass,
    peak,
    sinks,  # [KV_HEADS * GROUP] logits, or None
    first_row,
    kv_head,
    num_queries,
    exponent_scale,
    LOG2: tl.constexpr,  # LOG2_E; a function that several kernels call takes constants as arguments
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Writes the attention of a tile of queries for one KV head, after the learned sinks have taken their share."""
    rows = tl.arange(0, BLOCK_ROWS)
    heads = kv_head * GROUP + rows % GROUP
    is_own = rows // GROUP < num_queries
    if sinks is not None:
        sink = tl.load(sinks + heads).to(tl.float32) * LOG2
        base = peak * exponent_scale
        top = tl.maximum(base, sink)
        mass = tl.fma(mass, tl.math.exp2(base - top), tl.math.exp2(sink - top))
        total = total * tl.math.exp2(base - top)[:, None]
    result = total * (1.0 / tl.where(mass == 0.0, 1.0, mass))[:, None]
    dims = tl.arange(0, BLOCK_DIM)
    offsets = ((first_row + rows // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + heads) * HEAD_DIM
    mask = is_own[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(output + offsets[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=mask)
