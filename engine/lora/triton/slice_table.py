"""Holds the addresses of the adapters' weights, in one table for each fused layer. The kernels read these tables.

A slice is one projection of a fused layer, such as q of qkv. A slot is the row of one adapter in the table. An entry
holds the addresses, the rank and the scale of one adapter for one slice. Slices may differ in width, and entries in
rank and scale. Rank 0 means that the adapter does not change the slice. The table does not copy the weights, but keeps
their tensors alive.

Invariant: for an entry of rank r, the kernels read only A[0:r, 0:in_features] and B[0:r, 0:width]. If the adapter
scales or shifts columns, they also read column_scale[0:width] and column_shift[0:width].
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graftwork.engine.lora.weights import LoraPair


@dataclass(frozen=True, slots=True)
class SliceTerms:
    """One adapter's change of the output y of one slice (projection) for an input x. It is computed in fp32:

        y = column_scale * y + column_shift + scale * (x @ A.T) @ B.T

    A, B and `scale` are those of `pair`. For DoRA, column_scale is magnitude / norm(W + scale * B @ A) for each output,
    where W is the base model's weight. B must already be multiplied by column_scale. column_shift corrects the base
    model's bias, which DoRA does not scale.

    column_scale and column_shift are fp32. Scales are near 1, and in bf16 their rounding error could be as large as the
    LoRA delta itself.
    """

    pair: LoraPair | None = None
    column_scale: torch.Tensor | None = None  # [width]; None is 1
    column_shift: torch.Tensor | None = None  # [width]; None is 0


SlotPairs = Sequence[LoraPair | SliceTerms | None]
"""One adapter's change of each slice (projection) of a fused layer.

A LoraPair does not scale or shift output columns. None leaves the slice unchanged.
"""

_ALIGNED_ELEMENTS = 16
_ALIGNED_BYTES = 16
_NUM_ADDRESSES = 4  # of an entry: A, B, column_scale, column_shift


def slice_terms(entry: LoraPair | SliceTerms | None) -> SliceTerms:
    """Returns one adapter's change of one slice (projection) as SliceTerms. If `entry` is None, nothing is changed.

    Raises ValueError for a LoraPair with a magnitude or bias, because their effect depends on the base model's weights.
    """
    delta = entry if isinstance(entry, SliceTerms) else SliceTerms(entry)
    if delta.pair is not None and (delta.pair.magnitude is not None or delta.pair.bias is not None):
        raise ValueError("a pair with magnitude or bias cannot be served as it is: resolve it into columns first")
    return delta


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One adapter's row of a table of addresses, as 64-bit words."""

    words: torch.Tensor  # [words of the table] int64, on the host
    weights: tuple[torch.Tensor, ...]
    """The tensors whose addresses are in `words`."""
    max_rank: int
    has_columns: bool

    @property
    def is_empty(self) -> bool:
        return self.max_rank == 0 and not self.has_columns


