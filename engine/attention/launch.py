"""Launches the Triton kernels of attention over KV pages.

The score of a query and a key is scale * (query . key), then soft-capped if the model does so. A sink is a learned
logit of each head, which takes part in the softmax but has no value. Keys and values in the pages may be quantised: codes
of one byte, which times the scale of a head of a token are its key and its value.

Under the interpreter (TRITON_INTERPRET=1, tensors on the CPU) values are converted to fp32 when they are loaded,
because the interpreter computes bf16 wrongly.
"""

from dataclasses import dataclass
from typing import Any

import torch

from graftwork.engine.attention.kernel_shape import (
    AttentionShape,
    Blocks,
    chunk_blocks,
    decode_blocks,
    rolling_decode_blocks,
)
from graftwork.engine.attention.paged_kernels import attend_splits_kernel, attend_tiles_kernel, merge_splits_kernel
from graftwork.engine.attention.rolling_kernels import attend_rolling_splits_kernel, attend_rolling_tiles_kernel
from graftwork.engine.attention.tiles import max_splits
from graftwork.engine.kernels.angles import RowAngles
from graftwork.engine.kernels.launch import Launch

LOG2_E = 1.4426950408889634
_MERGED_SPLITS = 16
"""Splits whose partial sums a merging program loads at a time."""
_MERGE_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class ScoreRules:
    """How one layer turns products of queries and keys into weights."""

    scale: float
    window: int | None = None
    """A query sees this many keys up to its own; None means all."""
    cap: float | None = None
    """Scores become cap * tanh(score / cap); None leaves them as they are."""
    sinks: torch.Tensor | None = None  # [num_heads] logits; None if the model has none


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The keys and values of one layer, as views of the pages."""

    keys: torch.Tensor  # [num_pages, page_tokens, kv_heads, head_dim] numbers, or codes of int8 or float8_e4m3fn
    values: torch.Tensor  # the same strides
    key_scales: torch.Tensor | None = None  # bf16 [num_pages, page_tokens, kv_heads]; None if numbers are not scaled
    value_scales: torch.Tensor | None = None  # the same strides

    @property
    def arguments(self) -> dict[str, Any]:
        page, token, head, element = self.keys.stride()
        if self.values.stride() != (page, token, head, element) or element != 1:
            raise ValueError("keys and values must have the same strides, and the elements of a head must be adjacent")
        scales = [one for one in (self.key_scales, self.value_scales) if one is not None]
        if any(one.stride() != (scales[0].stride(0), 1, self.keys.shape[1]) for one in scales):
            raise ValueError("scales must have the same strides, and those of a head in a page must be adjacent")
        return {
            "keys": self.keys,
            "values": self.values,
            "key_scales": self.key_scales,
            "value_scales": self.value_scales,
            "page_stride": page,
            "token_stride": token,
            "kv_head_stride": head,
            "scale_stride": scales[0].stride(0) if scales else 0,
        }


@dataclass(frozen=True, slots=True)
class PartialSums:
    """The memory for partial sums of decoding rows. All layers use the same. A slot is one query over one split."""

    totals: torch.Tensor  # fp32 [num_slots, num_heads, head_dim] weighted sums of values
    masses: torch.Tensor  # fp32 [num_slots, num_heads] sums of weights
    peaks: torch.Tensor  # fp32 [num_slots, num_heads] largest exponents

    @classmethod
    def empty(cls, shape: AttentionShape, num_slots: int, device: torch.device) -> "PartialSums":
        sizes = (num_slots, shape.num_heads)
        totals, masses, peaks = (
            torch.empty((*sizes, *width), dtype=torch.float32, device=device) for width in ((shape.head_dim,), (), ())
        )
        return cls(totals, masses, peaks)

    @property
    def num_slots(self) -> int:
        return len(self.totals)

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        return {"totals": self.totals, "masses": self.masses, "peaks": self.peaks}


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decoding rows of a step in layers with one window, on the device."""

    arrays: dict[str, torch.Tensor]
    """The arrays of DecodeTiles, and `page_ids`."""
    num_programs: int
    """The size of the grid; the programs share the items."""
    num_queries: int
    """The number of queries that are merged, padding included."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The prefill chunks of a step in layers with one window, on the device."""

    arrays: dict[str, torch.Tensor]
    """The arrays of QueryTiles, and `page_ids`."""
    num_tiles: int


@dataclass(frozen=True, slots=True)
class QueryTurns:
    """How the queries of a layer are turned back to their sinks."""

    angles: RowAngles
    """Of each row of the step: those of the distance by which its query is turned back."""
    is_interleaved: bool = False
    """Whether the two features of a pair are neighbours."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What all launches of one layer share."""

    shape: AttentionShape
    rules: ScoreRules
    query: torch.Tensor  # [num_rows, heads, head_dim], any stride between rows and heads
    output: torch.Tensor  # [num_rows, heads * head_dim], contiguous; each launch writes its own rows
    pages: LayerPages


def attend_decoding(layer: LayerAttention, decoding: Decoding, sums: PartialSums) -> None:
    """Computes attention of the decoding rows of a step, and writes their rows of the output. Two launches."""
    if decoding.num_programs:
        splits_launch(layer, decoding, sums).run()
    if decoding.num_queries:
        merge_launch(layer, decoding, sums).run()


def attend_chunks(layer: LayerAttention, chunks: Chunks) -> None:
    """Computes attention of all chunks of a step, and writes their rows of the output. One launch."""
    if chunks.num_tiles:
        tiles_launch(layer, chunks).run()


