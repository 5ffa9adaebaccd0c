"""Applies LoRA adapters on CPUs. A compiled kernel (cpu_kernel.py) serves decoding rows. Torch serves prefill chunks.

A row is one token of the step. There is a table for each group of projections (linear layers with the same input). The
table has one entry for each adapter on the device: the addresses of the adapter's matrices. The kernel reads the
matrices at these addresses, so a step copies no weights.

The kernel and torch round differently. So which of the two serves a row must not depend on other requests. It depends
only on how many known tokens (tokens that are not drafts) the row's own request has in this step. Several known tokens
are a prefill chunk. A single known token is a decoding row, and so is each draft token (see attention/backend.py). At
the output head the kernel serves all rows.

Invariant: an adapter's addresses are in the tables only between `place` and `forget`. An unused entry is all zeros and
adds nothing.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from graftwork.engine.lora.cpu_kernel import (
    FIRST_SLICE,
    SCRATCH_ROWS,
    SLICE_FIELDS,
    Floats,
    Group,
    Pairs,
    add_to_rows,
)
from graftwork.engine.lora.cpu_memory import LIKE, address_of, matrix_of
from graftwork.engine.lora.expert_deltas import RoutedLora, RowOwners
from graftwork.engine.lora.expert_tables import ExpertTables, RoutedKernel
from graftwork.engine.lora.resident_adapter import RANK_PAGE, GroupDelta, ResidentAdapter
from graftwork.engine.lora.segments import Segment
from graftwork.engine.lora.torch_backend import LoraBatch, LoraProduct, LoraRows, TorchLora
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.projections import HEAD, HEAD_LAYER, GroupShape, group_shapes

GroupKey = tuple[int, str]
"""The key of a group of projections: the pair (layer, group name), as in ResidentAdapter.deltas."""

_FIRST_SLOTS = 16


class AddressTables:
    """Owns the tables with the addresses of the matrices of all adapters on the device.

    There is one table for each group of projections (linear layers with the same input). An adapter has the same row
    number in every table. This number is its slot.
    """

    def __init__(self, shapes: Mapping[GroupKey, GroupShape], dtype: torch.dtype) -> None:
        """`dtype` is the dtype of the adapters' factors."""
        self._shapes = shapes
        self._dtype = dtype
        self._groups = {key: _empty_group(shape.widths) for key, shape in shapes.items()}
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._num_ranks: dict[str, int] = {}

    @property
    def num_slots(self) -> int:
        """The number of rows in each table: one for each adapter on the device, and free rows for more adapters."""
        return len(self._slots) + len(self._free)

    @property
    def widest(self) -> int:
        """The largest number of input or output features of any linear layer that has a table."""
        return max(max(shape.in_features, *shape.widths) for shape in self._shapes.values())

    def enter(self, adapter: ResidentAdapter) -> None:
        """Writes the addresses of an adapter's matrices into the tables. The adapter must not be in them yet."""
        assert adapter.digest not in self._slots, f"{adapter.digest} is placed twice"
        if not self._free:
            self._grow()
        slot = self._free.pop()
        for key, delta in adapter.deltas.items():
            table, _ = self._groups[key]
            table[slot] = _entry(delta, self._shapes[key], self._dtype)
        self._slots[adapter.digest] = slot
        self._num_ranks[adapter.digest] = max((delta.num_ranks for delta in adapter.deltas.values()), default=0)

    def leave(self, digest: str) -> int | None:
        """Removes an adapter from the tables: sets its addresses to zero. Returns its slot.

        Does nothing if the adapter is not in the tables, and returns None.
        """
        slot = self._slots.pop(digest, None)
        if slot is None:
            return None
        del self._num_ranks[digest]
        for table, _ in self._groups.values():
            table[slot] = 0
        self._free.append(slot)
        return slot

    def slot_of(self, digest: str) -> int:
        return self._slots[digest]

    @property
    def free_slots(self) -> Sequence[int]:
        return self._free

    def ranks_of(self, digest: str) -> int:
        """Returns the largest total rank of an adapter over all groups of projections.

        The total rank of a group is the sum of the ranks of its linear layers, such as q, k and v.
        """
        return self._num_ranks[digest]

    def group(self, key: GroupKey) -> Group:
        return self._groups[key]

    def check_integrity(self) -> None:
        assert sorted([*self._slots.values(), *self._free]) == list(range(len(self._slots) + len(self._free)))
        assert self._slots.keys() == self._num_ranks.keys()
        for table, _ in self._groups.values():
            assert not table[self._free].any(), "an address outlives its adapter"

    def _grow(self) -> None:
        """Doubles the number of slots by copying into larger tables."""
        taken = len(self._slots)
        more = max(taken, _FIRST_SLOTS)
        for key, (table, slices) in self._groups.items():
            self._groups[key] = np.pad(table, ((0, more), (0, 0))), slices
        self._free += range(taken, taken + more)


def _empty_group(widths: Sequence[int]) -> Group:
    ends = np.cumsum(widths)
    table = np.zeros((0, FIRST_SLICE + len(widths) * SLICE_FIELDS), np.int64)
    return table, np.stack([ends - widths, ends], axis=1).astype(np.int64)


