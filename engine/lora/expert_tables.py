"""Applies adapters to experts on CPUs, by the compiled kernel of cpu_kernel.py.

The kernel reads matrices by their addresses. An adapter's matrices for all experts of a layer lie behind one another, so
a table has the address of the first, and the distance from one to the next. A step makes the kernel's entries from them,
for those experts that its rows chose.

The kernel computes the rows of prefill chunks here too, unlike elsewhere (see cpu_backend.py): the rows of one expert
and one adapter are few. Invariant: an address is in the tables only between `enter` and `leave`.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from graftwork.engine.experts.routes import HostRows, Numbers
from graftwork.engine.lora.cpu_kernel import FIRST_SLICE, SCRATCH_ROWS, SLICE_FIELDS, Floats, Pairs, add_to_rows
from graftwork.engine.lora.cpu_memory import LIKE, address_of, matrix_of
from graftwork.engine.lora.expert_deltas import ExpertKey, OwnedRows, RowOwners
from graftwork.engine.lora.packs import AdapterMix
from graftwork.engine.lora.resident_adapter import ExpertDelta, ResidentAdapter
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.projections import EXPERT_GROUPS

_A, _A_STEP, _SCALES, _SCALES_STEP, _B, _B_STEP, _RANKS, _NUM_FIELDS = range(8)


class ExpertTables:
    """Owns the addresses of the matrices of all adapters on the device, for the experts of each routed layer."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        """`dtype` is the dtype of the adapters' factors."""
        assert model.experts is not None
        self._shapes = model.experts.shapes
        self._dtype = dtype
        self._tables = {
            (layer, group): np.zeros((0, _NUM_FIELDS), np.int64)
            for layer in self._shapes.layers
            for group in EXPERT_GROUPS
        }

    @property
    def widest(self) -> int:
        """The largest number of input or output features of an expert's projection."""
        return max(*self._shapes.gate_up, *self._shapes.down)

    def enter(self, slot: int, adapter: ResidentAdapter) -> None:
        """Writes an adapter's addresses. `slot` is its row in all tables, which must be free."""
        for key, table in self._tables.items():
            if slot >= len(table):
                table = self._tables[key] = np.pad(table, ((0, slot + 1), (0, 0)))
            assert not table[slot].any(), f"slot {slot} is taken"
            delta = adapter.experts.get(key)
            if delta is not None:
                table[slot] = self._entry(delta, key[1])

    def leave(self, slot: int) -> None:
        """Removes an adapter's addresses."""
        for table in self._tables.values():
            table[slot] = 0

    def entries(self, key: ExpertKey, slots: Numbers, experts: Numbers) -> Numbers:
        """Returns the kernel's entries of adapters at experts: [num_entries, fields], for two arrays of one length."""
        found = self._tables[key][slots]
        entries = np.zeros((len(slots), FIRST_SLICE + SLICE_FIELDS), np.int64)
        entries[:, 0] = found[:, _A] + experts * found[:, _A_STEP]
        entries[:, 1] = found[:, _SCALES] + experts * found[:, _SCALES_STEP]
        entries[:, 2] = entries[:, FIRST_SLICE + 2] = found[:, _RANKS]
        entries[:, FIRST_SLICE] = found[:, _B] + experts * found[:, _B_STEP]
        return entries

    def check_integrity(self, free_slots: Sequence[int]) -> None:
        """Raises AssertionError if an address outlives its adapter."""
        for table in self._tables.values():
            assert not table[[slot for slot in free_slots if slot < len(table)]].any(), (
                "an address outlives its adapter"
            )

    def _entry(self, delta: ExpertDelta, group: str) -> list[int]:
        out_features, in_features = self._shapes.gate_up if group == EXPERT_GROUPS[0] else self._shapes.down
        count, ranks = self._shapes.num_experts, delta.num_ranks
        A = address_of(delta.A, (count, ranks, in_features), self._dtype)
        B = address_of(delta.B, (count, ranks, out_features), self._dtype)
        scales = 0 if delta.scales is None else address_of(delta.scales, (count, ranks), torch.float32)
        scales_step = ranks * torch.float32.itemsize if scales else 0
        return [A, delta.A[0].nbytes, scales, scales_step, B, delta.B[0].nbytes, ranks]


class RoutedKernel:
    """Applies the adapters of one step to experts, by the compiled kernel."""

    def __init__(self, tables: ExpertTables, owners: RowOwners, slot_of: Callable[[str], int]) -> None:
        """`slot_of` returns the slot of an adapter of the step, by its digest."""
        self._tables = tables
        self._owners = owners
        self._first_part, self._slots, self._weights = _parts_of(owners.mixes, slot_of)

    def add_to(self, y: torch.Tensor, x: torch.Tensor, key: ExpertKey, rows: HostRows) -> None:
        if not self._owners.touches(key):
            return
        owned = self._owners.owned(rows)
        if not len(owned.rows):
            return
        assert x.dtype == y.dtype
        pairs, entries = self._pairs(owned, key)
        ranks = entries[:, 2]
        most = int(np.max(np.add.reduceat(ranks, self._part_starts(owned)[:-1])))
        scratch = np.zeros((SCRATCH_ROWS, max(self._tables.widest, most)), np.float32)
        group = entries, np.array([[0, y.shape[1]]], np.int64)
        add_to_rows(matrix_of(y), matrix_of(x), group, pairs, scratch, LIKE[y.dtype])

    def _part_starts(self, owned: OwnedRows) -> Numbers:
        """Returns where the parts of each group begin in the entries, and where the last ones end."""
        counts = self._first_part[owned.owners + 1] - self._first_part[owned.owners]
        return np.append(0, np.cumsum(counts))

    def _pairs(self, owned: OwnedRows, key: ExpertKey) -> tuple[Pairs, Numbers]:
        """Returns the pairs of rows that use the same entries, and the entries: one for each group and adapter.

        If the number of rows of a group is odd, the last is paired with itself.
        """
        starts = self._part_starts(owned)
        group_of_part = np.repeat(np.arange(len(owned.owners)), np.diff(starts))
        part = self._first_part[owned.owners][group_of_part] + np.arange(starts[-1]) - starts[group_of_part]
        entries = self._tables.entries(key, self._slots[part], owned.experts[group_of_part])
        group_of_row = np.repeat(np.arange(len(owned.owners)), np.diff(owned.starts))
        place = np.arange(len(owned.rows)) - owned.starts[group_of_row]
        firsts = np.flatnonzero(place % 2 == 0)
        seconds = np.minimum(firsts + 1, owned.starts[group_of_row[firsts] + 1] - 1)
        group = group_of_row[firsts]
        pairs = np.stack([owned.rows[firsts], owned.rows[seconds], starts[group], starts[group + 1]], axis=1)
        return (pairs, np.arange(len(part)), self._weights[part]), entries


def _parts_of(mixes: Sequence[AdapterMix], slot_of: Callable[[str], int]) -> tuple[Numbers, Numbers, Floats]:
    """Returns where the adapters of each mix begin, and the slot and the weight of each adapter."""
    parts = [part for mix in mixes for part in mix.parts]
    ends = np.cumsum([len(mix.parts) for mix in mixes])
    slots = np.array([slot_of(adapter.digest) for adapter, _ in parts], np.int64)
    return np.append(0, ends).astype(np.int64), slots, np.array([weight for _, weight in parts], np.float32)
