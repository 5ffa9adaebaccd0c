"""Sorts the rows (tokens) of a step by adapter, and cuts them into tiles. One kernel program computes one tile.

The tiles are built on the CPU once in each step, copied to the device in one piece, and used by all layers. Rows of the
base model are in no tile, so no kernel reads or writes them.

    rows      0  1  2  3  4  5  6        slots  2  -  0  2  -  2  0   ( - is the base )
    sorted    2  6 | 0  3  5             permutation = 2 6 0 3 5
    tiles    [0 : 2) slot 0, [2 : 4) slot 2, [4 : 5) slot 2            ( with two rows a tile )

A slot is a place for one adapter. A row uses one adapter, or a mixture: up to four adapters with weights. The adapter
or mixture of a row is called its owner. All rows of a tile have the same owner. The parts of a tile are the pairs
(slot, weight) of its adapters. One program adds the deltas of all parts to the rows of its tile, in the order of the
mixture. So two programs never write the same row.

Invariant: every row with an owner is in exactly one tile. The rows of one owner keep the order of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graftwork.engine.kernels.step_inputs import Words
from graftwork.engine.lora.triton.launch_plan import TILE_ROWS, grouped_tile_rows

MAX_PARTS = 4
"""The most adapters that one row may mix."""

Parts = tuple[tuple[int, float], ...]
"""The adapters of a row: up to MAX_PARTS pairs (slot, weight). The weight multiplies the adapter's own scale."""
RowOwner = int | Parts
"""What a row uses: the slot of its adapter, or the pairs (slot, weight) of its mixture."""

_ALIGNMENT = 4  # int32 entries: each array starts on 16 bytes, wherever the sizes fall


@dataclass(frozen=True, slots=True)
class SegmentCapacity:
    """The largest step that arrays of a fixed size can hold: `num_rows` rows (tokens) and `num_slots` adapters.

    A captured CUDA graph needs arrays of a fixed size.
    """

    num_rows: int
    num_slots: int
    tile_rows: int
    has_mixtures: bool = False
    num_owners: int | None = None
    """The most different adapters and mixtures that rows use; None for as many as rows and slots allow."""

    @property
    def most_owners(self) -> int:
        """The most groups of rows with the same adapters."""
        most = self.num_rows if self.has_mixtures else min(self.num_rows, self.num_slots)
        return most if self.num_owners is None else min(most, self.num_owners)

    @property
    def num_parts(self) -> int:
        return MAX_PARTS if self.has_mixtures else 1

    @property
    def num_tiles(self) -> int:
        """The largest number of tiles that a step of this capacity can need.

        A tile is a group of rows with the same adapters. In the worst case each adapter or mixture has one row in a
        tile of its own, and the other rows fill whole tiles.
        """
        return self.most_owners + (self.num_rows - self.most_owners) // self.tile_rows

    @property
    def num_words(self) -> int:
        """The number of words of all arrays of a step."""
        return int(_places(_sizes(self.num_tiles, self.num_parts, self.num_rows))[-1].stop)


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """The tiles of one step. A tile is a group of rows (tokens) that use the same adapter or mixture of adapters.

    Tile t has the rows permutation[start : start + length] of the batch, where start is tile_start[t] and length is
    tile_length[t]. Its adapters are the first tile_parts[t] pairs of part_slot[t] and part_weight[t].
    """

    packed: torch.Tensor
    """The arrays below in one int32 allocation, so that a step makes only one copy."""
    num_live: torch.Tensor  # [1] int32, the number of tiles that have rows; [0] where there is no tile
    tile_start: torch.Tensor  # [num_tiles] int32
    tile_length: torch.Tensor  # [num_tiles] int32, 0 where the tile is padding
    tile_parts: torch.Tensor  # [num_tiles] int32, 0 where the tile is padding
    part_slot: torch.Tensor  # [num_tiles, num_parts] int32
    part_weight: torch.Tensor  # [num_tiles, num_parts] float32
    permutation: torch.Tensor  # [capacity in rows] int32, rows ordered by owner
    tile_rows: int
    num_rows: int
    """The number of rows of the batch, including rows without an adapter. With a capacity, the most rows that it
    allows.
    """

    @property
    def num_tiles(self) -> int:
        """The number of tiles for which the kernels are launched, including empty tiles.

        A tile is a group of tokens with the same adapters.
        """
        return self.tile_start.shape[0]

    @property
    def num_parts(self) -> int:
        """The largest number of adapters that one token may use.

        This is 1, or MAX_PARTS if tokens of the step may use several adapters.
        """
        return self.part_slot.shape[1]

    def refill(self, fresh: "LoraSegments") -> None:
        """Overwrites the arrays of this object with those of `fresh`. The addresses stay the same.

        A captured CUDA graph reads the arrays at these addresses. Raises ValueError if `fresh` has another capacity.
        """
        if fresh._sizes() != self._sizes():
            raise ValueError("the segments differ in capacity: build both with the same SegmentCapacity")
        self.packed.copy_(fresh.packed, non_blocking=True)

    def _sizes(self) -> tuple[int, ...]:
        return self.num_tiles, self.num_parts, self.permutation.shape[0], self.tile_rows