def _entry(delta: GroupDelta, shape: GroupShape, dtype: torch.dtype) -> list[int]:
    """Returns one adapter's row of a group's table, in the layout that cpu_kernel.py reads."""
    num_ranks = delta.num_ranks
    entry = [address_of(delta.A, (num_ranks, shape.in_features), dtype)]
    entry += [0 if delta.scales is None else address_of(delta.scales, (num_ranks,), torch.float32), num_ranks]
    parts = {part.out_start: part for part in delta.slices}
    out_start = 0
    for width in shape.widths:
        part = parts.pop(out_start, None)
        ranks = 0 if part is None else part.rank_end - part.rank_start
        assert ranks % RANK_PAGE == 0
        assert part is None or part.rank_end <= num_ranks
        entry += [0, 0, 0] if part is None else [address_of(part.B, (ranks, width), dtype), part.rank_start, ranks]
        out_start += width
    assert not parts, "a delta of columns that the group does not have"
    return entry


class KernelProduct:
    """Adds the LoRA deltas of the decoding tokens of a step. The compiled kernel computes two tokens at a time."""

    def __init__(self, tables: AddressTables, pairs: Pairs, scratch: Floats) -> None:
        self._tables = tables
        self._pairs = pairs
        self._scratch = scratch

    def add_to(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        assert x.dtype == y.dtype
        add_to_rows(
            matrix_of(y), matrix_of(x), self._tables.group((layer, group)), self._pairs, self._scratch, LIKE[y.dtype]
        )


class CpuLora:
    """The LoRA backend for CPUs. A compiled kernel serves decoding tokens, and torch serves prefill chunks."""

    def __init__(self, tables: AddressTables, rest: TorchLora, experts: ExpertTables | None = None) -> None:
        """`rest` applies the adapters of the rows that the kernel does not serve. A model without routed layers has no
        `experts`.
        """
        self.tables = tables
        self.experts = experts
        self._rest = rest
        self._scratch = np.zeros((SCRATCH_ROWS, tables.widest), np.float32)
        self.rows = LoraRows()

    def place(self, adapter: ResidentAdapter) -> None:
        self._rest.place(adapter)
        self.tables.enter(adapter)
        if self.experts is not None:
            self.experts.enter(self.tables.slot_of(adapter.digest), adapter)

    def forget(self, digest: str) -> None:
        self._rest.forget(digest)
        slot = self.tables.leave(digest)
        if self.experts is not None and slot is not None:
            self.experts.leave(slot)

    @property
    def copied_bytes(self) -> int:
        return self._rest.copied_bytes

    def step(self, segments: Sequence[Segment], num_rows: int) -> LoraBatch:
        for segment in segments:
            self.rows.count(segment, by_torch=segment.num_rows - len(segment.decoding))
        return LoraBatch(segments, self._products, self._rest.rules, num_rows, self._routed(segments, num_rows))

    def check_integrity(self) -> None:
        self._rest.check_integrity()
        self.tables.check_integrity()
        if self.experts is not None:
            self.experts.check_integrity(self.tables.free_slots)

    def _routed(self, segments: Sequence[Segment], num_rows: int) -> RoutedLora | None:
        """Returns what applies the adapters of one step to experts."""
        if self.experts is None:
            return None
        return RoutedKernel(self.experts, RowOwners(segments, num_rows), self.tables.slot_of)

    def _products(self, segments: Sequence[Segment], num_rows: int) -> list[LoraProduct]:
        """Plans the products of one step. LoraBatch calls it as its ProductPlanner."""
        chunks = [chunk for segment in segments for chunk in segment.of_chunks()]
        products: list[LoraProduct] = [*self._rest.products(chunks, num_rows)]
        decoding = [segment for segment in segments if segment.decoding]
        if decoding:
            self._make_room(decoding)
            products.append(KernelProduct(self.tables, self._pairs(decoding), self._scratch))
        return products

    def _pairs(self, segments: Sequence[Segment]) -> Pairs:
        """Returns pairs of rows that use the same mix.

        If the number of rows is odd, the last row is paired with itself.
        """
        pairs: list[tuple[int, int, int, int]] = []
        slots: list[int] = []
        weights: list[float] = []
        for segment in segments:
            parts = segment.mix.parts
            span = (len(slots), len(slots) + len(parts))
            slots += [self.tables.slot_of(adapter.digest) for adapter, _ in parts]
            weights += [weight for _, weight in parts]
            pairs += [(*rows, *span) for rows in _by_twos(segment.decoding)]
        return np.array(pairs, np.int64), np.array(slots, np.int64), np.array(weights, np.float32)

    def _make_room(self, segments: Sequence[Segment]) -> None:
        """Grows the scratch memory if needed, so that it holds the ranks of all adapters of one row together."""
        ranks = max(sum(self.tables.ranks_of(adapter.digest) for adapter, _ in one.mix.parts) for one in segments)
        if ranks > self._scratch.shape[1]:
            self._scratch = np.zeros((SCRATCH_ROWS, ranks), np.float32)


def _by_twos(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(rows[::2], [*rows[1::2], rows[-1]], strict=False)


def build_cpu_lora(model: ModelConfig, dtype: torch.dtype, rest: TorchLora) -> CpuLora:
    """Returns the CPU backend. Its tables of the adapters' addresses are empty.

    There is a table for each group of projections of the model, and one for its output head. `rest` applies the
    adapters to the tokens that the compiled kernel does not serve.
    """
    shapes = group_shapes(model)
    shapes[HEAD_LAYER, HEAD.name] = GroupShape(model.hidden_size, (model.vocab_size,))
    experts = None if model.experts is None else ExpertTables(model, dtype)
    return CpuLora(AddressTables(shapes, dtype), rest, experts)
