"""Which rows of a batch belong to which adapter, cut into tiles that a kernel program can take whole.

Built once a step on the CPU, copied to the device in one piece, shared by all layers.
Rows of the bare base are in no tile, so no kernel reads or writes them.

    rows      0  1  2  3  4  5  6        slots  2  -  0  2  -  2  0   ( - is the base )
    sorted    2  6 | 0  3  5             permutation = 2 6 0 3 5
    tiles    [0 : 2) slot 0, [2 : 4) slot 2, [4 : 5) slot 2            ( with two rows a tile )

Invariant: every row that has a slot is in exactly one tile, in batch order within its adapter; no tile mixes adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

TILE_ROWS = (16, 32)
"""What a tile may hold. More would change the matrix instruction, and with it the bits of a row (see lora_plan)."""

_ALIGNMENT = 4  # int32 entries: each array starts on 16 bytes, wherever the sizes fall


@dataclass(frozen=True, slots=True)
class SegmentCapacity:
    """Sizes that hold any batch of up to `num_rows` rows over `num_slots` adapters: what a CUDA graph is captured with."""

    num_rows: int
    num_slots: int
    tile_rows: int

    @property
    def num_tiles(self) -> int:
        """The most tiles that such a batch can need: one begun by each adapter, the rest full."""
        adapters = min(self.num_rows, self.num_slots)
        return adapters + (self.num_rows - adapters) // self.tile_rows


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """The tiles of one step. Tile t is rows permutation[start : start + length] and uses adapter slot[t]."""

    packed: torch.Tensor
    """int32: the four arrays below in one allocation, so that a step costs one copy."""
    tile_start: torch.Tensor  # [num_tiles] int32
    tile_length: torch.Tensor  # [num_tiles] int32, 0 where the tile is padding
    tile_slot: torch.Tensor  # [num_tiles] int32
    permutation: torch.Tensor  # [capacity in rows] int32, rows ordered by slot
    tile_rows: int
    num_rows: int
    """Rows of the batch, those of the base included; with a capacity, the most that it allows."""

    @property
    def num_tiles(self) -> int:
        """Tiles that a kernel is launched for, padding included."""
        return self.tile_start.shape[0]

    def refill(self, fresh: "LoraSegments") -> None:
        """Overwrite these arrays, at the addresses that a captured graph reads, with those of a step of equal capacity."""
        sizes = (self.num_tiles, self.permutation.shape[0], self.tile_rows)
        if (fresh.num_tiles, fresh.permutation.shape[0], fresh.tile_rows) != sizes:
            raise ValueError("the segments differ in capacity: build both with the same SegmentCapacity")
        self.packed.copy_(fresh.packed, non_blocking=True)


def tile_rows_for(num_rows: int, num_adapters: int) -> int:
    """Small tiles while an adapter has few rows (no program idles), larger ones when its weights would be re-read."""
    return TILE_ROWS[1] if num_adapters and num_rows // num_adapters >= 2 * TILE_ROWS[1] else TILE_ROWS[0]


def build_segments(
    slots: Sequence[int | None], device: torch.device | str = "cpu", capacity: SegmentCapacity | None = None
) -> LoraSegments:
    """Group the rows of a batch by adapter slot; None is the base.

    With a capacity the arrays have its sizes whatever the batch, the surplus tiles being empty.
    Raises ValueError if the batch exceeds the capacity.
    """
    order = sorted((row for row, slot in enumerate(slots) if slot is not None), key=lambda row: slots[row] or 0)
    lengths_by_slot = [(slot, len(list(run))) for slot, run in groupby(slots[row] for row in order) if slot is not None]
    num_adapters = len(lengths_by_slot)
    if capacity is None:
        tile_rows = tile_rows_for(len(order), num_adapters)
    else:
        _check_fits(len(slots), num_adapters, capacity)
        tile_rows = capacity.tile_rows
    starts, lengths, tile_slots = _cut(lengths_by_slot, tile_rows)
    return _pack(
        (starts, lengths, tile_slots, order),
        num_tiles=len(starts) if capacity is None else capacity.num_tiles,
        num_entries=len(order) if capacity is None else capacity.num_rows,
        num_rows=len(slots) if capacity is None else capacity.num_rows,
        tile_rows=tile_rows,
        device=device,
    )


def _check_fits(num_rows: int, num_adapters: int, capacity: SegmentCapacity) -> None:
    if capacity.tile_rows not in TILE_ROWS:
        raise ValueError(f"a tile holds {TILE_ROWS} rows, not {capacity.tile_rows}")
    if num_rows > capacity.num_rows or num_adapters > capacity.num_slots:
        raise ValueError(
            f"a batch of {num_rows} rows over {num_adapters} adapters exceeds the capacity of "
            f"{capacity.num_rows} rows over {capacity.num_slots}"
        )


def _cut(lengths_by_slot: Sequence[tuple[int, int]], tile_rows: int) -> tuple[list[int], list[int], list[int]]:
    """Starts, lengths and slots of the tiles over rows that are sorted by slot."""
    starts: list[int] = []
    lengths: list[int] = []
    tile_slots: list[int] = []
    run_start = 0
    for slot, run_length in lengths_by_slot:
        for offset in range(0, run_length, tile_rows):
            starts.append(run_start + offset)
            lengths.append(min(tile_rows, run_length - offset))
            tile_slots.append(slot)
        run_start += run_length
    return starts, lengths, tile_slots


def _pack(
    arrays: tuple[list[int], list[int], list[int], list[int]],
    *,
    num_tiles: int,
    num_entries: int,
    num_rows: int,
    tile_rows: int,
    device: torch.device | str,
) -> LoraSegments:
    sizes = (num_tiles, num_tiles, num_tiles, num_entries)
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    on_host = torch.zeros(offsets[-1], dtype=torch.int32)
    for array, offset in zip(arrays, offsets, strict=False):
        on_host[offset : offset + len(array)] = torch.tensor(array, dtype=torch.int32)
    packed = on_host.to(device)
    start, length, slot, permutation = (
        packed[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False)
    )
    return LoraSegments(packed, start, length, slot, permutation, tile_rows, num_rows)
