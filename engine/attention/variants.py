"""Lists the variants of the attention kernels that are compiled ahead (see engine/kernels/compile_ahead.py)."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from graftwork.engine.attention.kernel_shape import AttentionShape
from graftwork.engine.attention.launch import (
    Chunks,
    Decoding,
    LayerAttention,
    LayerPages,
    PartialSums,
    QueryTurns,
    ScoreRules,
    merge_launch,
    rolling_splits_launch,
    rolling_tiles_launch,
    splits_launch,
    tiles_launch,
)
from graftwork.engine.attention.rolling_tiles import RollingChunkTiles, RollingDecodeTiles
from graftwork.engine.attention.tiles import DecodeTiles, QueryTiles
from graftwork.engine.kernels.angles import Rotation, RowAngles, step_angles_launch
from graftwork.engine.kernels.compile_ahead import KernelVariant, variant_of
from graftwork.engine.kernels.launch import Launch
from graftwork.engine.model.config import ModelConfig

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class NamedShape:
    """A model's attention, for which all kernels are compiled."""

    name: str
    shape: AttentionShape
    window: int | None = None
    cap: float | None = None
    has_sinks: bool = False
    rotated: int | None = None
    """How many features of a head are rotated; None for all, 0 for none."""
    is_interleaved: bool = False
    """Whether the two features of a rotated pair are neighbours."""


def _shape(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kv: torch.dtype | None = None
) -> AttentionShape:
    return AttentionShape(heads, kv_heads, head_dim, 16, dtype, kv or dtype)


SHAPES = (
    NamedShape("32/8x128 bf16", _shape(32, 8, 128, torch.bfloat16)),
    NamedShape("32/8x128 bf16 window", _shape(32, 8, 128, torch.bfloat16), window=4096),
    NamedShape("14/2x64 bf16", _shape(14, 2, 64, torch.bfloat16)),
    NamedShape("64/8x64 bf16 window sinks", _shape(64, 8, 64, torch.bfloat16), window=128, has_sinks=True),
    NamedShape("32/32x96 bf16", _shape(32, 32, 96, torch.bfloat16), rotated=72, is_interleaved=True),
    NamedShape("32/32x80 fp16", _shape(32, 32, 80, torch.float16), rotated=0),
    NamedShape("16/8x256 bf16 window cap", _shape(16, 8, 256, torch.bfloat16), window=4096, cap=50.0),
    NamedShape("32/8x128 fp32", _shape(32, 8, 128, torch.float32)),
    NamedShape("32/8x128 bf16 int8 pages", _shape(32, 8, 128, torch.bfloat16, torch.int8)),
    NamedShape("32/8x128 bf16 fp8 pages", _shape(32, 8, 128, torch.bfloat16, torch.float8_e4m3fn)),
    NamedShape("64/8x64 fp16 int8 pages window", _shape(64, 8, 64, torch.float16, torch.int8), window=128),
    NamedShape("16/8x256 bf16 int8 pages cap", _shape(16, 8, 256, torch.bfloat16, torch.int8), cap=50.0),
    NamedShape("14/2x64 fp16 fp8 pages", _shape(14, 2, 64, torch.float16, torch.float8_e4m3fn)),
    NamedShape("32/8x128 fp32 int8 pages", _shape(32, 8, 128, torch.float32, torch.int8)),
    NamedShape("32/32x96 bf16 fp8 pages", _shape(32, 32, 96, torch.bfloat16, torch.float8_e4m3fn), rotated=72),
)
"""Together they cover the dtypes, head sizes and groups of common models, all flags, and all forms of KV."""


def attention_variants() -> Iterator[KernelVariant]:
    """Yields the three kernels for each of SHAPES, and those of rows with a rolling window."""
    for named in SHAPES:
        for launch in (*launches_for(named), *rolling_launches_for(named)):
            yield variant_of(named.name, launch, least_capability=_least_capability(named.shape))


def _least_capability(shape: AttentionShape) -> int:
    """Returns the oldest architecture that converts the codes of pages."""
    return 89 if shape.kv_dtype == torch.float8_e4m3fn else 80