def parts_of(owner: RowOwner) -> Parts:
    """Returns the adapters of a row (token) as pairs (slot, weight).

    A slot is the number of one adapter's place in the kernels' tables. `owner` is one slot, which gets weight 1, or a
    mixture: a tuple of pairs (slot, weight), which is returned as it is. Rows of the base model have no owner and must
    not be passed. Raises ValueError if a mixture has no pair, or more than MAX_PARTS.
    """
    if isinstance(owner, int):
        return ((owner, 1.0),)
    if not 1 <= len(owner) <= MAX_PARTS:
        raise ValueError(f"a row mixes 1 to {MAX_PARTS} adapters, not {len(owner)}")
    return owner


@dataclass(frozen=True, slots=True)
class SegmentWords:
    """The tiles of one step on the host. A tile is a group of rows that use the same adapter or mixture."""

    words: Words
    """All arrays of LoraSegments, one after another. Capacities alone decide how many words there are."""
    num_tiles: int
    num_parts: int
    capacity_rows: int
    """The length of the permutation."""
    tile_rows: int
    num_rows: int

    def on(self, packed: torch.Tensor) -> LoraSegments:
        """Returns the tiles over a copy of `words`, int32 [num_words], on any device."""
        sizes = _sizes(self.num_tiles, self.num_parts, self.capacity_rows)
        live, start, length, parts, slot, weight, permutation = (packed[place] for place in _places(sizes))
        by_part = (self.num_tiles, self.num_parts)
        return LoraSegments(
            packed=packed,
            num_live=live,
            tile_start=start,
            tile_length=length,
            tile_parts=parts,
            part_slot=slot.view(by_part),
            part_weight=weight.view(torch.float32).view(by_part),
            permutation=permutation,
            tile_rows=self.tile_rows,
            num_rows=self.num_rows,
        )


def build_segments(
    owners: Sequence[RowOwner | None],
    device: torch.device | str = "cpu",
    capacity: SegmentCapacity | None = None,
    tile_rows: int | None = None,
) -> LoraSegments:
    """Cuts the rows of a step into tiles, as `cut_segments` does, and copies them to a device."""
    cut = cut_segments(owners, capacity, tile_rows)
    return cut.on(torch.from_numpy(cut.words).to(device))


def cut_segments(
    owners: Sequence[RowOwner | None], capacity: SegmentCapacity | None = None, tile_rows: int | None = None
) -> SegmentWords:
    """Groups the rows (tokens) of a step by their adapters, and cuts the groups into tiles of up to `tile_rows` rows.

    `owners` has one entry for each row: a slot (place of one adapter), or pairs (slot, weight) for a mixture of
    adapters, or None for the base model. `tile_rows` must be one of TILE_ROWS. If it is None, it is chosen from the
    number of rows of each adapter.

    With `capacity`, the sizes of the arrays and of the tiles do not depend on the step, and unused tiles are empty.
    Raises ValueError if the step exceeds the capacity, or if a mixture has too many adapters.
    """
    parts_by_owner = {owner: parts_of(owner) for owner in set(owners) if owner is not None}
    rows_by_parts: dict[Parts, list[int]] = {}
    for row, owner in enumerate(owners):
        if owner is not None:
            rows_by_parts.setdefault(parts_by_owner[owner], []).append(row)
    runs = sorted(rows_by_parts.items())
    num_entries = sum(len(rows) for _, rows in runs)
    if capacity is None:
        capacity = SegmentCapacity(
            num_rows=num_entries,
            num_slots=len(runs),
            tile_rows=tile_rows or grouped_tile_rows(num_entries, len(runs)),
            has_mixtures=any(len(parts) > 1 for parts, _ in runs),
        )
        tiles = _cut(runs, capacity.tile_rows)
        return _packed(tiles, runs, len(tiles), capacity, num_rows=len(owners))
    _check_fits(len(owners), runs, capacity)
    tiles = _cut(runs, capacity.tile_rows)
    return _packed(tiles, runs, capacity.num_tiles, capacity, num_rows=capacity.num_rows)


