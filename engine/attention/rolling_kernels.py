# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines the Triton kernels of attention for requests with a rolling window.

    attend_rolling_splits  decoding: a program computes the sinks or the window of a tile over one split, and writes partial sums
    attend_rolling_tiles   prefill: a program computes a tile of queries over their sinks, and then over their windows

A query at position p sees the keys [0, sinks) and [p - window + 1, p] of its text. It meets the sinks as if it stood
right behind them and its window: it is turned back by its distance from there (see rolling_attention.py). Windows and sinks
are numbers of each tile. Pages between sinks and window are not read, and may be given up. What these kernels and those of
other rows share is in online_softmax.py; the sums of decoding rows are merged with those of other rows.

These are kernels of their own, so that rows without a window pay nothing, and have their bits, beside such rows.
"""

import triton
import triton.language as tl

from graftwork.engine.attention.online_softmax import LOG2_E, attend_keys, load_queries, store_attention


@triton.jit
def load_turned_queries(
    query,
    cosines,
    sines,
    is_turned,
    first_row,
    kv_head,
    num_queries,
    row_stride,
    head_stride,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIR_STEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Returns the queries of a tile as load_queries does, turned back by the angles of their rows if `is_turned`.

    cosines, sines: fp32 [rows of the step, ROTARY_DIM].
    """
    q = load_queries(
        query, first_row, kv_head, num_queries, row_stride, head_stride,
        UPCAST, GROUP, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM,
    )  # fmt: skip
    if ROTARY_DIM > 0:
        rows = tl.arange(0, BLOCK_ROWS)
        dims = tl.arange(0, BLOCK_DIM)
        if PAIR_STEP == 2:
            is_first = dims % 2 == 0
            partners = tl.where(is_first, dims + 1, dims - 1)
        else:
            is_first = dims < ROTARY_DIM // 2
            partners = tl.where(is_first, dims + ROTARY_DIM // 2, dims - ROTARY_DIM // 2)
        mask = (rows // GROUP < num_queries)[:, None] & (dims < ROTARY_DIM)[None, :]
        places = (first_row + rows // GROUP).to(tl.int64)
        heads = kv_head * GROUP + rows % GROUP
        offsets = places * row_stride + heads * head_stride
        others = tl.load(query + offsets[:, None] + partners[None, :], mask=mask, other=0.0).to(tl.float32)
        angles = places[:, None] * ROTARY_DIM + dims[None, :]
        cos = tl.load(cosines + angles, mask=mask & is_turned, other=1.0)
        sin = tl.load(sines + angles, mask=mask & is_turned, other=0.0)
        turned = q.to(tl.float32) * cos + tl.where(is_first[None, :], others, -others) * sin
        q = turned.to(q.dtype)
    return q


@triton.jit
def attend_rolling_splits_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    totals,
    masses,
    peaks,
    cosines,
    sines,
    page_ids,
    tile_row,
    tile_length,
    tile_position,
    tile_table,
    tile_window,
    tile_sinks,
    tile_is_sinks,
    tile_query,
    tile_split,
    item_tile,
    item_split,
    part_slot,
    num_items,
    row_stride,
    head_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    scale_stride,
    score_scale,
    exponent_scale,
    cap,
    SCALES_VALUES: tl.constexpr,
    UPCAST: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIR_STEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Computes parts of tiles of decoding queries over splits of their keys, as attend_splits_kernel does tiles.

    A query of a tile that sees no key of a part has no slot for it.
    """
    step = tl.num_programs(0)
    item = tl.program_id(0) // KV_HEADS  # the grid is no larger than the arrays of items
    tile = tl.load(item_tile + item)
    split = tl.load(item_split + item)
    num_units = tl.load(num_items) * KV_HEADS
    for unit in range(tl.program_id(0), num_units, step):
        kv_head = unit % KV_HEADS
        split_tokens = tl.load(tile_split + tile)
        num_queries = tl.load(tile_length + tile)
        position = tl.load(tile_position + tile)
        window = tl.load(tile_window + tile)
        sinks = tl.load(tile_sinks + tile)
        is_sinks = tl.load(tile_is_sinks + tile) > 0
        first_slot = part_slot + tl.load(tile_query + tile)
        # The next item is on its way while this one is computed.
        next_item = (unit + step) // KV_HEADS
        next_tile = tl.load(item_tile + next_item, mask=unit + step < num_units, other=0)
        next_split = tl.load(item_split + next_item, mask=unit + step < num_units, other=0)

        q = load_turned_queries(
            query, cosines, sines, is_sinks, tl.load(tile_row + tile), kv_head, num_queries, row_stride, head_stride,
            UPCAST, GROUP, HEAD_DIM, ROTARY_DIM, PAIR_STEP, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip
        rows = tl.arange(0, BLOCK_ROWS)
        end_visible = position + rows // GROUP + 1
        first_visible = tl.where(is_sinks, 0, tl.maximum(end_visible - window, sinks))
        end_visible = tl.where(is_sinks, tl.minimum(end_visible, sinks), end_visible)
        first_key = tl.where(is_sinks, 0, max(position + 1 - window, sinks))
        end_key = tl.where(is_sinks, min(position + num_queries, sinks), position + num_queries)
        first_key = max(first_key, split * split_tokens)
        end_key = min(end_key, (split + 1) * split_tokens)
        total = tl.full((BLOCK_ROWS, BLOCK_DIM), 0.0, tl.float32)
        mass = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
        peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        head_offset = kv_head * kv_head_stride
        own_key_scales = None if key_scales is None else key_scales + kv_head * PAGE_TOKENS
        own_value_scales = None if value_scales is None else value_scales + kv_head * PAGE_TOKENS
        total, mass, peak = attend_keys(
            q, total, mass, peak, keys + head_offset, values + head_offset, own_key_scales, own_value_scales,
            page_ids + tl.load(tile_table + tile),
            first_key // BLOCK_KEYS * BLOCK_KEYS, end_key, first_key, end_key, first_visible, end_visible,
            page_stride, token_stride, scale_stride, score_scale, exponent_scale, cap,
            True, SCALES_VALUES, UPCAST, PAGE_TOKENS, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM,
        )  # fmt: skip

        own_split = split - first_visible // split_tokens  # [BLOCK_ROWS] counted from the first that the query sees
        is_own = (rows // GROUP < num_queries) & (own_split >= 0) & (split * split_tokens < end_visible)
        is_own &= first_visible < end_visible
        slot = tl.load(first_slot + rows // GROUP, mask=is_own, other=0) + own_split
        parts = slot.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP
        dims = tl.arange(0, BLOCK_DIM)
        mask = is_own[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(totals + parts[:, None] * HEAD_DIM + dims[None, :], total, mask=mask)
        tl.store(masses + parts, mass, mask=is_own)
        tl.store(peaks + parts, peak * exponent_scale, mask=is_own)
        tile = next_tile
        split = next_split


@triton.jit
def attend_rolling_tiles_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    output,
    learned,
    cosines,
    sines,
    page_ids,
    tile_row,
    tile_length,
    tile_position,
    tile_table,
    tile_window,
    tile_sinks,
    tile_sink_table,
    row_stride,
    head_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    scale_stride,
    score_scale,
    exponent_scale,
    cap,
    SCALES_VALUES: tl.constexpr,
    UPCAST: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIR_STEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Computes one tile of the queries of a chunk, for one KV head: first over their sinks, then over their windows.

    `learned` are the model's learned sinks, [heads] logits. A tile without queries is padding.
    """
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    num_queries = tl.load(tile_length + tile)
    if num_queries <= 0:
        return
    position = tl.load(tile_position + tile)
    first_row = tl.load(tile_row + tile)
    window = tl.load(tile_window + tile)
    sinks = tl.load(tile_sinks + tile)
    rows = tl.arange(0, BLOCK_ROWS)
    end_visible = position + rows // GROUP + 1
    end_key = position + num_queries
    total = tl.full((BLOCK_ROWS, BLOCK_DIM), 0.0, tl.float32)
    mass = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
    peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    keys += kv_head * kv_head_stride
    values += kv_head * kv_head_stride
    if key_scales is not None:
        key_scales += kv_head * PAGE_TOKENS
        value_scales += kv_head * PAGE_TOKENS

    q = load_turned_queries(
        query, cosines, sines, True, first_row, kv_head, num_queries, row_stride, head_stride,
        UPCAST, GROUP, HEAD_DIM, ROTARY_DIM, PAIR_STEP, BLOCK_ROWS, BLOCK_DIM,
    )  # fmt: skip
    sinks_end = min(end_key, sinks)
    total, mass, peak = attend_keys(
        q, total, mass, peak, keys, values, key_scales, value_scales, page_ids + tl.load(tile_sink_table + tile),
        0, sinks_end, 0, sinks_end, tl.full((BLOCK_ROWS,), 0, tl.int32), tl.minimum(end_visible, sinks),
        page_stride, token_stride, scale_stride, score_scale, exponent_scale, cap,
        True, SCALES_VALUES, UPCAST, PAGE_TOKENS, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM,
    )  # fmt: skip

    q = load_queries(
        query, first_row, kv_head, num_queries, row_stride, head_stride,
        UPCAST, GROUP, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM,
    )  # fmt: skip
    table = page_ids + tl.load(tile_table + tile)
    first_visible = tl.maximum(end_visible - window, sinks)
    first_key = max(position + 1 - window, sinks)
    whole_from = (max(end_key - window, sinks) + BLOCK_KEYS - 1) // BLOCK_KEYS * BLOCK_KEYS
    whole_to = max((position + 1) // BLOCK_KEYS * BLOCK_KEYS, whole_from)
    total, mass, peak = attend_keys(
        q, total, mass, peak, keys, values, key_scales, value_scales, table,
        first_key // BLOCK_KEYS * BLOCK_KEYS, min(whole_from, end_key), first_key, end_key, first_visible, end_visible,
        page_stride, token_stride, scale_stride, score_scale, exponent_scale, cap,
        True, SCALES_VALUES, UPCAST, PAGE_TOKENS, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM,
    )  # fmt: skip
    total, mass, peak = attend_keys(
        q, total, mass, peak, keys, values, key_scales, value_scales, table,
        whole_from, whole_to, first_key, end_key, first_visible, end_visible,
        page_stride, token_stride, scale_stride, score_scale, exponent_scale, cap,
        False, SCALES_VALUES, UPCAST, PAGE_TOKENS, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM,
    )  # fmt: skip
    total, mass, peak = attend_keys(
        q, total, mass, peak, keys, values, key_scales, value_scales, table,
        whole_to, end_key, first_key, end_key, first_visible, end_visible,
        page_stride, token_stride, scale_stride, score_scale, exponent_scale, cap,
        True, SCALES_VALUES, UPCAST, PAGE_TOKENS, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM,
    )  # fmt: skip

    store_attention(
        output, total, mass, peak, learned, first_row, kv_head, num_queries, exponent_scale,
        LOG2_E, KV_HEADS, GROUP, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM,
    )  # fmt: skip
