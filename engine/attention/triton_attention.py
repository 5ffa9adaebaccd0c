"""Computes attention over the pages of the KV cache with Triton kernels, on CUDA devices.

The kernels read keys and values where they are in the pages, through page tables that are copied once a step. Once a
step, the host cuts the queries into tiles (tiles.py) for each kind of layer: its window, and the group whose page table
it reads. A layer then makes two launches for all decoding rows, and one for all chunks. No layer waits for the host, and
nothing is copied back.

Steps with requests that have a rolling window have tiles for these besides (rolling_tiles.py), in layers without a window
of their own: one more launch for decoding rows, and one for chunks. The first such layer computes the angles by which
queries are turned back, for all others.

Invariant: the bits of a decoding row follow from its own request alone, and a draft has the bits that it would have as
the only row of its request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from graftwork.engine.attention.backend import AttentionBatch, PlacedSlice
from graftwork.engine.attention.kernel_shape import AttentionShape, chunk_blocks, decode_blocks
from graftwork.engine.attention.launch import (
    Chunks,
    Decoding,
    LayerAttention,
    LayerPages,
    PartialSums,
    QueryTurns,
    ScoreRules,
    attend_chunks,
    attend_decoding,
    attend_rolling_chunks,
    attend_rolling_decoding,
)
from graftwork.engine.attention.packed_words import PackedWords
from graftwork.engine.attention.rolling_tiles import (
    PlacedRows,
    RollingChunkTiles,
    RollingDecodeTiles,
    cut_rolling,
    most_rolling_splits,
    parted,
    turn_distances,
)
from graftwork.engine.attention.tiles import (
    Cutting,
    DecodeTiles,
    QueryTiles,
    Words,
    cut_chunks,
    cut_decoding,
    group_tables,
)
from graftwork.engine.kernels.angles import Rotation, RowAngles, step_angles_launch
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.rope_config import RopeConfig
from graftwork.engine.model.rotary import rotary_frequencies

_PROGRAMS_OF_A_MULTIPROCESSOR = 4
"""Decoding programs that are launched for each multiprocessor. Two or three run at a time; the others follow."""
_INTERPRETED_PROGRAMS = 3


@dataclass(frozen=True, slots=True)
class StepCapacity:
    """The largest step that arrays of a fixed size can hold."""

    num_queries: int
    """Decoding rows; padding rows included if there are no chunks."""
    num_keys: int
    """The most keys of one row, its own key included."""
    num_pages: int
    """The page numbers of all page tables together."""
    num_chunk_rows: int = 0
    """The rows of chunks and the padding rows; 0 for a step of decoding rows alone."""
    num_chunks: int = 0
    has_rolling: bool = False
    """Whether any of the rows may have a rolling window."""

    def chunk_tiles(self, tile_queries: int) -> int:
        """Returns the most tiles of chunks and of padding. The last tile of each may be small; a chunk has two rows or more."""
        if not self.num_chunk_rows:
            return 0
        return self.num_chunk_rows // tile_queries + min(self.num_chunks, self.num_chunk_rows // 2) + 1


class TritonAttention:
    """The attention backend for CUDA. Owns the memory for partial sums, which all layers and steps use."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KvCache,
        dtype: torch.dtype,
        sinks: Sequence[torch.Tensor] | None = None,
        *,
        serves_rolling: bool = True,
    ) -> None:
        """`dtype` is the dtype of queries, and `sinks` are those of each layer, fp32 [heads].

        Without `serves_rolling`, rows with a rolling window are left out: a hook must compute them. Raises ValueError if the
        kernels do not serve the model's sizes.
        """
        self.serves_rolling = serves_rolling
        page_tokens, kv_dtype = cache.page_shape[2], cache.format.code_dtype
        shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, page_tokens, dtype, kv_dtype)
        self._shape = shape
        self._device = cache.device
        self._num_groups = len(cache.groups.groups)
        self._kinds = [_LayerKind(window, cache.group_of[layer]) for layer, window in enumerate(config.windows)]
        scale, cap = config.score_scale, config.scales.attention_cap
        self._rules = [
            ScoreRules(scale, window, cap, None if sinks is None else sinks[layer])
            for layer, window in enumerate(config.windows)
        ]
        self._layers = [_pages_of(cache, layer) for layer in range(config.num_layers)]
        self._rotations = _rotations(config, cache.device)
        self._num_programs = _num_programs(cache.device)
        self._sums = PartialSums.empty(shape, 0, cache.device)
        self._cuttings = {
            kind: Cutting(
                shape.num_kv_heads,
                decode_queries=decode_blocks(shape).rows // shape.group,
                chunk_queries=chunk_blocks(shape).rows // shape.group,
                window=kind.window,
            )
            for kind in self._kinds
        }

    def plan(self, batch: AttentionBatch) -> "TritonStepAttention":
        cut = self.cut(batch)
        packed = PackedWords.of(cut.arrays, self._device)
        return self.over(packed.arrays, cut.num_slots)

    def reserve(self, capacity: StepCapacity) -> "FixedStepAttention":
        """Returns a step without rows, which is filled again and again with steps of up to this capacity.

        Its launches have the same grids and addresses for all of them, so a CUDA graph can capture them.
        """
        sizes, most_slots = self.sizes_for(capacity)
        packed = PackedWords(sizes, self._device)
        step = self.over(packed.arrays, most_slots)
        options = {"pads_by_tiles": capacity.num_chunk_rows > 0, "has_rolling": capacity.has_rolling}
        return FixedStepAttention(step, lambda batch: packed.fill(self.cut(batch, **options).arrays))

    def sizes_for(self, capacity: StepCapacity) -> tuple[dict[str, int], int]:
        """Returns the sizes of the arrays that hold steps of up to this capacity, in words, and the number of slots for
        their partial sums. The page numbers are the last array.
        """
        sizes: dict[str, int] = {}
        most_slots = 0
        for kind, cutting in self._cuttings.items():
            num_items = capacity.num_queries * cutting.most_splits(capacity.num_keys)
            most_slots = max(most_slots, num_items)
            for field in fields(DecodeTiles):
                size = {"item": num_items, "num": 1}.get(field.name.partition("_")[0], capacity.num_queries)
                sizes[f"decode {kind.name} {field.name}"] = size
            num_tiles = capacity.chunk_tiles(cutting.chunk_queries)
            sizes |= {f"chunk {kind.name} {field.name}": num_tiles for field in fields(QueryTiles)}
            if capacity.has_rolling and kind.window is None:
                num_items = capacity.num_queries * most_rolling_splits(capacity.num_keys, cutting.num_kv_heads)
                most_slots = max(most_slots, num_items)
                for field in fields(RollingDecodeTiles):  # a tile has two parts
                    size = {"item": num_items, "num": 1}.get(field.name.partition("_")[0], 2 * capacity.num_queries)
                    sizes[f"rolling decode {kind.name} {field.name}"] = size
                sizes |= {f"rolling chunk {kind.name} {field.name}": num_tiles for field in fields(RollingChunkTiles)}
        if capacity.has_rolling:
            sizes["turn_distances"] = max(capacity.num_queries, capacity.num_chunk_rows)
        return sizes | {"page_ids": capacity.num_pages}, most_slots

    def over(self, arrays: Mapping[str, torch.Tensor], num_slots: int) -> "TritonStepAttention":
        """Returns a step over arrays on the device, which hold or will hold what `cut` gave, with memory for its
        partial sums.

        This memory only grows. An earlier step keeps the memory that it was given.
        """
        if num_slots > self._sums.num_slots:
            self._sums = PartialSums.empty(self._shape, 1 << (num_slots - 1).bit_length(), self._device)
        by_kind = {kind: self._kind_plan(arrays, kind) for kind in self._cuttings}
        layers = _Layers(self._shape, self._layers, self._kinds, self._rules)
        distances = arrays.get("turn_distances")
        turns = None if distances is None else _StepTurns(self._rotations, distances)
        return TritonStepAttention(layers, by_kind, self._sums, turns)

    def cut(self, batch: AttentionBatch, *, pads_by_tiles: bool = False, has_rolling: bool = False) -> "CutQueries":
        """Returns the arrays of a step, for all kinds of layers together. Uses no device; of the positions, reads only their
        number. Padding rows are decoding rows without keys, or tiles of chunks without keys.

        There are arrays for rows with a rolling window if there are such rows, and always with `has_rolling`.
        """
        placed: Sequence[PlacedSlice] = batch.placed
        if not self.serves_rolling:
            placed = [one for one in placed if one.piece.rolling_window is None]
        has_rolling = has_rolling or any(one.piece.rolling_window is not None for one in placed)
        tables = group_tables(placed, self._num_groups)
        padding = range(sum(one.piece.num_tokens for one in batch.placed), batch.num_rows)
        to_queries, to_tiles = (range(0), padding) if pads_by_tiles else (padding, range(0))
        arrays: dict[str, Words] = {}
        most_slots = 0
        for kind, cutting in self._cuttings.items():
            others: PlacedRows = placed, tables[kind.group]
            rolling: PlacedRows | None = None
            if has_rolling and kind.window is None:
                others, rolling = parted(*others)
            some, own = others
            decoding, num_slots = cut_decoding(some, to_queries, own, cutting)
            if rolling is not None:
                cut = cut_rolling(*rolling, cutting, decoding, num_slots)
                decoding, num_slots = cut.merged, cut.num_slots
                arrays |= _named(f"rolling decode {kind.name}", cut.decode)
                arrays |= _named(f"rolling chunk {kind.name}", cut.chunk)
            arrays |= _named(f"decode {kind.name}", decoding)
            arrays |= _named(f"chunk {kind.name}", cut_chunks(some, to_tiles, own, cutting))
            most_slots = max(most_slots, num_slots)
        if has_rolling:
            arrays["turn_distances"] = turn_distances(placed, batch.num_rows)
        return CutQueries(arrays | {"page_ids": tables[0].page_ids}, most_slots)

    def _kind_plan(self, arrays: Mapping[str, torch.Tensor], kind: "_LayerKind") -> "_KindPlan":
        decode, chunk = (_part(arrays, f"{part} {kind.name}") for part in ("decode", "chunk"))
        plan = _KindPlan(
            Decoding(decode, self._programs_for(decode), len(decode["query_row"])),
            Chunks(chunk, len(chunk["tile_row"])),
        )
        if f"rolling chunk {kind.name} tile_row" not in arrays:
            return plan
        decode, chunk = (_part(arrays, f"rolling {part} {kind.name}") for part in ("decode", "chunk"))
        own = _RollingPlan(Decoding(decode, self._programs_for(decode), 0), Chunks(chunk, len(chunk["tile_row"])))
        return replace(plan, rolling=own)

    def _programs_for(self, decode: Mapping[str, torch.Tensor]) -> int:
        """Returns how many programs share the items of decoding rows."""
        return min(len(decode["item_tile"]) * self._shape.num_kv_heads, self._num_programs)


