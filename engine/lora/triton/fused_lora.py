"""Applies the adapters of a whole model on a CUDA device. There is a fixed number of slots, each for one adapter.

    assign, release     between steps: put an adapter into a slot, take it out
    begin_step          once in each step: tell which slots each row (token) of the step uses
    add_deltas          once for each fused layer, such as qkv

The kernels find an adapter's matrices through tables of addresses. There is a table for each fused layer, and a slot is
a row in every table. All tables are in one block of memory, where the rows of a slot are adjacent, so a new adapter
needs only one copy of its addresses. FusedLora keeps the adapter's tensors alive until the slot is released.

Invariant: a token gets the deltas of those adapters that were in its slots when the step began, and of no others. A
slot must be released before another adapter is assigned to it, and an empty slot cannot be used. After any assign or
release, a new step must begin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from graftwork.engine.lora.triton.launch import apply_lora
from graftwork.engine.lora.triton.launch_plan import ROW_WISE, LaunchBounds, StepShape, tile_rows_for
from graftwork.engine.lora.triton.slice_table import SliceTable, SlotPairs, SlotRow, num_words, table_over
from graftwork.engine.lora.triton.tiles import (
    LoraSegments,
    RowOwner,
    SegmentCapacity,
    SegmentWords,
    cut_segments,
    parts_of,
)
from graftwork.engine.model.projections import GroupShape

LayerKey = tuple[int, str]
"""The key of a group of projections that are computed as one: the pair (layer index, group name)."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Says when a captured CUDA graph may be replayed: only in a step with the same key as the captured step."""

    capacity: SegmentCapacity
    has_columns: bool


@dataclass(frozen=True, slots=True)
class _Resident:
    """The record of an adapter in a slot: its rows in the tables, its largest rank, and whether it has columns."""

    rows: dict[LayerKey, SlotRow]
    max_rank: int
    has_columns: bool


@dataclass(frozen=True, slots=True)
class LoraNeeds:
    """What a step asks of the kernels, by its adapters."""

    tile_rows: int
    """The number of rows of a tile, one of TILE_ROWS. The bits of the result depend on it."""
    bounds: LaunchBounds
    has_mixtures: bool
    slots: frozenset[int]


@dataclass(frozen=True, slots=True)
class CutStep:
    """A step that is cut into tiles, on the host."""

    segments: SegmentWords
    slots: frozenset[int]
    """The slots that the step's rows use."""
    bounds: LaunchBounds
    is_captured: bool
    """Whether the launches must not depend on the step's adapters, because a CUDA graph captures them."""


@dataclass(frozen=True, slots=True)
class _Step:
    cut: CutStep
    segments: LoraSegments


