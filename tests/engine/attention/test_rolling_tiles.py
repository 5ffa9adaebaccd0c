"""Tests of how queries with a rolling window are cut into parts, splits and slots."""

from random import Random

import pytest

from graftwork.engine.attention.rolling_tiles import (
    cut_rolling,
    most_rolling_splits,
    parted,
    rolling_split,
    turn_distances,
)
from graftwork.engine.attention.tiles import Cutting, cut_decoding, max_splits, page_tables
from graftwork.engine.core.sampling import RollingWindow
from tests.engine.attention.batches import batch_of, piece, rolling_piece
from tests.engine.attention.test_tiles import random_slices

CUTTING = Cutting(2, decode_queries=4, chunk_queries=32, window=None)
WINDOWS = [
    *(RollingWindow(sinks, window) for sinks, window in ((0, 1), (4, 300), (300, 4), (256, 255), (1000, 9000))),
    RollingWindow(1 << 30, 1 << 30),
]


@pytest.mark.parametrize("seed", range(12))
def test_the_items_of_a_query_hold_each_key_that_it_sees_once(seed: int) -> None:
    """For each decoding row, the splits of the sinks and of the window cover what it sees once, each has a slot of its own, as
    many as are merged, and other rows keep their slots."""
    random = Random(seed)
    slices, window = random_slices(random), random.choice(WINDOWS)
    pieces = [
        rolling_piece(str(number), one, window, list(range(-(-(one[0] + one[1]) // 16))), 16)
        if number % 3
        else piece(str(number), one[0], one[1], [number] * -(-(one[0] + one[1]) // 16), one[2])
        for number, one in enumerate(slices)
    ]
    placed = batch_of(pieces).placed
    (others, own_tables), rolling = parted(placed, page_tables(placed))
    decoding, num_slots = cut_decoding(others, range(0), own_tables, CUTTING)

    cut = cut_rolling(*rolling, CUTTING, decoding, num_slots)

    tiles, merged, num_others = cut.decode, cut.merged, len(decoding.query_row)
    slots: list[int] = []
    by_row = {row: one for one in rolling[0] for row in one.decoding_rows}
    assert merged.query_row.tolist()[num_others:] == list(by_row)
    for index, (row, one) in enumerate(by_row.items()):
        keys = one.num_keys(row)
        split = rolling_split(window, keys, 2)
        seen, own_slots = list[int](), list[int]()
        for tile in range(len(tiles.tile_row)):
            query = row - tiles.tile_row[tile]
            if not 0 <= query < tiles.tile_length[tile]:
                continue
            assert tiles.tile_position[tile] + query + 1 == keys
            assert tiles.tile_split[tile] == split
            first, end = (0, min(window.sinks, keys)) if tiles.tile_is_sinks[tile] else (window.sinks, keys)
            first = max(first, 0 if tiles.tile_is_sinks[tile] else keys - window.window)
            covered = [int(one) for one in tiles.item_split[tiles.item_tile == tile] if first < end]
            own = [one for one in covered if one * split < end and (one + 1) * split > first]
            seen += [key for one in own for key in range(max(one * split, first), min((one + 1) * split, end))]
            own_slots += [int(tiles.part_slot[tiles.tile_query[tile] + query]) + count for count in range(len(own))]
        expected = {*range(min(window.sinks, keys)), *range(max(keys - window.window, window.sinks, 0), keys)}
        assert len(seen) == len(expected)
        assert set(seen) == expected
        place = num_others + index
        assert sorted(own_slots) == [merged.query_slot[place] + count for count in range(merged.query_keys[place])]
        assert len(own_slots) <= min(max_splits(2), most_rolling_splits(len(expected), 2))
        slots += own_slots
    assert sorted(slots) == list(range(num_slots, cut.num_slots))
    assert (merged.query_split[num_others:] == 1).all()
    assert tiles.num_items.tolist() == [len(tiles.item_tile)]


def test_tables_of_sinks_and_windows_stand_in_one_list() -> None:
    """The table of a window begins where page 0 would be if none were given up, and that of the sinks where they are."""
    window = RollingWindow(20, 30)
    other, own = piece("a", 30, 1, [7, 3]), rolling_piece("b", (200, 3, 0), window, list(range(50, 63)), 16)
    placed = batch_of([other, own]).placed
    _, rolling = parted(placed, page_tables(placed))
    decoding, num_slots = cut_decoding([], range(0), page_tables([]), CUTTING)

    tiles = cut_rolling(*rolling, CUTTING, decoding, num_slots).chunk

    page_ids = rolling[1].page_ids.tolist()
    assert page_ids == [7, 3, 50, 51, 60, 61, 62]
    assert [page_ids[tiles.tile_sink_table[0] + page] for page in (0, 1)] == [50, 51]
    assert [page_ids[tiles.tile_table[0] + page] for page in (10, 11, 12)] == [60, 61, 62]


def test_queries_are_turned_back_to_stand_right_behind_what_they_see() -> None:
    """Up to sinks and window together nothing is turned; then each row by one position more. Other rows are not."""
    placed = batch_of([rolling_piece("a", (6, 5, 0), RollingWindow(3, 5), [1], 16), piece("b", 40, 2, [2])]).placed

    assert turn_distances(placed, 9).tolist() == [0, 0, 1, 2, 3, 0, 0, 0, 0]