@dataclass(frozen=True, slots=True)
class SliceTable:
    """The addresses, ranks and scales of all adapters of one fused layer.

    A slot is the row of one adapter, and a slice is one projection of the layer. Only `replace_slot` and `keep` change
    the table.
    """

    words: torch.Tensor  # [num_slots, words of the table] int64: a slot's part of all the views below, side by side
    a_pointers: torch.Tensor  # [num_slots, num_slices] int64, to A as [rank, in_features]
    b_pointers: torch.Tensor  # [num_slots, num_slices] int64, to B as [rank, width]: the transpose of LoraPair.B
    column_scales: torch.Tensor  # [num_slots, num_slices] int64, to [width] float32; 0 is none
    column_shifts: torch.Tensor  # [num_slots, num_slices] int64, to [width] float32; 0 is none
    ranks: torch.Tensor  # [num_slots, num_slices] int32, 0 where there is nothing to add
    scales: torch.Tensor  # [num_slots, num_slices] float32
    offsets: torch.Tensor  # [num_slices] int32, the first column of the slice in y
    widths: torch.Tensor  # [num_slices] int32
    slice_widths: tuple[int, ...]
    """A copy of `widths` on the host."""
    in_features: int
    max_rank: int
    """The largest rank that an entry may have."""
    dtype: torch.dtype
    rows: list[SlotRow]
    """The row of each slot. A row keeps alive the tensors whose addresses it holds."""

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
    def has_columns(self) -> bool:
        """Whether any adapter that is now in the table scales or shifts output columns.

        If there is none, the kernels are compiled without scales and shifts.
        """
        return any(row.has_columns for row in self.rows)

    @property
    def is_aligned(self) -> bool:
        """Whether every row of every matrix starts at a multiple of 16 elements.

        If so, the kernels can load many elements at once.
        """
        return all(size % _ALIGNED_ELEMENTS == 0 for size in (self.in_features, *self.slice_widths))

    def replace_slot(self, slot: int, pairs: SlotPairs) -> None:
        """Replaces the adapter in a slot: writes the addresses of the new adapter's weights into the table.

        The write runs on the current CUDA stream. No later step may use this slot for the old adapter. Raises
        ValueError, and changes nothing, if a shape or rank does not fit the table.
        """
        row = self.row_of(pairs)
        self.words[slot] = row.words.to(self.words.device)
        self.keep(slot, row)

    def row_of(self, pairs: SlotPairs) -> SlotRow:
        """Returns the row (addresses, ranks and scales) that this table would have for an adapter. Changes nothing.

        Raises ValueError if a shape or rank does not fit.
        """
        if len(pairs) != self.num_slices:
            raise ValueError(f"{len(pairs)} pairs were given for a layer of {self.num_slices} slices")
        entries = [self._entry(index, slice_terms(pair)) for index, pair in enumerate(pairs)]
        return SlotRow(
            words=_words(entries),
            weights=tuple(tensor for entry in entries for tensor in entry.tensors),
            max_rank=max(entry.rank for entry in entries),
            has_columns=any(entry.has_columns for entry in entries),
        )

    def keep(self, slot: int, row: SlotRow) -> None:
        """Records that the caller has written `row` into a slot. The table then keeps the adapter's tensors alive."""
        self.rows[slot] = row

    def _entry(self, index: int, delta: SliceTerms) -> "_Entry":
        """Returns an entry: tensors in the kernels' layout (copied only if necessary), rank and scale."""
        width = self.slice_widths[index]
        for column in (delta.column_scale, delta.column_shift):
            if column is not None and column.shape != (width,):
                raise ValueError(f"slice {index}: columns of shape {tuple(column.shape)} do not fit [{width}]")
        entry = _Entry(
            column_scale=self._readable(delta.column_scale, torch.float32),
            column_shift=self._readable(delta.column_shift, torch.float32),
        )
        pair = delta.pair
        if pair is None or pair.rank == 0:
            return entry
        if pair.A.shape != (pair.rank, self.in_features) or pair.B.shape != (width, pair.rank):
            raise ValueError(
                f"slice {index}: A {tuple(pair.A.shape)} and B {tuple(pair.B.shape)} do not fit "
                f"A [rank, {self.in_features}] and B [{width}, rank]"
            )
        if pair.rank > self.max_rank:
            raise ValueError(f"slice {index}: rank {pair.rank} is above the table's {self.max_rank}")
        A, B = self._readable(pair.A, self.dtype), self._readable(pair.B.t(), self.dtype)
        return replace(entry, A=A, B=B, rank=pair.rank, scale=pair.scale)

    def _readable(self, tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns the tensor on the table's device, row-major and aligned. Copies the tensor only if necessary."""
        if tensor is None:
            return None
        placed = tensor.to(self.words.device, dtype).contiguous()
        return placed if placed.data_ptr() % _ALIGNED_BYTES == 0 else placed.clone()


@dataclass(frozen=True, slots=True)
class _Entry:
    A: torch.Tensor | None = None  # [rank, in_features]
    B: torch.Tensor | None = None  # [rank, width]
    column_scale: torch.Tensor | None = None  # [width] float32
    column_shift: torch.Tensor | None = None  # [width] float32
    rank: int = 0
    scale: float = 0.0

    @property
    def has_columns(self) -> bool:
        return self.column_scale is not None or self.column_shift is not None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in (self.A, self.B, self.column_scale, self.column_shift) if t is not None)