class FusedLora:
    """Owns which adapter is in which slot, and which slots the rows (tokens) of the current step use.

    A slot is a place for one adapter in the kernels' tables of addresses. Not thread-safe.
    """

    def __init__(
        self,
        groups: Mapping[LayerKey, GroupShape],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
        *,
        batch_invariant: bool = False,
    ) -> None:
        """Makes empty slots for the given fused layers. Weights have `dtype`; activations may have another.

        `max_rank` is the largest rank of any adapter. With `batch_invariant` a row's bits do not depend on the rest of
        the batch, and the row-wise kernels are not used (see launch_plan.py).
        """
        self._max_rank = max_rank
        self._batch_invariant = batch_invariant
        self._device = torch.device(device)
        total_words = sum(num_words(len(shape.widths)) for shape in groups.values())
        self._words = torch.zeros(num_slots, total_words, dtype=torch.int64, device=self._device)
        self._tables: dict[LayerKey, SliceTable] = {}
        first_word = 0
        for key, shape in groups.items():
            words = self._words[:, first_word : first_word + num_words(len(shape.widths))]
            self._tables[key] = table_over(words, shape.widths, shape.in_features, max_rank, dtype)
            first_word += words.shape[1]
        self._residents: list[_Resident | None] = [None] * num_slots
        self._nobody = self._resident({})
        self._captured: dict[SegmentCapacity, LoraSegments] = {}
        self._step: _Step | None = None

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def num_slots(self) -> int:
        return len(self._residents)

    @property
    def free_slots(self) -> list[int]:
        return [slot for slot, resident in enumerate(self._residents) if resident is None]

    @property
    def has_columns(self) -> bool:
        """Whether any adapter in a slot multiplies whole output columns or adds to them, as DoRA and biases do."""
        return any(resident is not None and resident.has_columns for resident in self._residents)

    # ---- slots ------------------------------------------------------------------------------------------------

    def assign(self, slot: int, deltas: Mapping[LayerKey, SlotPairs]) -> None:
        """Puts an adapter into a free slot. `begin_step` must then be called before the next `add_deltas`.

        The keys of `deltas` are pairs (layer, group of projections). The values are the adapter's matrices, scales and
        shifts. Layers that the adapter does not change may be absent.

        A tensor is used where it is, without a copy, if it is on the device, has the dtype of the weights and starts at
        a multiple of 16 bytes. A must also be stored as [rank, in_features], and B as the transpose of a contiguous
        [rank, width]. Other tensors are copied. The slot is written on the current CUDA stream.

        Raises ValueError, and changes nothing, if the slot is taken, a layer is unknown, or a shape or rank does not
        fit.
        """
        if self._residents[slot] is not None:
            raise ValueError(f"slot {slot} is taken: release it first")
        unknown = sorted(set(deltas) - set(self._tables))
        if unknown:
            raise ValueError(f"the adapter has deltas for layers that the model lacks: {unknown[:3]}")
        resident = self._resident(deltas)
        self._write(slot, resident)
        self._residents[slot] = resident

    def release(self, slot: int) -> None:
        """Empties a slot and drops its adapter's tensors.

        `begin_step` must then be called before the next `add_deltas`. The slot is written on the current CUDA stream.
        Raises ValueError if the slot is already empty.
        """
        if self._residents[slot] is None:
            raise ValueError(f"slot {slot} is empty already")
        self._write(slot, self._nobody)
        self._residents[slot] = None

    def _resident(self, deltas: Mapping[LayerKey, SlotPairs]) -> _Resident:
        rows = {key: table.row_of(deltas.get(key, [None] * table.num_slices)) for key, table in self._tables.items()}
        return _Resident(
            rows=rows,
            max_rank=max((row.max_rank for row in rows.values()), default=0),
            has_columns=any(row.has_columns for row in rows.values()),
        )

    def _write(self, slot: int, resident: _Resident) -> None:
        self._step = None
        self._words[slot] = torch.cat([row.words for row in resident.rows.values()]).to(self._device)
        for key, row in resident.rows.items():
            self._tables[key].keep(slot, row)

    # ---- steps ------------------------------------------------------------------------------------------------

    def begin_step(self, owners: Sequence[RowOwner | None], capacity: SegmentCapacity | None = None) -> GraphKey | None:
        """Starts a step. `owners` has one entry for each row (token), which names the row's adapters by their slots.

        An entry is the slot of one adapter, or up to four pairs (slot, weight) for a mixture of adapters, or None for
        the base model.

        If `capacity` is given, the step's arrays have fixed sizes and fixed addresses, so that a CUDA graph can use
        them. The method then returns a GraphKey. A CUDA graph that was captured in one step may be replayed in every
        step with an equal key. Without `capacity`, returns None.

        Raises ValueError if a slot is empty, or if the step exceeds the capacity. Raises ValueError if an adapter of a
        mixture scales or shifts output columns, because those have no weighted sum.
        """
        bounds = None if capacity is None else LaunchBounds(self._max_rank, self.has_columns)
        cut = self.cut_step(owners, capacity, bounds)
        if capacity is None:
            self._step = _Step(cut, cut.segments.on(torch.from_numpy(cut.segments.words).to(self._device)))
            return None
        on_host = cut.segments.on(torch.from_numpy(cut.segments.words))
        if capacity in self._captured:
            self._captured[capacity].refill(on_host)
        else:
            self._captured[capacity] = cut.segments.on(on_host.packed.to(self._device))
        self._step = _Step(cut, self._captured[capacity])
        return GraphKey(capacity, self.has_columns)

    def cut_step(
        self,
        owners: Sequence[RowOwner | None],
        capacity: SegmentCapacity | None = None,
        bounds: LaunchBounds | None = None,
        *,
        in_tiles: bool = False,
    ) -> CutStep:
        """Cuts a step into tiles on the host, for `begin_cut`. Ends the step before. `owners` are as in `begin_step`.

        With `in_tiles` the row-wise kernels are not used. With `capacity` and `bounds`, all launches follow from these two alone, so that a CUDA graph can capture them.
        Raises ValueError as `begin_step` does, and if an adapter of the step exceeds the bounds.
        """
        self._step = None
        if self._words.is_cuda:
            torch.cuda.set_device(self._words.device)  # Triton launches on the thread's current device
        needs = self.needs_of(owners, in_tiles=in_tiles)
        if capacity is None:
            return CutStep(
                cut_segments(owners, tile_rows=needs.tile_rows), needs.slots, needs.bounds, is_captured=False
            )
        if self._batch_invariant and capacity.tile_rows == ROW_WISE:
            raise ValueError("row-wise tiles are not batch-invariant: capture with a larger tile")
        bounds = bounds or LaunchBounds(self._max_rank, has_columns=True)
        if needs.bounds.rank > bounds.rank or needs.bounds.has_columns > bounds.has_columns:
            raise ValueError(f"the step needs {needs.bounds}, which is more than {bounds}")
        return CutStep(cut_segments(owners, capacity), needs.slots, bounds, is_captured=True)

    def begin_cut(self, cut: CutStep, packed: torch.Tensor) -> None:
        """Starts a step that `cut_step` has cut. `packed` holds a copy of its words on the device.

        The copy may still be on its way, on the current stream. Equal addresses of `packed` give equal launches.
        """
        self._step = _Step(cut, cut.segments.on(packed))

    def needs_of(self, owners: Sequence[RowOwner | None], *, in_tiles: bool = False) -> LoraNeeds:
        """Returns what a step with these owners needs. Raises ValueError as `begin_step` does."""
        distinct = {parts_of(owner) for owner in set(owners) if owner is not None}
        residents = {slot: self._part(slot, weight, len(parts)) for parts in distinct for slot, weight in parts}
        return LoraNeeds(
            tile_rows=tile_rows_for(_step_shape(owners, residents), in_tiles=in_tiles or self._batch_invariant),
            bounds=LaunchBounds(
                rank=max((resident.max_rank for resident in residents.values()), default=0),
                has_columns=any(resident.has_columns for resident in residents.values()),
            ),
            has_mixtures=any(len(parts) > 1 for parts in distinct),
            slots=frozenset(residents),
        )

    def add_deltas(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        """Adds the LoRA delta of each row's adapters to `y`, in place. A row is one token of the step.

        `y` is the base model's output of one fused layer, such as qkv, and `x` is the layer's input. x: [num_rows,
        in_features], y: [num_rows, out_features], where out_features is the sum over the joined projections. In both,
        the features of a row must be adjacent in memory.

        Raises ValueError if the shapes do not fit, and RuntimeError if slots have changed since `begin_step`.
        """
        step = self._step
        if step is None:
            raise RuntimeError("there is no step: call begin_step after slots have changed")
        table = self._tables[layer, group]
        if step.cut.is_captured or any(not table.rows[slot].is_empty for slot in step.cut.slots):
            apply_lora(x, y, table, step.segments, bounds=step.cut.bounds)

    def _part(self, slot: int, weight: float, num_parts: int) -> _Resident:
        """Returns the adapter in a slot, after checking that it can be one of `num_parts` adapters of a row."""
        resident = self._residents[slot] if 0 <= slot < self.num_slots else None
        if resident is None:
            raise ValueError(f"slot {slot} is empty: assign an adapter to it first")
        if resident.has_columns and (num_parts > 1 or weight != 1.0):
            raise ValueError(f"the adapter in slot {slot} scales or shifts columns and cannot be weighted")
        return resident


def _step_shape(owners: Sequence[RowOwner | None], residents: Mapping[int, _Resident]) -> StepShape:
    return StepShape(
        num_rows=sum(len(parts_of(owner)) for owner in owners if owner is not None),
        num_adapters=len(residents),
        total_ranks=sum(resident.max_rank for resident in residents.values()),
    )
