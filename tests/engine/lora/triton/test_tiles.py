"""Tests of tiles: the division of a batch's adapted rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.lora.triton.launch_plan import TILE_ROWS
from graftwork.engine.lora.triton.tiles import LoraSegments, Parts, RowOwner, SegmentCapacity, build_segments

batches = st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=150)


def parts_by_tile(segments: LoraSegments) -> list[tuple[Parts, list[int]]]:
    """(parts, rows) of each tile that holds any."""
    tiles = []
    for tile in range(segments.num_tiles):
        start, length = int(segments.tile_start[tile]), int(segments.tile_length[tile])
        num_parts = int(segments.tile_parts[tile])
        assert (length > 0) == (num_parts > 0)
        if length:
            slots, weights = segments.part_slot[tile, :num_parts], segments.part_weight[tile, :num_parts]
            parts = tuple(zip(slots.tolist(), weights.tolist(), strict=True))
            tiles.append((parts, segments.permutation[start : start + length].tolist()))
    return tiles


def rows_by_tile(segments: LoraSegments) -> list[tuple[int, list[int]]]:
    """(slot, rows) of each tile that holds any, in a batch without mixtures."""
    assert all(len(parts) == 1 and parts[0][1] == 1.0 for parts, _ in parts_by_tile(segments))
    return [(parts[0][0], rows) for parts, rows in parts_by_tile(segments)]


@given(batches)
def test_every_adapted_row_is_in_one_tile(slots: list[int | None]) -> None:
    """Each row with an adapter is in exactly one tile of that adapter, and base rows are in none."""
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
    """Segments with a capacity have its size and the same tiles."""
    capacity = SegmentCapacity(num_rows=160, num_slots=6, tile_rows=tile_rows)
    exact = SegmentCapacity(num_rows=len(slots), num_slots=6, tile_rows=tile_rows)

    segments = build_segments(slots, capacity=capacity)

    assert segments.num_tiles == capacity.num_tiles
    assert segments.permutation.shape == (160,)
    assert rows_by_tile(segments) == rows_by_tile(build_segments(slots, capacity=exact))


@given(st.integers(0, 40), st.integers(1, 8), st.sampled_from(TILE_ROWS))
def test_the_capacity_is_the_least_that_holds_every_batch(num_rows: int, num_slots: int, tile_rows: int) -> None:
    """The capacity is reached by the batch with one row for each adapter but one."""
    capacity = SegmentCapacity(num_rows, num_slots, tile_rows)
    others = list(range(1, min(num_slots, num_rows)))

    segments = build_segments(others + [0] * (num_rows - len(others)), capacity=capacity)

    assert len(rows_by_tile(segments)) == capacity.num_tiles


def test_a_batch_above_the_capacity_is_refused() -> None:
    """A batch with more rows or adapters than the capacity is refused."""
    capacity = SegmentCapacity(num_rows=4, num_slots=2, tile_rows=16)

    with pytest.raises(ValueError, match="5 rows"):
        build_segments([0] * 5, capacity=capacity)
    with pytest.raises(ValueError, match="3 adapters"):
        build_segments([0, 1, 2], capacity=capacity)


@given(batches, st.integers(1, 8), st.sampled_from(TILE_ROWS), st.booleans())
def test_a_capacity_of_few_owners_holds_what_they_need(
    slots: list[int | None], num_owners: int, tile_rows: int, has_mixtures: bool
) -> None:
    """With a limit of different adapters, a capacity has fewer tiles, and holds each batch within the limit; another
    batch is refused."""
    capacity = SegmentCapacity(160, 8, tile_rows, has_mixtures, num_owners)
    owners = len({slot for slot in slots if slot is not None})

    assert capacity.num_tiles == num_owners + (160 - num_owners) // tile_rows
    if owners > num_owners:
        with pytest.raises(ValueError, match=f"{owners} adapters and mixtures"):
            build_segments(slots, capacity=capacity)
    else:
        expected = rows_by_tile(build_segments(slots, tile_rows=tile_rows))
        assert rows_by_tile(build_segments(slots, capacity=capacity)) == expected


def test_a_refill_keeps_the_addresses() -> None:
    """A refill writes another step's tiles into the same arrays."""
    capacity = SegmentCapacity(num_rows=8, num_slots=3, tile_rows=16)
    captured = build_segments([0, None, 1], capacity=capacity)
    addresses = [captured.tile_start.data_ptr(), captured.permutation.data_ptr()]

    captured.refill(build_segments([2, 2, None, 0], capacity=capacity))

    assert rows_by_tile(captured) == [(0, [3]), (2, [0, 1])]
    assert [captured.tile_start.data_ptr(), captured.permutation.data_ptr()] == addresses


