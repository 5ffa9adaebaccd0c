# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines the Triton kernels of attention over KV pages.

    attend_splits  decoding: a program computes a tile of queries over one split of its keys, and writes partial sums
    merge_splits   decoding: a program adds the partial sums of one query and one head
    attend_tiles   prefill: a program computes a tile of queries over all its keys

A tile is up to BLOCK_ROWS / GROUP adjacent queries of one request. A split is a run of keys at a multiple of the split's
size, which follows from the query's own number of keys (see tiles.py). Programs take a tile's queries for one KV head.
Keys that no query of a tile sees are not read. There are no atomics.

Source: FlashAttention-2 (Dao 2023), Flash-Decoding (Dao et al. 2023), PagedAttention (Kwon et al. 2023).
"""

import triton
import triton.language as tl

from graftwork.engine.attention.online_softmax import LOG2_E, attend_keys, load_queries, store_attention
from graftwork.engine.kernels.blocks import max_of, sum_of

RUN_TIME_NUMBERS = ["window"]
"""Arguments whose values must not lead to new compiled variants."""


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def attend_splits_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    totals,
    masses,
    peaks,
    page_ids,
    tile_row,
    tile_query,
    tile_length,
    tile_position,
    tile_table,
    tile_split,
    item_tile,
    item_split,
    query_slot,
    num_items,
    window,
    row_stride,
    head_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    scale_stride,
    score_scale,
    exponent_scale,
    cap,
    HAS_WINDOW: tl.constexpr,
    SCALES_VALUES: tl.constexpr,
    UPCAST: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Computes tiles of decoding queries over splits of their keys.

    An item is one tile and one split. The programs take the items and KV heads in turn, so that a grid of any size
    computes all of them. Writes, for each query, head and split: the weighted sum of values, the sum of weights, and
    the largest exponent.
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
        first_slot = query_slot + tl.load(tile_query + tile)
        # The next item is on its way while this one is computed.
        next_item = (unit + step) // KV_HEADS
        next_tile = tl.load(item_tile + next_item, mask=unit + step < num_units, other=0)
        next_split = tl.load(item_split + next_item, mask=unit + step < num_units, other=0)

        q = load_queries(
            query, tl.load(tile_row + tile), kv_head, num_queries, row_stride, head_stride,
            UPCAST, GROUP, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip
        rows = tl.arange(0, BLOCK_ROWS)
        end_visible = position + rows // GROUP + 1
        first_visible = tl.full((BLOCK_ROWS,), 0, tl.int32)
        first_key = 0
        if HAS_WINDOW:
            first_visible = tl.maximum(end_visible - window, 0)
            first_key = max(position + 1 - window, 0)
        end_key = min(position + num_queries, (split + 1) * split_tokens)
        first_key = max(first_key, split * split_tokens)
        first_block = first_key // BLOCK_KEYS * BLOCK_KEYS
        total = tl.full((BLOCK_ROWS, BLOCK_DIM), 0.0, tl.float32)
        mass = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
        peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        head_offset = kv_head * kv_head_stride
        own_key_scales = None if key_scales is None else key_scales + kv_head * PAGE_TOKENS
        own_value_scales = None if value_scales is None else value_scales + kv_head * PAGE_TOKENS
        total, mass, peak = attend_keys(
            q, total, mass, peak, keys + head_offset, values + head_offset, own_key_scales, own_value_scales,
            page_ids + tl.load(tile_table + tile),
            first_block, end_key, first_key, end_key, first_visible, end_visible,
            page_stride, token_stride, scale_stride, score_scale, exponent_scale, cap,
            True, SCALES_VALUES, UPCAST, PAGE_TOKENS, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM,
        )  # fmt: skip

        own_split = split - first_visible // split_tokens  # [BLOCK_ROWS] counted from the first that the query sees
        is_own = (rows // GROUP < num_queries) & (own_split >= 0) & (split * split_tokens < end_visible)
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
def load_totals(totals, first_part, few, num_splits, dims, dim_mask, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Returns the weighted sums of values of the splits `few` of one query and one head: fp32 [splits, BLOCK_DIM]."""
    parts = first_part + few * NUM_HEADS
    mask = (few < num_splits)[:, None] & dim_mask[None, :]
    return tl.load(totals + parts[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def merge_splits_kernel(
    output,
    totals,
    masses,
    peaks,
    sinks,
    query_row,
    query_keys,
    query_split,
    query_slot,
    window,
    HAS_WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Adds the partial sums of one query and one head, in the order of the splits, and writes the output.

    A query with no keys is padding: its output is zero. A query without a row (-1) writes nothing.
    """
    query = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(query_row + query)
    num_keys = tl.load(query_keys + query)
    split_tokens = tl.load(query_split + query)
    slot = tl.load(query_slot + query)
    # Every number of a query without a row is -1. To ask for all of them loads them at the same time.
    if (row < 0) | (num_keys < 0) | (split_tokens < 0) | (slot < 0):
        return
    first_key = 0
    if HAS_WINDOW:
        first_key = max(num_keys - window, 0)
    num_splits = 0
    if num_keys > 0:
        num_splits = (num_keys - 1) // split_tokens - first_key // split_tokens + 1

    first_part = slot.to(tl.int64) * NUM_HEADS + head
    splits = tl.arange(0, MAX_SPLITS)
    parts = first_part + splits * NUM_HEADS
    exponents = tl.load(peaks + parts, mask=splits < num_splits, other=float("-inf"))
    mass = tl.load(masses + parts, mask=splits < num_splits, other=0.0)
    dims = tl.arange(0, BLOCK_DIM)
    dim_mask = dims < HEAD_DIM
    few = tl.arange(0, BLOCK_SPLITS)
    block = load_totals(totals, first_part, few, num_splits, dims, dim_mask, NUM_HEADS, HEAD_DIM)
    few_exponents = tl.load(peaks + first_part + few * NUM_HEADS, mask=few < num_splits, other=float("-inf"))
    top = max_of(exponents, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    denominator = sum_of(mass * tl.math.exp2(exponents - top), 0)
    if sinks is not None:
        denominator += tl.math.exp2(sink - top)

    total = sum_of(block * tl.math.exp2(few_exponents - top)[:, None], 0)
    for first_split in tl.range(BLOCK_SPLITS, num_splits, BLOCK_SPLITS, num_stages=3):
        few = first_split + tl.arange(0, BLOCK_SPLITS)
        few_exponents = tl.load(peaks + first_part + few * NUM_HEADS, mask=few < num_splits, other=float("-inf"))
        block = load_totals(totals, first_part, few, num_splits, dims, dim_mask, NUM_HEADS, HEAD_DIM)
        total += sum_of(block * tl.math.exp2(few_exponents - top)[:, None], 0)
    result = total * (1.0 / tl.where(denominator == 0.0, 1.0, denominator))
    pointers = output + (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(pointers, result.to(output.dtype.element_ty), mask=dim_mask)


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def attend_tiles_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    output,
    sinks,
    page_ids,
    tile_row,
    tile_length,
    tile_position,
    tile_table,
    window,
    row_stride,
    head_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    scale_stride,
    score_scale,
    exponent_scale,
    cap,
    HAS_WINDOW: tl.constexpr,
    SCALES_VALUES: tl.constexpr,
    UPCAST: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Computes one tile of the queries of a chunk, for one KV head, over all keys that they see.

    Only blocks at the causal border and at the window's border are masked. A tile without queries is padding.
    """
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    num_queries = tl.load(tile_length + tile)
    if num_queries <= 0:
        return
    position = tl.load(tile_position + tile)
    first_row = tl.load(tile_row + tile)
    q = load_queries(
        query, first_row, kv_head, num_queries, row_stride, head_stride,
        UPCAST, GROUP, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM,
    )  # fmt: skip
    rows = tl.arange(0, BLOCK_ROWS)
    end_visible = position + rows // GROUP + 1
    first_visible = tl.full((BLOCK_ROWS,), 0, tl.int32)
    end_key = position + num_queries
    first_key = 0
    whole_from = 0
    if HAS_WINDOW:
        first_visible = tl.maximum(end_visible - window, 0)
        first_key = max(position + 1 - window, 0)
        whole_from = (max(end_key - window, 0) + BLOCK_KEYS - 1) // BLOCK_KEYS * BLOCK_KEYS
    first_block = first_key // BLOCK_KEYS * BLOCK_KEYS
    whole_to = max((position + 1) // BLOCK_KEYS * BLOCK_KEYS, whole_from)

    total = tl.full((BLOCK_ROWS, BLOCK_DIM), 0.0, tl.float32)
    mass = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
    peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    keys += kv_head * kv_head_stride
    values += kv_head * kv_head_stride
    if key_scales is not None:
        key_scales += kv_head * PAGE_TOKENS
        value_scales += kv_head * PAGE_TOKENS
    table = page_ids + tl.load(tile_table + tile)
    if HAS_WINDOW:
        total, mass, peak = attend_keys(
            q, total, mass, peak, keys, values, key_scales, value_scales, table,
            first_block, min(whole_from, end_key), first_key, end_key, first_visible, end_visible,
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
        output, total, mass, peak, sinks, first_row, kv_head, num_queries, exponent_scale,
        LOG2_E, KV_HEADS, GROUP, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM,
    )  # fmt: skip
