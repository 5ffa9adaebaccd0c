"""Where the kernels find the adapters' weights: tables of addresses by (slot, slice) for one fused layer.

A slice is one projection of a fused layer: q, k and v of qkv; gate and up. Widths may differ between slices, ranks
and scales between any two entries, and an adapter may leave a slice alone: its rank there is 0 and nothing is read.
The weights stay where they are; only their addresses are in the table, which keeps them alive.

Invariant: an entry of rank r is read at A[0:r, 0:in_features] and B[0:r, 0:width], and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftwork.engine.adapter_weights import LoraPair

SlotPairs = Sequence[LoraPair | None]
"""What one adapter adds to a fused layer, by slice; None where it leaves the slice alone."""

_ALIGNED_ELEMENTS = 16
_ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class SliceTable:
    """One fused layer's adapters, by slot and slice. Entries change only through `replace_slot`."""

    a_pointers: torch.Tensor  # [num_slots, num_slices] int64, to A as [rank, in_features]
    b_pointers: torch.Tensor  # [num_slots, num_slices] int64, to B as [rank, width]: the transpose of LoraPair.B
    ranks: torch.Tensor  # [num_slots, num_slices] int32, 0 where there is nothing to add
    scales: torch.Tensor  # [num_slots, num_slices] float32
    offsets: torch.Tensor  # [num_slices] int32, the first column of the slice in y
    widths: torch.Tensor  # [num_slices] int32
    slice_widths: tuple[int, ...]
    """`widths`, as the host knows them."""
    in_features: int
    max_rank: int
    """The largest rank that an entry may have; programs are launched for it, scratch is laid out by it."""
    dtype: torch.dtype
    weights: list[tuple[torch.Tensor, ...]]
    """By slot: what the addresses point to."""

    @property
    def num_slots(self) -> int:
        return self.ranks.shape[0]

    @property
    def num_slices(self) -> int:
        return len(self.slice_widths)

    @property
    def out_features(self) -> int:
        return sum(self.slice_widths)

    @property
    def is_aligned(self) -> bool:
        """Whether every row of every matrix starts on 16 elements, so that loads may be wide."""
        return all(size % _ALIGNED_ELEMENTS == 0 for size in (self.in_features, *self.slice_widths))

    def replace_slot(self, slot: int, pairs: SlotPairs) -> None:
        """Point a slot at another adapter, in stream order and at unchanged table addresses.

        The caller sees to it that no later step still means the former adapter by this slot.
        Raises ValueError if a pair's shape or rank does not fit the table.
        """
        entries = [self._entry(index, pair) for index, pair in enumerate(pairs)]
        if len(entries) != self.num_slices:
            raise ValueError(f"{len(entries)} pairs were given for a layer of {self.num_slices} slices")
        self.a_pointers[slot] = torch.tensor([a.data_ptr() if rank else 0 for a, _, rank, _ in entries])
        self.b_pointers[slot] = torch.tensor([b.data_ptr() if rank else 0 for _, b, rank, _ in entries])
        self.ranks[slot] = torch.tensor([rank for _, _, rank, _ in entries], dtype=torch.int32)
        self.scales[slot] = torch.tensor([scale for _, _, _, scale in entries], dtype=torch.float32)
        self.weights[slot] = tuple(matrix for a, b, _, _ in entries for matrix in (a, b))

    def _entry(self, index: int, pair: LoraPair | None) -> tuple[torch.Tensor, torch.Tensor, int, float]:
        """A and transposed B as the kernels read them (copies only if need be), rank and scale."""
        if pair is None:
            nothing = torch.empty(0)
            return nothing, nothing, 0, 0.0
        width = self.slice_widths[index]
        if pair.A.shape != (pair.rank, self.in_features) or pair.B.shape != (width, pair.rank):
            raise ValueError(
                f"slice {index}: A {tuple(pair.A.shape)} and B {tuple(pair.B.shape)} do not fit "
                f"A [rank, {self.in_features}] and B [{width}, rank]"
            )
        if pair.rank > self.max_rank:
            raise ValueError(f"slice {index}: rank {pair.rank} is above the table's {self.max_rank}")
        return self._readable(pair.A), self._readable(pair.B.t()), pair.rank, pair.scale

    def _readable(self, matrix: torch.Tensor) -> torch.Tensor:
        """The matrix on the table's device and dtype, row-major, each row aligned: itself if it is so already."""
        placed = matrix.to(self.ranks.device, self.dtype).contiguous()
        return placed if placed.data_ptr() % _ALIGNED_BYTES == 0 else placed.clone()


def empty_table(
    num_slots: int,
    slice_widths: Sequence[int],
    in_features: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> SliceTable:
    """A table in which no slot adds anything. The slices lie side by side in y."""
    shape = (num_slots, len(slice_widths))
    offsets = [sum(slice_widths[:index]) for index in range(len(slice_widths))]
    return SliceTable(
        a_pointers=torch.zeros(shape, dtype=torch.int64, device=device),
        b_pointers=torch.zeros(shape, dtype=torch.int64, device=device),
        ranks=torch.zeros(shape, dtype=torch.int32, device=device),
        scales=torch.zeros(shape, dtype=torch.float32, device=device),
        offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        widths=torch.tensor(slice_widths, dtype=torch.int32, device=device),
        slice_widths=tuple(slice_widths),
        in_features=in_features,
        max_rank=max_rank,
        dtype=dtype,
        weights=[()] * num_slots,
    )


def build_table(
    slots: Sequence[SlotPairs],
    slice_widths: Sequence[int],
    in_features: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> SliceTable:
    """A table of these adapters, by slot."""
    max_rank = max((pair.rank for pairs in slots for pair in pairs if pair is not None), default=1)
    table = empty_table(len(slots), slice_widths, in_features, max_rank, dtype, device)
    for slot, pairs in enumerate(slots):
        table.replace_slot(slot, pairs)
    return table
