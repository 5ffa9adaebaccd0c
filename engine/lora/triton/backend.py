"""Applies LoRA adapters on CUDA devices with two Triton kernels, shrink and expand.

Both run once for each group of projections (linear layers with the same input). They find each adapter on the device in
tables of addresses, and read its matrices where they are. An adapter's row in the tables is its slot. Once in each
step, the host tells the device which adapter each row (token) uses. This serves all layers, and no layer waits for the
host. Rows of the base model cost nothing. A row may use a mixture: several adapters, each with its weight.

The kernels apply the low-rank factors of all linear layers, and changes of whole output columns (DoRA, biases). Torch
applies the rest, only to the rows that need it:

- changes of experts, whose rows are known only when the router has chosen;
- changes of the vocabulary: LoRA on embed_tokens, embed_tokens_per_layer or lm_head, or an embedding or output head that replaces the base
  model's;
- adapters without a slot, because their rank is too high for the tables or no slot is free.

Invariant: an adapter on the device either has a slot, or torch applies all of it; never both. Changes of the vocabulary
are always applied by torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from graftwork.engine.experts.routes import HostRows
from graftwork.engine.lora.expert_deltas import RoutedLora, RoutedTorch, RowOwners
from graftwork.engine.lora.packs import AdapterMix
from graftwork.engine.lora.resident_adapter import GroupDelta, ResidentAdapter, pages_of_ranks
from graftwork.engine.lora.segments import Segment
from graftwork.engine.lora.torch_backend import LoraBatch, LoraRows, TorchLora
from graftwork.engine.lora.triton.fused_lora import CutStep, FusedLora, LayerKey, LoraNeeds
from graftwork.engine.lora.triton.launch_plan import LaunchBounds
from graftwork.engine.lora.triton.slice_table import SliceTerms, SlotPairs
from graftwork.engine.lora.triton.tiles import RowOwner, SegmentCapacity
from graftwork.engine.lora.weights import LoraPair
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.projections import GroupShape, group_shapes

NUM_SLOTS = 1024
"""The number of slots (adapters) in the kernels' tables. For a model of 32 layers, one slot takes 10 KB."""


class TritonLora:
    """The LoRA backend for CUDA. Owns which adapter has which slot (row) in the kernels' tables of addresses."""

    def __init__(self, fused: FusedLora, groups: Mapping[LayerKey, GroupShape], max_rank: int, rest: TorchLora) -> None:
        """`fused` was made for `groups` and `max_rank`. `rest` applies the adapters that the kernels cannot apply."""
        self._fused = fused
        self._groups = groups
        self._max_rank = max_rank
        self._rest = rest
        self._slots: dict[str, int] = {}
        self.rows = LoraRows()

    def place(self, adapter: ResidentAdapter) -> None:
        self._rest.place(adapter)
        free = self._fused.free_slots
        if not free or self._highest_rank(adapter) > self._max_rank:
            return
        keys = [key for key in self._groups if key in adapter.deltas]
        self._fused.assign(free[0], {key: self._slices(key, adapter.deltas[key]) for key in keys})
        self._slots[adapter.digest] = free[0]

    def forget(self, digest: str) -> None:
        self._rest.forget(digest)
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._fused.release(slot)

    @property
    def copied_bytes(self) -> int:
        return self._rest.copied_bytes

    def step(self, segments: Sequence[Segment], num_rows: int) -> "TritonStep":
        owners = self.owners_of(segments, num_rows)
        cut = self._fused.cut_step(owners.owners)
        return self.begin(owners, cut, torch.from_numpy(cut.segments.words).to(self._fused.device))

    @property
    def max_rank(self) -> int:
        """The largest rank of an adapter that the kernels apply."""
        return self._max_rank

    def owners_of(self, segments: Sequence[Segment], num_rows: int, *, in_tiles: bool = False) -> "StepOwners":
        """Returns which adapters each row of a step uses, and which segments torch must apply. See LoraBackend.step.

        With `in_tiles` the kernels for single rows are not used.
        """
        owners: list[RowOwner | None] = [None] * num_rows
        slotless: list[Segment] = []
        for segment in segments:
            owner = self._owner(segment.mix)
            self.rows.count(segment, by_torch=segment.num_rows if owner is None else 0)
            owners[segment.start : segment.end] = [owner] * segment.num_rows
            if owner is None:
                slotless.append(segment)
        at_vocabulary = [segment for segment in segments if segment.mix.changes_vocabulary]
        at_experts = [segment for segment in segments if segment.mix.changes_experts]
        return StepOwners(owners, tuple(slotless), tuple(at_vocabulary), tuple(at_experts), in_tiles)

    def needs_of(self, owners: "StepOwners") -> LoraNeeds:
        """Returns what a step asks of the kernels."""
        return self._fused.needs_of(owners.owners, in_tiles=owners.in_tiles)

    def cut(
        self, owners: "StepOwners", capacity: SegmentCapacity | None = None, bounds: LaunchBounds | None = None
    ) -> CutStep:
        """Cuts a step into tiles on the host. See FusedLora.cut_step."""
        return self._fused.cut_step(owners.owners, capacity, bounds, in_tiles=owners.in_tiles)

    def begin(self, owners: "StepOwners", cut: CutStep, packed: torch.Tensor) -> "TritonStep":
        """Starts a step. `packed` has, or will have, a copy of the cut's words on the device. See FusedLora.begin_cut."""
        self._fused.begin_cut(cut, packed)
        num_rows, rest = len(owners.owners), self._rest
        return TritonStep(
            self._fused,
            slotless=rest.step(owners.slotless, num_rows) if owners.slotless else None,
            at_vocabulary=rest.step(owners.at_vocabulary, num_rows) if owners.at_vocabulary else None,
            at_experts=RoutedTorch(RowOwners(owners.at_experts, num_rows), rest.rules) if owners.at_experts else None,
        )

    def slot_of(self, digest: str) -> int | None:
        """Returns an adapter's slot: its row in the kernels' tables of addresses. None if torch applies the adapter."""
        return self._slots.get(digest)

    def check_integrity(self) -> None:
        self._rest.check_integrity()
        taken = set(self._slots.values())
        assert len(taken) == len(self._slots)
        assert taken == set(range(self._fused.num_slots)) - set(self._fused.free_slots)

    def _owner(self, mix: AdapterMix) -> RowOwner | None:
        """Returns the slots of a mix's adapters. None if one of the adapters has no slot."""
        if any(adapter.digest not in self._slots for adapter, _ in mix.parts):
            return None
        if mix.single is not None:
            return self._slots[mix.single.digest]
        return tuple((self._slots[adapter.digest], weight) for adapter, weight in mix.parts)

    def _highest_rank(self, adapter: ResidentAdapter) -> int:
        """Returns an adapter's highest rank in the groups that the kernels apply."""
        parts = [part for key in self._groups if key in adapter.deltas for part in adapter.deltas[key].slices]
        return max((part.rank_end - part.rank_start for part in parts), default=0)

    def _slices(self, key: LayerKey, delta: GroupDelta) -> SlotPairs:
        return list(_slices(self._groups[key].widths, delta))