@dataclass(frozen=True, slots=True)
class CutQueries:
    """The queries of one step in tiles and splits, on the host."""

    arrays: dict[str, Words]
    num_slots: int
    """The most slots for partial sums that a kind of layer needs."""


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """What decides how the queries of a layer are cut, and which page table it reads."""

    window: int | None
    group: int

    @property
    def name(self) -> str:
        return f"{self.window}" if self.group == 0 else f"{self.group}/{self.window}"


@dataclass(frozen=True, slots=True)
class _RollingPlan:
    """The rows with a rolling window, in the layers without a window of their own."""

    decoding: Decoding
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class _KindPlan:
    """A step in the layers of one kind."""

    decoding: Decoding
    """Merges the decoding rows of `rolling` too."""
    chunks: Chunks
    rolling: _RollingPlan | None = None
    """None if no row can have a rolling window, or if it makes no difference in these layers."""


@dataclass(frozen=True, slots=True)
class _Layers:
    """What the steps of a model have in common."""

    shape: AttentionShape
    pages: list[LayerPages]
    kinds: list[_LayerKind]
    """Of each layer."""
    rules: list[ScoreRules]
    """Of each layer."""


class FixedStepAttention:
    """Computes the attention of steps of one capacity, with the same grids and addresses for all of them."""

    def __init__(self, step: "TritonStepAttention", fill: Callable[[AttentionBatch], None]) -> None:
        """`fill` writes the arrays of a step."""
        self._step = step
        self._fill = fill

    def refill(self, batch: AttentionBatch) -> None:
        """Takes over the rows of another step, by one copy that does not block.

        Raises ValueError if the step exceeds the capacity.
        """
        self._fill(batch)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return self._step.attend(layer, query)


