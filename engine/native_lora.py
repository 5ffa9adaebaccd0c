"""The LoRA backend of CPUs: rows that decode by the kernel in native_rows, the rows of chunks by torch.

An adapter that becomes resident is entered in tables of addresses, one for each group of projections; its matrices
stay in its block, where the kernel reads them. Nothing is copied, and nothing is built for a step but a list of its
rows, so it makes no difference which adapters a batch holds, or whether they are those of the step before.

Which of the two ways a row goes follows from its own slice (batch_tensors): a draft, or a known token that comes alone,
decodes; several known tokens are a chunk. The two ways round differently, so nothing beside a row may ever choose. At
the head, where no row is part of a chunk, all go the kernel's way.

Invariant: an entry has addresses only from `place` to `forget`; an entry of nobody is all zeros, and adds nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from graftwork.engine.lora import Lane, LoraBatch, Segment
from graftwork.engine.lora_backend import TorchLora
from graftwork.engine.model_config import ModelConfig
from graftwork.engine.native_rows import (
    FIRST_SLICE,
    SCRATCH_ROWS,
    SLICE_FIELDS,
    Floats,
    Group,
    Matrix,
    Pairs,
    add_to_rows,
)
from graftwork.engine.resident_adapter import GROUPS, HEAD, HEAD_LAYER, RANK_PAGE, GroupDelta, ResidentAdapter

GroupKey = tuple[int, str]
"""(layer, group name), as in ResidentAdapter.deltas."""

LIKE = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
"""The dtypes that the kernel computes in, and what it takes their elements for."""

_FIRST_SLOTS = 16


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Features of a group's input, and of each of its slices."""

    in_features: int
    widths: tuple[int, ...]


class AddressTables:
    """Where the matrices of every resident adapter lie: a slot for each, which has an entry in each group's table."""

    def __init__(self, shapes: Mapping[GroupKey, GroupShape], dtype: torch.dtype) -> None:
        """`dtype` is that of the adapters' factors."""
        self._shapes = shapes
        self._dtype = dtype
        self._groups = {key: _empty_group(shape.widths) for key, shape in shapes.items()}
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._num_ranks: dict[str, int] = {}

    @property
    def num_slots(self) -> int:
        """Slots that every group's table has room for."""
        return len(self._slots) + len(self._free)

    @property
    def widest(self) -> int:
        """The most columns of any input and any slice."""
        return max(max(shape.in_features, *shape.widths) for shape in self._shapes.values())

    def enter(self, adapter: ResidentAdapter) -> None:
        """Take the addresses of an adapter that has none here."""
        assert adapter.digest not in self._slots, f"{adapter.digest} is placed twice"
        if not self._free:
            self._grow()
        slot = self._free.pop()
        for key, delta in adapter.deltas.items():
            table, _ = self._groups[key]
            table[slot] = _entry(delta, self._shapes[key], self._dtype)
        self._slots[adapter.digest] = slot
        self._num_ranks[adapter.digest] = max((delta.num_ranks for delta in adapter.deltas.values()), default=0)

    def leave(self, digest: str) -> None:
        """Drop an adapter's addresses, if it has some."""
        slot = self._slots.pop(digest, None)
        if slot is None:
            return
        del self._num_ranks[digest]
        for table, _ in self._groups.values():
            table[slot] = 0
        self._free.append(slot)

    def slot_of(self, digest: str) -> int:
        return self._slots[digest]

    def ranks_of(self, digest: str) -> int:
        """The most ranks that an adapter has in any group, its slices together."""
        return self._num_ranks[digest]

    def group(self, key: GroupKey) -> Group:
        return self._groups[key]

    def check_integrity(self) -> None:
        assert sorted([*self._slots.values(), *self._free]) == list(range(len(self._slots) + len(self._free)))
        assert self._slots.keys() == self._num_ranks.keys()
        for table, _ in self._groups.values():
            assert not table[self._free].any(), "an address outlives its adapter"

    def _grow(self) -> None:
        """Twice the slots, in new tables."""
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
    """A row of a table, as native_rows reads it."""
    num_ranks = delta.num_ranks
    entry = [_address(delta.A, (num_ranks, shape.in_features), dtype)]
    entry += [0 if delta.scales is None else _address(delta.scales, (num_ranks,), torch.float32), num_ranks]
    parts = {part.out_start: part for part in delta.slices}
    out_start = 0
    for width in shape.widths:
        part = parts.pop(out_start, None)
        ranks = 0 if part is None else part.rank_end - part.rank_start
        assert ranks % RANK_PAGE == 0
        assert part is None or part.rank_end <= num_ranks
        entry += [0, 0, 0] if part is None else [_address(part.B, (ranks, width), dtype), part.rank_start, ranks]
        out_start += width
    assert not parts, "a delta of columns that the group does not have"
    return entry