def test_a_refill_of_another_size_is_refused() -> None:
    """A refill with more tiles than the capacity is refused."""
    captured = build_segments([0], capacity=SegmentCapacity(8, 3, 16))

    with pytest.raises(ValueError, match="capacity"):
        captured.refill(build_segments([0], capacity=SegmentCapacity(64, 3, 16)))


def test_each_array_starts_on_sixteen_bytes() -> None:
    """Each array starts at a multiple of 16 bytes, because kernels are specialised by alignment."""
    segments = build_segments([0, 1, 2, ((2, 0.5), (1, 0.5)), 4])

    integers = (
        segments.tile_start,
        segments.tile_length,
        segments.tile_parts,
        segments.part_slot,
        segments.permutation,
    )
    for array in (*integers, segments.part_weight):
        assert (array.data_ptr() - segments.packed.data_ptr()) % 16 == 0
    assert all(array.dtype == torch.int32 for array in integers)
    assert segments.part_weight.dtype == torch.float32


def test_row_wise_tiles_stand_at_their_own_positions() -> None:
    """In row-wise segments tile t is position t with one row, and the padding is at the end."""
    capacity = SegmentCapacity(num_rows=6, num_slots=2, tile_rows=1)

    segments = build_segments([1, None, 0, 1], capacity=capacity)

    assert segments.tile_start.tolist()[:3] == [0, 1, 2]
    assert segments.tile_length.tolist() == [1, 1, 1, 0, 0, 0]
    assert rows_by_tile(segments) == [(0, [2]), (1, [0]), (1, [3])]


def test_rows_of_one_mixture_make_tiles_of_their_own() -> None:
    """Rows share a tile only if their parts, weights and order are equal; a slot alone is a mixture of one."""
    first, second = ((2, 0.5), (0, 0.25)), ((0, 0.25), (2, 0.5))
    owners: list[RowOwner | None] = [first, 2, None, second, first, ((2, 1.0),)]

    tiles = parts_by_tile(build_segments(owners, tile_rows=16))

    assert dict(tiles) == {first: [0, 4], second: [3], ((2, 1.0),): [1, 5]}
    assert len(tiles) == 3


def test_a_batch_without_mixtures_has_room_for_one_part() -> None:
    """A batch without mixtures has arrays for one part only."""
    assert build_segments([0, 1, None]).num_parts == 1
    assert build_segments([0, ((1, 0.5), (0, 0.5))]).num_parts == 4


def test_mixtures_that_cannot_be_are_refused() -> None:
    """An empty mixture, one of five parts, and one in arrays without room for it are refused."""
    capacity = SegmentCapacity(num_rows=4, num_slots=2, tile_rows=16)

    with pytest.raises(ValueError, match="1 to 4"):
        build_segments([()])
    with pytest.raises(ValueError, match="1 to 4"):
        build_segments([((0, 0.2),) * 5])
    with pytest.raises(ValueError, match="has_mixtures"):
        build_segments([((0, 0.5), (1, 0.5))], capacity=capacity)
    with pytest.raises(ValueError, match="3 adapters"):
        build_segments([((0, 0.5), (1, 0.5)), 2], capacity=capacity)


@given(st.integers(0, 24), st.sampled_from(TILE_ROWS))
def test_the_capacity_holds_a_mixture_for_every_row(num_rows: int, tile_rows: int) -> None:
    """The capacity holds a different mixture for every row."""
    capacity = SegmentCapacity(num_rows, num_slots=2, tile_rows=tile_rows, has_mixtures=True)
    owners = [((0, float(row)), (1, 0.5)) for row in range(num_rows)]

    assert len(parts_by_tile(build_segments(owners, capacity=capacity))) == num_rows