def attend_rolling_decoding(
    layer: LayerAttention, decoding: Decoding, turns: QueryTurns | None, sums: PartialSums
) -> None:
    """Computes partial sums of decoding rows with a rolling window; `attend_decoding` merges them. One launch.

    `turns` are None for a layer that rotates nothing.
    """
    if decoding.num_programs:
        rolling_splits_launch(layer, decoding, turns, sums).run()


def attend_rolling_chunks(layer: LayerAttention, chunks: Chunks, turns: QueryTurns | None) -> None:
    """Computes attention of all chunks of requests with a rolling window, and writes their rows of the output. One launch."""
    if chunks.num_tiles:
        rolling_tiles_launch(layer, chunks, turns).run()


def splits_launch(layer: LayerAttention, decoding: Decoding, sums: PartialSums) -> Launch:
    """Returns the launch that computes partial sums of decoding rows, without running it."""
    blocks = decode_blocks(layer.shape)
    merged_alone = ("query_row", "query_keys", "query_split")
    arrays = {name: array for name, array in decoding.arrays.items() if name not in merged_alone}
    arguments = _arguments_of(layer, blocks) | _window_of(layer) | sums.arguments | arrays
    return Launch(attend_splits_kernel, (decoding.num_programs,), arguments, blocks.options)


def merge_launch(layer: LayerAttention, decoding: Decoding, sums: PartialSums) -> Launch:
    """Returns the launch that adds the partial sums of decoding rows, without running it."""
    shape, rules = layer.shape, layer.rules
    arguments = {
        "output": layer.output,
        **sums.arguments,
        **{name: decoding.arrays[name] for name in ("query_row", "query_keys", "query_split", "query_slot")},
        "sinks": rules.sinks,
        **_window_of(layer),
        "NUM_HEADS": shape.num_heads,
        "HEAD_DIM": shape.head_dim,
        "MAX_SPLITS": 1 << (max_splits(shape.num_kv_heads) - 1).bit_length(),
        "BLOCK_SPLITS": _MERGED_SPLITS,
        "BLOCK_DIM": shape.block_dim,
    }
    return Launch(merge_splits_kernel, (decoding.num_queries, shape.num_heads), arguments, _MERGE_OPTIONS)


def tiles_launch(layer: LayerAttention, chunks: Chunks) -> Launch:
    """Returns the launch that computes chunks, without running it."""
    blocks = chunk_blocks(layer.shape)
    arguments = _arguments_of(layer, blocks) | _window_of(layer) | chunks.arrays
    arguments |= {"output": layer.output, "sinks": layer.rules.sinks}
    return Launch(attend_tiles_kernel, (chunks.num_tiles * layer.shape.num_kv_heads,), arguments, blocks.options)


def rolling_splits_launch(
    layer: LayerAttention, decoding: Decoding, turns: QueryTurns | None, sums: PartialSums
) -> Launch:
    """Returns the launch that computes partial sums of decoding rows with a rolling window, without running it."""
    blocks = rolling_decode_blocks(layer.shape)
    arguments = _arguments_of(layer, blocks) | _turns_of(layer, turns) | sums.arguments | decoding.arrays
    return Launch(attend_rolling_splits_kernel, (decoding.num_programs,), arguments, blocks.options)


def rolling_tiles_launch(layer: LayerAttention, chunks: Chunks, turns: QueryTurns | None) -> Launch:
    """Returns the launch that computes chunks of requests with a rolling window, without running it."""
    blocks = chunk_blocks(layer.shape)
    arguments = _arguments_of(layer, blocks) | _turns_of(layer, turns) | chunks.arrays
    arguments |= {"output": layer.output, "learned": layer.rules.sinks}
    grid = (chunks.num_tiles * layer.shape.num_kv_heads,)
    return Launch(attend_rolling_tiles_kernel, grid, arguments, blocks.options)


def _window_of(layer: LayerAttention) -> dict[str, Any]:
    """Returns the arguments that say what a query sees in a layer."""
    window = layer.rules.window
    return {"window": window or 0, "HAS_WINDOW": window is not None}


def _turns_of(layer: LayerAttention, turns: QueryTurns | None) -> dict[str, Any]:
    """Returns the arguments that say how queries are turned back."""
    if turns is None:  # the kernels then read no angles
        return {"cosines": layer.query, "sines": layer.query, "ROTARY_DIM": 0, "PAIR_STEP": 1}
    cosines, sines = turns.angles.cosines, turns.angles.sines
    step = 2 if turns.is_interleaved else 1
    return {"cosines": cosines, "sines": sines, "ROTARY_DIM": cosines.shape[1], "PAIR_STEP": step}


def _arguments_of(layer: LayerAttention, blocks: Blocks) -> dict[str, Any]:
    """Returns what all kernels that read the pages take."""
    rules, query = layer.rules, layer.query
    if query.stride(2) != 1:
        raise ValueError("the elements of a query must be adjacent in memory")
    return {
        "query": query,
        **layer.pages.arguments,
        "row_stride": query.stride(0),
        "head_stride": query.stride(1),
        "score_scale": rules.scale,
        "exponent_scale": LOG2_E if rules.cap is not None else rules.scale * LOG2_E,
        "cap": rules.cap,
        "SCALES_VALUES": layer.shape.has_codes and layer.shape.dtype == torch.float16,
        "UPCAST": query.device.type == "cpu",
        **layer.shape.constants,
        "BLOCK_ROWS": blocks.rows,
        "BLOCK_KEYS": blocks.keys,
    }
