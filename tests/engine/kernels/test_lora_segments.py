import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.kernels.lora_segments import (
    TILE_ROWS,
    LoraSegments,
    SegmentCapacity,
    build_segments,
    tile_rows_for,
)

batches = st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=150)


def rows_by_tile(segments: LoraSegments) -> list[tuple[int, list[int]]]:
    """(slot, rows) of each tile that holds any."""
    tiles = zip(segments.tile_start.tolist(), segments.tile_length.tolist(), segments.tile_slot.tolist(), strict=True)
    return [
        (slot, segments.permutation[start : start + length].tolist()) for start, length, slot in tiles if length > 0
    ]


@given(batches)
def test_every_adapted_row_is_in_one_tile(slots: list[int | None]) -> None:
    """Each row with an adapter is in exactly one tile, that tile is its adapter's, and base rows are in none."""
    segments = build_segments(slots)

    found = {row: slot for slot, rows in rows_by_tile(segments) for row in rows}
    assert found == {row: slot for row, slot in enumerate(slots) if slot is not None}
    assert sum(segments.tile_length.tolist()) == len(found)


@given(batches)
def test_tiles_are_full_but_for_the_last_of_an_adapter(slots: list[int | None]) -> None:
    """An adapter with n rows has ceil(n / tile_rows) tiles, in batch order."""
    segments = build_segments(slots)

    for slot in {slot for slot in slots if slot is not None}:
        tiles = [rows for tile_slot, rows in rows_by_tile(segments) if tile_slot == slot]
        assert all(len(rows) == segments.tile_rows for rows in tiles[:-1])
        assert [row for rows in tiles for row in rows] == [row for row, owner in enumerate(slots) if owner == slot]


@given(batches, st.sampled_from(TILE_ROWS))
def test_a_capacity_only_adds_empty_tiles(slots: list[int | None], tile_rows: int) -> None:
    """Segments built with a capacity have its sizes, and the same tiles whatever it is."""
    capacity = SegmentCapacity(num_rows=160, num_slots=6, tile_rows=tile_rows)
    exact = SegmentCapacity(num_rows=len(slots), num_slots=6, tile_rows=tile_rows)

    segments = build_segments(slots, capacity=capacity)

    assert segments.num_tiles == capacity.num_tiles
    assert segments.permutation.shape == (160,)
    assert rows_by_tile(segments) == rows_by_tile(build_segments(slots, capacity=exact))


@given(st.integers(0, 40), st.integers(1, 8), st.sampled_from(TILE_ROWS))
def test_the_capacity_is_the_least_that_holds_every_batch(num_rows: int, num_slots: int, tile_rows: int) -> None:
    """One row each for all adapters but one is the batch that needs every tile."""
    capacity = SegmentCapacity(num_rows, num_slots, tile_rows)
    others = list(range(1, min(num_slots, num_rows)))

    segments = build_segments(others + [0] * (num_rows - len(others)), capacity=capacity)

    assert len(rows_by_tile(segments)) == capacity.num_tiles


def test_a_batch_above_the_capacity_is_refused() -> None:
    """Neither rows nor adapters beyond the capacity are dropped in silence."""
    capacity = SegmentCapacity(num_rows=4, num_slots=2, tile_rows=16)

    with pytest.raises(ValueError, match="5 rows"):
        build_segments([0] * 5, capacity=capacity)
    with pytest.raises(ValueError, match="3 adapters"):
        build_segments([0, 1, 2], capacity=capacity)


def test_a_refill_keeps_the_addresses() -> None:
    """Captured segments can take another step's tiles in place."""
    capacity = SegmentCapacity(num_rows=8, num_slots=3, tile_rows=16)
    captured = build_segments([0, None, 1], capacity=capacity)
    addresses = [captured.tile_start.data_ptr(), captured.permutation.data_ptr()]

    captured.refill(build_segments([2, 2, None, 0], capacity=capacity))

    assert rows_by_tile(captured) == [(0, [3]), (2, [0, 1])]
    assert [captured.tile_start.data_ptr(), captured.permutation.data_ptr()] == addresses


def test_a_refill_of_another_size_is_refused() -> None:
    """A captured graph cannot be given more tiles than it was captured with."""
    captured = build_segments([0], capacity=SegmentCapacity(8, 3, 16))

    with pytest.raises(ValueError, match="capacity"):
        captured.refill(build_segments([0], capacity=SegmentCapacity(64, 3, 16)))


def test_each_array_starts_on_sixteen_bytes() -> None:
    """Kernels are specialised by alignment, so no array may lose it with the sizes."""
    segments = build_segments([0, 1, 2, 2, 4])

    for array in (segments.tile_start, segments.tile_length, segments.tile_slot, segments.permutation):
        assert (array.data_ptr() - segments.packed.data_ptr()) % 16 == 0
        assert array.dtype == torch.int32


def test_large_tiles_are_for_adapters_with_many_rows() -> None:
    """Decode rows go in small tiles, long prefills in large ones, and no adapters at all is no special case."""
    assert tile_rows_for(num_rows=64, num_adapters=32) == 16
    assert tile_rows_for(num_rows=512, num_adapters=4) == 32
    assert tile_rows_for(num_rows=0, num_adapters=0) == 16
