"""Sorts the rows of a batch by adapter, and cuts them into tiles. One kernel program computes one tile.

The tiles are built once a step on the CPU, copied to the device in one piece, and used by all layers. Base rows are in
no tile, so no kernel reads or writes them.

    rows      0  1  2  3  4  5  6        slots  2  -  0  2  -  2  0   ( - is the base )
    sorted    2  6 | 0  3  5             permutation = 2 6 0 3 5
    tiles    [0 : 2) slot 0, [2 : 4) slot 2, [4 : 5) slot 2            ( with two rows a tile )

A slot holds one adapter. A row may mix up to four adapters with weights. The owner of a row is its adapter or its
mixture, and a tile has rows of one owner only. The parts of a tile are the pairs (slot, weight) of its adapters. One
program adds all parts to the rows of its tile, in the order of the mixture, so two programs never write the same row.
In a step without mixtures, a tile has one part.

Invariant: every row with an owner is in exactly one tile. The rows of one owner are in the order of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
    """The largest batch for which arrays of fixed size are made: up to `num_rows` rows and `num_slots` adapters.

    A CUDA graph is captured with such arrays.
    """

    num_rows: int
    num_slots: int
    tile_rows: int
    has_mixtures: bool = False

    @property
    def num_parts(self) -> int:
        return MAX_PARTS if self.has_mixtures else 1

    @property
    def num_tiles(self) -> int:
        """The most tiles (groups of rows that a kernel computes together) that a batch of this capacity can need.

        These are one partly filled tile for each adapter or mixture, and full tiles for the other rows.
        """
        owners = self.num_rows if self.has_mixtures else min(self.num_rows, self.num_slots)
        return owners + (self.num_rows - owners) // self.tile_rows


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """The tiles of one step. A tile is a group of rows that use the same adapter or mixture.

    Tile t has the rows permutation[start : start + length] of the batch, where start = tile_start[t] and length =
    tile_length[t]. Its first tile_parts[t] pairs (slot, weight) name its adapters.
    """

    packed: torch.Tensor
    """The arrays below in one int32 allocation, so that a step makes only one copy."""
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
        """The number of tiles (groups of rows) for which a kernel is launched, including empty tiles."""
        return self.tile_start.shape[0]

    @property
    def num_parts(self) -> int:
        """The most adapters that the rows of a tile may mix: 1, or MAX_PARTS if the step has mixtures."""
        return self.part_slot.shape[1]

    def refill(self, fresh: "LoraSegments") -> None:
        """Copies the arrays of `fresh` into the arrays of this object, whose addresses a captured CUDA graph reads.

        Raises ValueError if `fresh` has another capacity.
        """
        if fresh._sizes() != self._sizes():
            raise ValueError("the segments differ in capacity: build both with the same SegmentCapacity")
        self.packed.copy_(fresh.packed, non_blocking=True)

    def _sizes(self) -> tuple[int, ...]:
        return self.num_tiles, self.num_parts, self.permutation.shape[0], self.tile_rows


def parts_of(owner: RowOwner) -> Parts:
    """Returns the adapters of a row as pairs (slot of the adapter, weight).

    Raises ValueError if a mixture has no adapter, or more than MAX_PARTS.
    """
    if isinstance(owner, int):
        return ((owner, 1.0),)
    if not 1 <= len(owner) <= MAX_PARTS:
        raise ValueError(f"a row mixes 1 to {MAX_PARTS} adapters, not {len(owner)}")
    return owner


def build_segments(
    owners: Sequence[RowOwner | None],
    device: torch.device | str = "cpu",
    capacity: SegmentCapacity | None = None,
    tile_rows: int | None = None,
) -> LoraSegments:
    """Groups the rows of a batch by their adapter or mixture (the owner of the row), and cuts the groups into tiles.

    An owner of None is the base model. `tile_rows` is one of TILE_ROWS. By default it follows from the number of rows
    of each owner. A `capacity` fixes the sizes of the arrays and the rows of a tile, so that they do not depend on the
    batch; unused tiles are empty.

    Raises ValueError if the batch exceeds the capacity, or if a mixture has too many adapters.
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
        return _pack(tiles, runs, len(tiles), capacity, num_rows=len(owners), device=device)
    _check_fits(len(owners), runs, capacity)
    tiles = _cut(runs, capacity.tile_rows)
    return _pack(tiles, runs, capacity.num_tiles, capacity, num_rows=capacity.num_rows, device=device)


def _check_fits(num_rows: int, runs: Sequence[tuple[Parts, list[int]]], capacity: SegmentCapacity) -> None:
    if capacity.tile_rows not in TILE_ROWS:
        raise ValueError(f"a tile holds {TILE_ROWS} rows, not {capacity.tile_rows}")
    num_adapters = len({slot for parts, _ in runs for slot, _ in parts})
    if num_rows > capacity.num_rows or num_adapters > capacity.num_slots:
        raise ValueError(
            f"a batch of {num_rows} rows over {num_adapters} adapters exceeds the capacity of "
            f"{capacity.num_rows} rows over {capacity.num_slots}"
        )
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


def _pack(
    tiles: Sequence[Tile],
    runs: Sequence[tuple[Parts, list[int]]],
    num_tiles: int,
    capacity: SegmentCapacity,
    *,
    num_rows: int,
    device: torch.device | str,
) -> LoraSegments:
    num_parts = capacity.num_parts
    sizes = (num_tiles, num_tiles, num_tiles, num_tiles * num_parts, num_tiles * num_parts, capacity.num_rows)
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    on_host = torch.zeros(offsets[-1], dtype=torch.int32)

    def arrays(packed: torch.Tensor) -> list[torch.Tensor]:
        return [packed[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False)]

    start, length, parts, slot, weight, permutation = arrays(on_host)
    _fill(start, [tile_start for tile_start, _, _ in tiles])
    _fill(length, [tile_length for _, tile_length, _ in tiles])
    _fill(parts, [len(tile_parts) for _, _, tile_parts in tiles])
    padded = [[*tile_parts, *[(0, 0.0)] * (num_parts - len(tile_parts))] for _, _, tile_parts in tiles]
    _fill(slot, [part_slot for tile in padded for part_slot, _ in tile])
    _fill(weight.view(torch.float32), [part_weight for tile in padded for _, part_weight in tile])
    _fill(permutation, [row for _, rows in runs for row in rows])

    packed = on_host.to(device)
    start, length, parts, slot, weight, permutation = arrays(packed)
    by_part = (num_tiles, num_parts)
    return LoraSegments(
        packed=packed,
        tile_start=start,
        tile_length=length,
        tile_parts=parts,
        part_slot=slot.view(by_part),
        part_weight=weight.view(torch.float32).view(by_part),
        permutation=permutation,
        tile_rows=capacity.tile_rows,
        num_rows=num_rows,
    )


def _fill(array: torch.Tensor, values: Sequence[float]) -> None:
    """Writes the first entries of an array. The other entries stay zero."""
    array[: len(values)] = torch.tensor(values, dtype=array.dtype)