def served_attention_variants(
    model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, page_tokens: int
) -> Iterator[KernelVariant]:
    """Yields what an engine may launch for a model: three kernels for each window that a layer has, and those of rows with a
    rolling window for each rotary embedding of the layers that have none. `kv_dtype` is that of numbers or codes in pages.
    """
    shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, page_tokens, dtype, kv_dtype)
    least = _least_capability(shape)
    for window in dict.fromkeys(model.windows):
        name = "attention" if window is None else f"attention window {window}"
        for launch in launches_for(NamedShape(name, shape, window, model.scales.attention_cap, model.block.has_sinks)):
            yield variant_of(name, launch, least_capability=least)
    if model.recurrence is not None:  # which cannot forget
        return
    rolling = (rope for rope, window in zip(model.ropes, model.windows, strict=True) if window is None)
    for rope in dict.fromkeys(rolling):
        rotated = 0 if rope is None else rope.rotated_features(model.head_dim)
        named = NamedShape(
            f"rolling attention, {rotated} rotated",
            shape,
            cap=model.scales.attention_cap,
            has_sinks=model.block.has_sinks,
            rotated=rotated,
            is_interleaved=rope is not None and rope.is_interleaved,
        )
        for launch in rolling_launches_for(named):
            yield variant_of(named.name, launch, least_capability=least)


def launches_for(named: NamedShape) -> tuple[Launch, Launch, Launch]:
    """Returns the launches of one layer: partial sums and their merge for decoding, and tiles for prefill.

    Their tensors have no memory.
    """
    layer, sums = _layer_of(named, named.window), PartialSums.empty(named.shape, 4, _META)
    decode, chunk = _arrays(DecodeTiles), _arrays(QueryTiles)
    decoding = Decoding(decode, num_programs=4, num_queries=4)
    return (
        splits_launch(layer, decoding, sums),
        merge_launch(layer, decoding, sums),
        tiles_launch(layer, Chunks(chunk, 4)),
    )


def rolling_launches_for(named: NamedShape) -> tuple[Launch, ...]:
    """Returns the launches of rows with a rolling window in one layer: partial sums for decoding, tiles for prefill, and the
    angles of both if the layer rotates.
    """
    layer, sums = _layer_of(named, None), PartialSums.empty(named.shape, 4, _META)
    rotated = named.shape.head_dim if named.rotated is None else named.rotated
    turns: QueryTurns | None = None
    launches: tuple[Launch, ...] = ()
    if rotated:
        rotation = Rotation(torch.empty(rotated // 2, device=_META), named.is_interleaved)
        turns = QueryTurns(RowAngles.empty(rotation, 4), named.is_interleaved)
        launches = (step_angles_launch(turns.angles, rotation, torch.empty(4, dtype=torch.int32, device=_META)),)
    decoding = Decoding(_arrays(RollingDecodeTiles), num_programs=4, num_queries=0)
    return (
        rolling_splits_launch(layer, decoding, turns, sums),
        rolling_tiles_launch(layer, Chunks(_arrays(RollingChunkTiles), 4), turns),
        *launches,
    )


def _layer_of(named: NamedShape, window: int | None) -> LayerAttention:
    shape = named.shape
    page_shape = (2, 2, shape.page_tokens, shape.num_kv_heads, shape.head_dim)  # keys and values of two layers
    pages = torch.empty((4, *page_shape), dtype=shape.kv_dtype, device=_META)
    query = torch.empty(4, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=_META)
    scales: tuple[torch.Tensor, ...] = ()
    if shape.has_codes:
        scale_shape = (4, 2, 2, shape.num_kv_heads, shape.page_tokens)
        both = torch.empty(scale_shape, dtype=torch.bfloat16, device=_META).transpose(3, 4)
        scales = both[:, 0, 0], both[:, 1, 0]
    sinks = torch.empty(shape.num_heads, dtype=torch.float32, device=_META) if named.has_sinks else None
    return LayerAttention(
        shape,
        ScoreRules(shape.head_dim**-0.5, window, named.cap, sinks),
        query,
        query.flatten(1),
        LayerPages(pages[:, 0, 0], pages[:, 1, 0], *scales),
    )


def _arrays(kind: type[QueryTiles]) -> dict[str, torch.Tensor]:
    names = (*(one.name for one in fields(kind)), "page_ids")
    return {name: torch.empty(4, dtype=torch.int32, device=_META) for name in names}