def num_words(num_slices: int) -> int:
    """Returns the size of one adapter's row in a table, in 64-bit words. The row holds addresses, ranks and scales.

    `num_slices` is the number of projections in the fused layer.
    """
    return _NUM_ADDRESSES * num_slices + 2 * -(-num_slices // 2)


def _words(entries: Sequence[_Entry]) -> torch.Tensor:
    """Returns the words of one slot, in the layout that `_views` reads.

    They are made in one operation, because an adapter has hundreds of entries.
    """
    by_kind = zip(*((entry.A, entry.B, entry.column_scale, entry.column_shift) for entry in entries), strict=True)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensors in by_kind for tensor in tensors]
    padding = [0] * (len(entries) % 2)
    ranks = [*(entry.rank for entry in entries), *padding]
    scales = [*(entry.scale for entry in entries), *padding]
    packed = struct.pack(f"{len(addresses)}q{len(ranks)}i{len(scales)}f", *addresses, *ranks, *scales)
    return torch.frombuffer(bytearray(packed), dtype=torch.int64)


def _views(words: torch.Tensor, num_slices: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns views of a table's words: addresses by kind, ranks, and scales, each [num_slots, num_slices]."""
    addresses = [words[:, kind * num_slices : (kind + 1) * num_slices] for kind in range(_NUM_ADDRESSES)]
    numbers = words[:, _NUM_ADDRESSES * num_slices :]
    half = numbers.shape[1] // 2
    ranks = numbers[:, :half].view(torch.int32)[:, :num_slices]
    scales = numbers[:, half:].view(torch.float32)[:, :num_slices]
    return addresses, ranks, scales


def empty_table(
    num_slots: int,
    slice_widths: Sequence[int],
    in_features: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> SliceTable:
    """Returns a new table for one fused layer, with room for `num_slots` adapters and without any.

    `slice_widths` are the numbers of output features of the layer's projections, in the order of their columns in the
    output.
    """
    words = torch.zeros(num_slots, num_words(len(slice_widths)), dtype=torch.int64, device=device)
    return table_over(words, slice_widths, in_features, max_rank, dtype)


def table_over(
    words: torch.Tensor, slice_widths: Sequence[int], in_features: int, max_rank: int, dtype: torch.dtype
) -> SliceTable:
    """Returns a table for one fused layer that uses the memory `words`, and has no adapters. `words` must be all zeros.

    words: [num_slots, num_words(number of projections)] int64; the rows may have any stride.
    """
    num_slices = len(slice_widths)
    offsets = [sum(slice_widths[:index]) for index in range(num_slices)]
    addresses, ranks, scales = _views(words, num_slices)
    nothing = SlotRow(torch.zeros(words.shape[1], dtype=torch.int64), (), max_rank=0, has_columns=False)
    return SliceTable(
        words=words,
        a_pointers=addresses[0],
        b_pointers=addresses[1],
        column_scales=addresses[2],
        column_shifts=addresses[3],
        ranks=ranks,
        scales=scales,
        offsets=torch.tensor(offsets, dtype=torch.int32, device=words.device),
        widths=torch.tensor(slice_widths, dtype=torch.int32, device=words.device),
        slice_widths=tuple(slice_widths),
        in_features=in_features,
        max_rank=max_rank,
        dtype=dtype,
        rows=[nothing] * words.shape[0],
    )


def build_table(
    slots: Sequence[SlotPairs],
    slice_widths: Sequence[int],
    in_features: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> SliceTable:
    """Returns a table for one fused layer. Slot i (the i-th row) holds the i-th adapter of `slots`."""
    deltas = [slice_terms(entry) for pairs in slots for entry in pairs]
    max_rank = max((delta.pair.rank for delta in deltas if delta.pair is not None), default=1)
    table = empty_table(len(slots), slice_widths, in_features, max_rank, dtype, device)
    for slot, pairs in enumerate(slots):
        table.replace_slot(slot, pairs)
    return table
