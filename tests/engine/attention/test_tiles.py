"""Tests of how queries are cut into tiles, splits and slots."""

from random import Random

import numpy as np
import pytest

from graftwork.engine.attention.tiles import Cutting, cut_chunks, cut_decoding, max_splits, page_tables
from tests.engine.attention.batches import batch_of, piece


def random_slices(random: Random) -> list[tuple[int, int, int]]:
    """Some requests of up to 20,000 tokens: decoding rows, drafts and chunks."""
    return [
        (
            random.choice([0, 255, 256, 7935, random.randrange(20_000)]),
            *random.choice([(1, 0), (9, 8), (70, 0), (33, 3)]),
        )
        for _ in range(8)
    ]


@pytest.mark.parametrize("window", [None, 1, 300, 4096])
@pytest.mark.parametrize("seed", range(5))
def test_the_items_of_a_query_hold_each_key_that_it_sees_once(window: int | None, seed: int) -> None:
    """For each decoding row, the splits of its tile's items cover its keys once, and its slots are its own."""
    slices = random_slices(Random(seed))
    pieces = [
        piece(str(number), start, count, [number] * -(-(start + count) // 16), drafts)
        for number, (start, count, drafts) in enumerate(slices)
    ]
    placed = batch_of(pieces).placed
    cutting = Cutting(2, decode_queries=4, chunk_queries=32, window=window)
    tables = page_tables(placed)

    tiles, num_slots = cut_decoding(placed, range(1000, 1002), tables, cutting)

    slots: list[int] = []
    for number, (row, keys, split) in enumerate(zip(tiles.query_row, tiles.query_keys, tiles.query_split, strict=True)):
        if row >= 1000:
            assert keys == 0
            continue
        (tile,) = [
            tile
            for tile in range(len(tiles.tile_row))
            if tiles.tile_query[tile] <= number < tiles.tile_query[tile] + tiles.tile_length[tile]
        ]
        assert split == tiles.tile_split[tile] == cutting.split_tokens(int(keys))
        assert row == tiles.tile_row[tile] + number - tiles.tile_query[tile]
        assert keys == tiles.tile_position[tile] + 1 + number - tiles.tile_query[tile]
        first = 0 if window is None else max(0, int(keys) - window)
        seen = [int(one) for one in tiles.item_split[tiles.item_tile == tile]]
        own = [one for one in seen if one * split < keys and (one + 1) * split > first]
        assert seen == sorted(set(seen))
        assert own == list(range(first // split, (int(keys) - 1) // split + 1))
        assert len(own) <= max_splits(2)
        slots += [int(tiles.query_slot[number]) + index for index in range(len(own))]
    assert slots == list(range(num_slots))
    assert tiles.num_items.tolist() == [len(tiles.item_tile)]
    decoding = [row for one in placed for row in one.decoding_rows]
    assert tiles.query_row.tolist() == [*decoding, 1000, 1001]


def test_every_row_of_a_chunk_is_in_one_tile() -> None:
    """Chunks of 70 and 33 rows are cut into tiles of 32 queries; the tile with most keys comes first."""
    placed = batch_of([piece("a", 5, 70, [1] * 5), piece("b", 300, 36, [2] * 21, 3), piece("c", 9, 1, [3])]).placed

    tiles = cut_chunks(placed, range(0), page_tables(placed), Cutting(2, 4, 32, None))

    rows = [list(range(row, row + length)) for row, length in zip(tiles.tile_row, tiles.tile_length, strict=True)]
    assert sorted(row for tile in rows for row in tile) == list(range(103))
    assert all(len(tile) <= 32 for tile in rows)
    assert (tiles.tile_row[0], tiles.tile_position[0]) == (102, 332)
    assert tiles.tile_table.tolist()[0] == 5


def test_padding_rows_are_tiles_before_the_first_key() -> None:
    """Padding rows behind a chunk are cut into tiles whose last query ends at key 0; they come last."""
    placed = batch_of([piece("a", 5, 3, [1])]).placed

    tiles = cut_chunks(placed, range(3, 38), page_tables(placed), Cutting(2, 4, 32, None))

    rows = zip(tiles.tile_row, tiles.tile_length, tiles.tile_position, strict=True)
    assert [tuple(map(int, row)) for row in rows] == [(0, 3, 5), (3, 32, -32), (35, 3, -3)]


def test_page_tables_stand_one_after_another() -> None:
    """The table of each request begins where that of the one before it ends."""
    tables = page_tables(batch_of([piece("a", 30, 1, [7, 3]), piece("b", 0, 1, [9]), piece("c", 16, 2, [1, 2])]).placed)

    assert tables.page_ids.tolist() == [7, 3, 9, 1, 2]
    assert list(tables.starts) == [0, 2, 3]
    assert tables.page_ids.dtype == np.int32


@pytest.mark.parametrize("num_kv_heads", [1, 2, 5, 8, 32])
def test_the_longest_context_has_a_bounded_number_of_splits(num_kv_heads: int) -> None:
    """No query of up to a million keys has more than max_splits splits, and short ones have splits of 256 keys."""
    cutting = Cutting(num_kv_heads, 4, 32, None)

    counts = [-(-keys // cutting.split_tokens(keys)) for keys in (1, 256, 4096, 131_072, 1_000_000)]

    assert max(counts) <= max_splits(num_kv_heads)
    assert cutting.split_tokens(4096) == 256