class TritonStepAttention:
    """Computes the attention of one step with Triton kernels."""

    def __init__(
        self,
        layers: _Layers,
        by_kind: Mapping[_LayerKind, _KindPlan],
        sums: PartialSums,
        turns: "_StepTurns | None" = None,
    ) -> None:
        self._layers = layers
        self._by_kind = by_kind
        self._sums = sums
        self._turns = turns

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        layers = self._layers
        plan, rules, pages = self._by_kind[layers.kinds[layer]], layers.rules[layer], layers.pages[layer]
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        layer_attention = LayerAttention(layers.shape, rules, query, output, pages)
        attend_chunks(layer_attention, plan.chunks)
        if plan.rolling is not None and self._turns is not None:
            turns = self._turns.of(layer)
            attend_rolling_chunks(layer_attention, plan.rolling.chunks, turns)
            attend_rolling_decoding(layer_attention, plan.rolling.decoding, turns, self._sums)
        attend_decoding(layer_attention, plan.decoding, self._sums)
        return output


class _StepTurns:
    """Computes by which angles the queries of a step are turned back, once for all layers with one rotary embedding."""

    def __init__(self, rotations: Sequence[Rotation | None], distances: torch.Tensor) -> None:
        """`rotations` are those of the layers, and `distances` those of the rows: int32 [num_rows], on the device."""
        self._rotations, self._distances = rotations, distances
        self._turns: dict[int, tuple[int, QueryTurns]] = {}
        """By rotation: the layer that computed the angles, and the angles."""

    def of(self, layer: int) -> QueryTurns | None:
        """Returns the angles for a layer; None if it rotates nothing. The first layer that asks launches the kernel, also
        when the step is computed again with other rows.
        """
        rotation = self._rotations[layer]
        if rotation is None:
            return None
        first, turns = self._turns.get(id(rotation), (layer, None))
        if turns is None or layer == first:
            angles = RowAngles.empty(rotation, len(self._distances))
            step_angles_launch(angles, rotation, self._distances).run()
            turns = QueryTurns(angles, rotation.is_interleaved)
            self._turns[id(rotation)] = layer, turns
        return turns