def _check_fits(num_rows: int, runs: Sequence[tuple[Parts, list[int]]], capacity: SegmentCapacity) -> None:
    if capacity.tile_rows not in TILE_ROWS:
        raise ValueError(f"a tile holds {TILE_ROWS} rows, not {capacity.tile_rows}")
    num_adapters = len({slot for parts, _ in runs for slot, _ in parts})
    if num_rows > capacity.num_rows or num_adapters > capacity.num_slots:
        raise ValueError(
            f"a batch of {num_rows} rows over {num_adapters} adapters exceeds the capacity of "
            f"{capacity.num_rows} rows over {capacity.num_slots}"
        )
    if len(runs) > capacity.most_owners:
        raise ValueError(f"the batch has {len(runs)} adapters and mixtures, its capacity is {capacity.most_owners}")
    if not capacity.has_mixtures and any(parts[1:] for parts, _ in runs):
        raise ValueError("the batch mixes adapters, which the capacity does not allow: set has_mixtures")


Tile = tuple[int, int, Parts]
"""The first position of a tile in the sorted rows, its number of rows, and the pairs (slot, weight) of its adapters."""


def _cut(runs: Sequence[tuple[Parts, list[int]]], tile_rows: int) -> list[Tile]:
    """Returns the tiles of rows that are sorted by owner."""
    tiles: list[Tile] = []
    run_start = 0
    for parts, rows in runs:
        offsets = range(0, len(rows), tile_rows)
        tiles += [(run_start + offset, min(tile_rows, len(rows) - offset), parts) for offset in offsets]
        run_start += len(rows)
    return tiles


def _packed(
    tiles: Sequence[Tile],
    runs: Sequence[tuple[Parts, list[int]]],
    num_tiles: int,
    capacity: SegmentCapacity,
    *,
    num_rows: int,
) -> SegmentWords:
    num_parts = capacity.num_parts
    places = _places(_sizes(num_tiles, num_parts, capacity.num_rows))
    words = np.zeros(places[-1].stop, np.int32)
    live, start, length, parts, slot, weight, permutation = (words[place] for place in places)
    live[:] = len(tiles)
    _fill(start, [tile_start for tile_start, _, _ in tiles])
    _fill(length, [tile_length for _, tile_length, _ in tiles])
    _fill(parts, [len(tile_parts) for _, _, tile_parts in tiles])
    padded = [[*tile_parts, *[(0, 0.0)] * (num_parts - len(tile_parts))] for _, _, tile_parts in tiles]
    _fill(slot, [part_slot for tile in padded for part_slot, _ in tile])
    _fill(weight.view(np.float32), [part_weight for tile in padded for _, part_weight in tile])
    _fill(permutation, [row for _, rows in runs for row in rows])
    return SegmentWords(words, num_tiles, num_parts, capacity.num_rows, capacity.tile_rows, num_rows)


def _sizes(num_tiles: int, num_parts: int, num_rows: int) -> tuple[int, ...]:
    """Returns the lengths of the arrays of LoraSegments, in words."""
    return min(num_tiles, 1), num_tiles, num_tiles, num_tiles, num_tiles * num_parts, num_tiles * num_parts, num_rows


def _places(sizes: Sequence[int]) -> list[slice]:
    """Returns where arrays of these lengths are in their block."""
    starts = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def _fill(array: NDArray[Any], values: Sequence[float]) -> None:
    """Writes the first entries of an array. The other entries stay zero."""
    array[: len(values)] = values
