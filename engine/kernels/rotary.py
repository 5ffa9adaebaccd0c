# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Prepares attention in one launch: normalises and rotates queries and keys, and writes KV into the pages of the cache.

    query = rotate(norm(q))                     to a tensor of its own; a layer may have queries alone
    pages[page, offset] = rotate(norm(k)), v    and zeros to the rest of a page that the step begins; as they are, or as codes
                                                of one byte, with a scale for each head of a token (see codes.py)

One program computes one token and some heads: of the queries, the keys or the values. A head is read as pairs of
features, as they are rotated (RoFormer, Su et al. 2021, arXiv 2104.09864), with cosines and sines from a table. Pairs
of features that are not rotated get the cosine 1 and the sine 0, which changes no bit.

Rotation has the same bits as torch's: fp32 products and sums are rounded one by one (enable_fp_fusion is off) in
torch's order. Norms of heads have not always, because squares are summed in another order (see norm.py). Nothing of a
row depends on other rows. Only the zeros do: the last row of a page zeroes what follows, if the page's first row is in
the same step. So the rows of one request must be consecutive, in the order of their positions.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from graftwork.engine.kernels.blocks import rounded, scaled_norm, sum_of
from graftwork.engine.kernels.codes import codes_of, head_scales
from graftwork.engine.kernels.launch import Launch


@triton.jit
def find_tail(row_pages, row, page, offset, num_tokens, PAGE_TOKENS: tl.constexpr):
    """Returns the first position of a page that this row must zero. PAGE_TOKENS if it must zero nothing.

    `page` and `offset` are where the row's own KV is written. The step begins the page if the row that is `offset` rows
    before this one writes to the same page: rows of a request are consecutive, so that row writes to position 0.
    """
    is_last = tl.load(row_pages + row + 1, mask=row + 1 < num_tokens, other=-1) != page
    first = row - offset
    first_page = tl.load(row_pages + first, mask=first >= 0, other=-1)
    return tl.where(is_last & (first_page == page), offset + 1, PAGE_TOKENS)