def _address(matrix: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Where a matrix begins that is all that an entry says of it."""
    assert matrix.shape == shape
    assert matrix.dtype == dtype
    assert matrix.is_contiguous()
    return matrix.data_ptr()


class NativeLane:
    """Rows that decode, two at a time."""

    def __init__(self, tables: AddressTables, pairs: Pairs, scratch: Floats) -> None:
        self._tables = tables
        self._pairs = pairs
        self._scratch = scratch

    def add_to(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        assert x.dtype == y.dtype
        add_to_rows(
            _matrix(y), _matrix(x), self._tables.group((layer, group)), self._pairs, self._scratch, LIKE[y.dtype]
        )


def _matrix(rows: torch.Tensor) -> Matrix:
    """Memory that torch keeps for as long as `rows` lives."""
    row_stride, element_stride = rows.stride()
    assert element_stride == 1
    return rows.data_ptr(), row_stride, rows.shape[1]


class NativeLora:
    """The tables, and torch beside the kernel."""

    def __init__(self, tables: AddressTables, rest: TorchLora) -> None:
        """`rest` applies what the kernel does not."""
        self.tables = tables
        self._rest = rest
        self._scratch = np.zeros((SCRATCH_ROWS, tables.widest), np.float32)

    def place(self, on_host: ResidentAdapter, on_device: ResidentAdapter) -> None:
        self._rest.place(on_host, on_device)
        self.tables.enter(on_device)

    def forget(self, digest: str) -> None:
        self._rest.forget(digest)
        self.tables.leave(digest)

    def step(self, segments: Sequence[Segment], num_rows: int) -> LoraBatch:
        return LoraBatch(segments, self._lanes, self._rest.rules, num_rows)

    def check_integrity(self) -> None:
        self._rest.check_integrity()
        self.tables.check_integrity()

    def _lanes(self, segments: Sequence[Segment], num_rows: int) -> list[Lane]:
        """A LaneMaker."""
        chunks = [chunk for segment in segments for chunk in segment.of_chunks()]
        lanes: list[Lane] = [*self._rest.lanes(chunks, num_rows)]
        decoding = [segment for segment in segments if segment.decoding]
        if decoding:
            self._make_room(decoding)
            lanes.append(NativeLane(self.tables, self._pairs(decoding), self._scratch))
        return lanes

    def _pairs(self, segments: Sequence[Segment]) -> Pairs:
        """Rows of one graft by twos; of an odd number, the last is its own partner."""
        pairs: list[tuple[int, int, int, int]] = []
        slots: list[int] = []
        weights: list[float] = []
        for segment in segments:
            parts = segment.graft.parts
            span = (len(slots), len(slots) + len(parts))
            slots += [self.tables.slot_of(adapter.digest) for adapter, _ in parts]
            weights += [weight for _, weight in parts]
            pairs += [(*rows, *span) for rows in _by_twos(segment.decoding)]
        return np.array(pairs, np.int64), np.array(slots, np.int64), np.array(weights, np.float32)

    def _make_room(self, segments: Sequence[Segment]) -> None:
        """Scratch memory for as many ranks as a row's adapters have together."""
        ranks = max(sum(self.tables.ranks_of(adapter.digest) for adapter, _ in one.graft.parts) for one in segments)
        if ranks > self._scratch.shape[1]:
            self._scratch = np.zeros((SCRATCH_ROWS, ranks), np.float32)


def _by_twos(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(rows[::2], [*rows[1::2], rows[-1]], strict=False)


def build_native_lora(model: ModelConfig, dtype: torch.dtype, rest: TorchLora) -> NativeLora:
    """Empty tables for every fused layer of a model, and for its head."""
    shapes = {
        (layer, group.name): _shape(model, group.targets) for layer in range(model.num_layers) for group in GROUPS
    }
    shapes[HEAD_LAYER, HEAD.name] = GroupShape(model.hidden_size, (model.vocab_size,))
    return NativeLora(AddressTables(shapes, dtype), rest)


def _shape(model: ModelConfig, targets: Sequence[str]) -> GroupShape:
    shapes = [model.target_shapes[target] for target in targets]
    return GroupShape(shapes[0][1], tuple(out_features for out_features, _ in shapes))