@dataclass(frozen=True, slots=True)
class StepOwners:
    """Which adapters the rows of a step use."""

    owners: list[RowOwner | None]
    """The slots of each row; None for the base model, and for rows that torch applies."""
    slotless: tuple[Segment, ...]
    """The segments whose adapters torch applies, because they have no slot."""
    at_vocabulary: tuple[Segment, ...]
    """The segments whose adapters change the vocabulary, which torch applies too."""
    at_experts: tuple[Segment, ...] = ()
    """The segments whose adapters change experts, which torch applies too."""
    in_tiles: bool = False
    """Whether the kernels for tiles serve the step, however few its rows are."""

    @property
    def is_for_kernels_alone(self) -> bool:
        return not self.slotless and not self.at_vocabulary and not self.at_experts


class TritonStep:
    """Applies the adapters of one step: Triton kernels in every layer, and torch where the kernels cannot."""

    def __init__(
        self,
        fused: FusedLora,
        slotless: LoraBatch | None,
        at_vocabulary: LoraBatch | None,
        at_experts: RoutedLora | None,
    ) -> None:
        self._fused = fused
        self._slotless = slotless
        self._at_vocabulary = at_vocabulary
        self._at_experts = at_experts

    def add_deltas(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        self._fused.add_deltas(y, x, layer, group)
        if self._slotless is not None:
            self._slotless.add_deltas(y, x, layer, group)

    @property
    def changes_experts(self) -> bool:
        return self._at_experts is not None

    def add_routed(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str, rows: HostRows) -> None:
        if self._at_experts is not None:
            self._at_experts.add_to(y, x, (layer, group), rows)

    def change_embedding(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> None:
        if self._at_vocabulary is not None:
            self._at_vocabulary.change_embedding(hidden, token_ids)

    def change_inputs(self, inputs: torch.Tensor, token_ids: torch.Tensor) -> None:
        if self._at_vocabulary is not None:
            self._at_vocabulary.change_inputs(inputs, token_ids)

    def change_logits(self, logits: torch.Tensor, x: torch.Tensor) -> None:
        if self._at_vocabulary is not None:
            self._at_vocabulary.change_logits(logits, x)


def _slices(widths: Sequence[int], delta: GroupDelta) -> Iterator[SliceTerms]:
    """Yields each slice's terms (matrices and scale) for the kernels' tables. The matrices are on the device."""
    parts = {part.out_start: part for part in delta.slices}
    out_start = 0
    for width in widths:
        columns = slice(out_start, out_start + width)
        pair = None
        if (part := parts.get(out_start)) is not None:
            pair = LoraPair(delta.A[part.rank_start : part.rank_end], part.B.t(), part.scale)
        yield SliceTerms(
            pair,
            None if delta.column_scale is None else delta.column_scale[columns],
            None if delta.column_shift is None else delta.column_shift[columns],
        )
        out_start += width


def build_triton_lora(
    model: ModelConfig,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
    rest: TorchLora,
    num_slots: int = NUM_SLOTS,
) -> TritonLora:
    """Returns the CUDA backend without any adapter. Its kernels serve adapters of up to `max_rank` ranks.

    `rest` applies what the kernels cannot: changes of the vocabulary, and adapters without a slot (row) in the kernels'
    tables.
    """
    groups = group_shapes(model)
    max_rank = pages_of_ranks(max_rank)
    return TritonLora(FusedLora(groups, num_slots, max_rank, dtype, device), groups, max_rank, rest)