@triton.jit
def paired_features(BLOCK_HALF: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, STEP: tl.constexpr):
    """Returns the first and the second feature of each pair of a head, [BLOCK_HALF] each.

    If STEP is 2, pairs are neighbours. Otherwise the two features of a pair are half of the rotated features apart; those
    that are not rotated are paired in the same way among themselves.
    """
    pairs = tl.arange(0, BLOCK_HALF)
    if STEP == 2:
        first = 2 * pairs
        second = first + 1
    elif ROTARY_DIM == HEAD_DIM or ROTARY_DIM == 0:
        first = pairs
        second = pairs + HEAD_DIM // 2
    else:
        is_rotated = pairs < ROTARY_DIM // 2
        first = tl.where(is_rotated, pairs, pairs + ROTARY_DIM // 2)
        second = first + tl.where(is_rotated, ROTARY_DIM // 2, (HEAD_DIM - ROTARY_DIM) // 2)
    return first, second


@triton.jit
def normalised_heads(
    first, second, first_weight, second_weight, epsilon, KIND: tl.constexpr, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Normalises heads. first, second: the two features of each pair, and their weights, fp32 [heads, pairs]."""
    mean_square = (sum_of(first * first + second * second, 1) / HEAD_DIM)[:, None]
    first = scaled_norm(first, mean_square, first_weight, epsilon, KIND, DTYPE)
    second = scaled_norm(second, mean_square, second_weight, epsilon, KIND, DTYPE)
    return first, second


@triton.jit
def weighted_heads(
    first,
    second,
    weights,
    firsts,
    seconds,
    mask,
    epsilon,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Normalises heads by the weights at the addresses `weights`, [heads, 1]."""
    first_weight = tl.load(weights + firsts, mask=mask, other=0.0).to(tl.float32)
    second_weight = tl.load(weights + seconds, mask=mask, other=0.0).to(tl.float32)
    return normalised_heads(first, second, first_weight, second_weight, epsilon, KIND, DTYPE, HEAD_DIM)


@triton.jit
def store_heads(targets, firsts, seconds, first, second, mask):
    """Stores both features of each pair. `targets` are the addresses of heads, [heads, 1]."""
    dtype = targets.dtype.element_ty
    tl.store(targets + firsts, first.to(dtype), mask=mask)
    tl.store(targets + seconds, second.to(dtype), mask=mask)


@triton.jit
def store_codes(
    targets,
    scale_targets,
    firsts,
    seconds,
    first,
    second,
    mask,
    head_mask,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Stores heads as codes of KIND, as torch would store them in DTYPE first. `targets` are the addresses of heads,
    [heads, 1], and `scale_targets` those of their scales, [heads].
    """
    first, second = rounded(first, DTYPE), rounded(second, DTYPE)
    bits, scale = head_scales(first, second, KIND)
    divisor = tl.broadcast_to(tl.where(scale == 0.0, 1.0, scale)[:, None], first.shape)
    tl.store(targets + firsts, codes_of(tl.div_rn(first, divisor), KIND), mask=mask)
    tl.store(targets + seconds, codes_of(tl.div_rn(second, divisor), KIND), mask=mask)
    tl.store(scale_targets, bits, mask=head_mask)


@triton.jit
def write_heads(
    pages,
    scales,
    page,
    offset,
    tail,
    heads,
    firsts,
    seconds,
    first,
    second,
    mask,
    head_mask,
    page_stride,
    slot_stride,
    scale_page_stride,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
):
    """Writes some heads of a key or a value to position `offset` of a page, and zeroes the positions from `tail` on.

    `pages` and `scales` are the addresses of page 0; `scales` are None if KIND is None.
    """
    slots = pages + page * page_stride + heads[:, None] * HEAD_DIM
    if KIND is None:
        store_heads(slots + offset * slot_stride, firsts, seconds, first, second, mask)
    else:
        scale_slots = scales + page * scale_page_stride + heads * PAGE_TOKENS
        store_codes(
            slots + offset * slot_stride, scale_slots + offset, firsts, seconds, first, second, mask, head_mask,
            KIND, DTYPE,
        )  # fmt: skip
        for position in range(tail, PAGE_TOKENS):
            tl.store(scale_slots + position, tl.full(heads.shape, 0, tl.int16), mask=head_mask)
    zero_tail(slots, firsts, seconds, slot_stride, tail, mask, PAGE_TOKENS)


@triton.jit
def zero_tail(targets, firsts, seconds, slot_stride, tail, mask, PAGE_TOKENS: tl.constexpr):
    """Zeroes some heads of the positions [tail, PAGE_TOKENS) of a page. `targets` are the addresses at position 0."""
    zeros = tl.full(mask.shape, 0.0, tl.float32)
    for position in range(tail, PAGE_TOKENS):
        store_heads(targets + position * slot_stride, firsts, seconds, zeros, zeros, mask)


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_and_store_kernel(
    qkv,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    qk_norm,
    cosines,
    sines,
    positions,
    row_pages,
    row_offsets,
    num_tokens,
    qkv_stride,
    page_stride,
    slot_stride,
    scale_page_stride,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORM_KIND: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIR_STEP: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    KIND: tl.constexpr,
):
    """Computes BLOCK_HEADS heads of one token: of its query, its key or its value."""
    dtype = qkv.dtype.element_ty
    query_blocks: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    kv_blocks: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    row = tl.program_id(0)
    block = tl.program_id(1)
    is_query = block < query_blocks
    is_value = block >= query_blocks + kv_blocks
    first_block = tl.where(is_query, 0, tl.where(is_value, query_blocks + kv_blocks, query_blocks))
    head_limit = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    first_head = tl.where(is_query, 0, tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))

    heads = (block - first_block) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # of the queries, keys or values
    pairs = tl.arange(0, BLOCK_HALF)
    mask = (heads < head_limit)[:, None] & (pairs < HEAD_DIM // 2)[None, :]
    firsts, seconds = paired_features(BLOCK_HALF, HEAD_DIM, ROTARY_DIM, PAIR_STEP)
    firsts, seconds = firsts[None, :], seconds[None, :]
    starts = heads[:, None] * HEAD_DIM
    sources = qkv + row.to(tl.int64) * qkv_stride + first_head * HEAD_DIM + starts
    first = tl.load(sources + firsts, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(sources + seconds, mask=mask, other=0.0).to(tl.float32)
    weights = qk_norm + first_head * HEAD_DIM + starts
    if NORMS_VALUES:
        first, second = weighted_heads(
            first, second, weights, firsts, seconds, mask, epsilon, NORM_KIND, dtype, HEAD_DIM
        )
    if not is_value:
        if HAS_NORM and not NORMS_VALUES:
            first, second = weighted_heads(
                first, second, weights, firsts, seconds, mask, epsilon, NORM_KIND, dtype, HEAD_DIM
            )
        if ROTARY_DIM > 0:
            angles = tl.load(positions + row).to(tl.int64) * ROTARY_DIM + pairs * PAIR_STEP
            is_rotated = pairs < ROTARY_DIM // 2
            cos = tl.load(cosines + angles, mask=is_rotated, other=1.0)[None, :]
            sin = tl.load(sines + angles, mask=is_rotated, other=0.0)[None, :]
            first, second = first * cos - second * sin, second * cos + first * sin
    if is_query:
        targets = query + row.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + starts
        store_heads(targets, firsts, seconds, first, second, mask)
        return

    page = tl.load(row_pages + row).to(tl.int64)
    offset = tl.load(row_offsets + row).to(tl.int32)
    tail = find_tail(row_pages, row, page, offset, num_tokens, PAGE_TOKENS)
    head_mask = heads < head_limit
    if is_value:
        write_heads(
            values, value_scales, page, offset, tail, heads, firsts, seconds, first, second, mask, head_mask,
            page_stride, slot_stride, scale_page_stride, KIND, dtype, HEAD_DIM, PAGE_TOKENS,
        )  # fmt: skip
    else:
        write_heads(
            keys, key_scales, page, offset, tail, heads, firsts, seconds, first, second, mask, head_mask,
            page_stride, slot_stride, scale_page_stride, KIND, dtype, HEAD_DIM, PAGE_TOKENS,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KvPages:
    """The keys and values of one layer in all pages, to which rows are written."""

    keys: torch.Tensor  # [frames, page_tokens, kv_heads, head_dim] numbers, or codes as uint8
    values: torch.Tensor  # the same, with the same strides
    key_scales: torch.Tensor | None = None  # bf16 [frames, page_tokens, kv_heads]; None for numbers as they are
    value_scales: torch.Tensor | None = None  # the same
    kind: str | None = None
    """What codes are: "int8" or "fp8"; None for numbers as they are."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The kernel's arguments. Raises ValueError if the strides do not fit."""
        keys, values = self.keys, self.values
        if keys.stride() != values.stride() or keys.stride()[2:] != (keys.shape[3], 1):
            raise ValueError("the heads of a token must be contiguous in a page, in keys and values alike")
        found = {
            "keys": keys,
            "values": values,
            "key_scales": None,
            "value_scales": None,
            "page_stride": keys.stride(0),
            "slot_stride": keys.stride(1),
            "scale_page_stride": 0,
            "KIND": self.kind,
        }
        if self.key_scales is None or self.value_scales is None:
            return found
        scales = self.key_scales, self.value_scales
        if any(one.stride() != (scales[0].stride(0), 1, keys.shape[1]) for one in scales):
            raise ValueError("the scales of a head must be contiguous in a page, in keys and values alike")
        bits = [one.view(torch.int16) for one in scales]  # which the interpreter rounds as a GPU does
        return found | {"key_scales": bits[0], "value_scales": bits[1], "scale_page_stride": scales[0].stride(0)}


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where the rows (tokens) of one step stand. All are on the device, int32 or int64 [num_tokens]."""

    positions: torch.Tensor
    """The position of each token in its request. Chooses the row of the tables of cosines and sines."""
    pages: torch.Tensor
    """The page that each token's KV is written to."""
    offsets: torch.Tensor
    """The position in that page."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The norms of the heads of queries and keys, and of those of values if there are rows for them."""

    weight: (
        torch.Tensor
    )  # [heads + kv_heads, head_dim] or [heads + 2 * kv_heads, head_dim]; [heads, head_dim] for queries
    epsilon: float
    kind: str = "rms"
    """A NormKind: "rms" or "rms_rounded_once"."""


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """The table of a layer's rotary embedding."""

    cosines: torch.Tensor  # fp32 [context, rotated features], contiguous
    sines: torch.Tensor  # the same
    is_interleaved: bool = False
    """Whether the two features of a pair are neighbours."""


def rotate_and_store_launch(
    qkv: torch.Tensor,
    query: torch.Tensor,
    kv: KvPages,
    table: RotaryAngles | None,
    rows: RowPlaces,
    norm: HeadNorm | None,
) -> Launch:
    """Returns the launch that writes rotated queries to `query`, and keys and values into the pages `kv`.

    qkv: [num_tokens, (heads + 2 * kv_heads) * head_dim] with any stride between rows; if it has queries alone, nothing is
    written to pages. query: [num_tokens, heads, head_dim], contiguous. A table of None rotates nothing. Raises ValueError if
    the strides do not fit.
    """
    num_heads, head_dim = query.shape[1:]
    page_tokens, heads_of_page = kv.keys.shape[1:3]
    num_kv_heads = heads_of_page if qkv.shape[1] > num_heads * head_dim else 0
    angles = () if table is None else (table.cosines, table.sines)
    is_dense = query.is_contiguous() and all(part.is_contiguous() for part in angles) and qkv.stride(1) == 1
    if not is_dense:
        raise ValueError("query and tables must be contiguous, and so must the heads of a token in qkv")
    block_heads = min(triton.next_power_of_2(heads_of_page), 8)
    block_half = triton.next_power_of_2(head_dim // 2)
    arguments: dict[str, Any] = {
        "qkv": qkv,
        "query": query,
        **kv.arguments,
        "qk_norm": qkv if norm is None else norm.weight,
        "cosines": qkv if table is None else table.cosines,
        "sines": qkv if table is None else table.sines,
        "positions": rows.positions,
        "row_pages": rows.pages,
        "row_offsets": rows.offsets,
        "num_tokens": len(qkv),
        "qkv_stride": qkv.stride(0),
        "epsilon": 0.0 if norm is None else norm.epsilon,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE_TOKENS": page_tokens,
        "HAS_NORM": norm is not None,
        "NORM_KIND": "rms" if norm is None else norm.kind,
        "ROTARY_DIM": 0 if table is None else table.cosines.shape[1],
        "PAIR_STEP": 2 if table is not None and table.is_interleaved else 1,
        "BLOCK_HEADS": block_heads,
        "BLOCK_HALF": block_half,
        "NORMS_VALUES": norm is not None and num_kv_heads > 0 and len(norm.weight) == num_heads + 2 * num_kv_heads,
    }
    grid = (len(qkv), triton.cdiv(num_heads, block_heads) + 2 * triton.cdiv(num_kv_heads, block_heads))
    num_warps = min(max(block_heads * block_half // 128, 1), 4)
    options = {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False}
    return Launch(rotate_and_store_kernel, grid, arguments, options)