def _pages_of(cache: KvCache, layer: int) -> LayerPages:
    """Returns the pages of a layer as the kernels read them: codes as numbers."""
    keys, values = cache.stored(layer)
    dtype = cache.format.code_dtype
    return LayerPages(keys.codes.view(dtype), values.codes.view(dtype), keys.scales, values.scales)


def _rotations(config: ModelConfig, device: torch.device) -> list[Rotation | None]:
    """Returns how each layer rotates; None if it rotates nothing. Layers with equal settings share one."""
    made = {rope: rotation_of(config, rope, device) for rope in dict.fromkeys(config.ropes) if rope is not None}
    return [None if rope is None else made[rope] for rope in config.ropes]


def rotation_of(config: ModelConfig, rope: RopeConfig, device: torch.device) -> Rotation:
    """Returns a rotary embedding of a model for any distance."""
    frequencies = rotary_frequencies(config.head_dim, rope, config.context_tokens)
    return Rotation(frequencies.to(device), rope.is_interleaved)


def _named(prefix: str, tiles: QueryTiles) -> dict[str, Words]:
    return {f"{prefix} {field.name}": getattr(tiles, field.name) for field in fields(tiles)}


def _part(arrays: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Returns the arrays whose names begin with `prefix`, without it, and the page numbers."""
    found = {name.removeprefix(f"{prefix} "): array for name, array in arrays.items() if name.startswith(f"{prefix} ")}
    return found | {"page_ids": arrays["page_ids"]}


def _num_programs(device: torch.device) -> int:
    """Returns how many decoding programs share the items of a step. Does not change any bit."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS_OF_A_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
