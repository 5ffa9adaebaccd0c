"""Cuts the queries of requests with a rolling window into tiles and splits, for the Triton kernels. Uses numpy only.

A decoding tile has two parts: its sinks and its window. The queries of the sinks are turned back (see rolling_kernels.py),
so each part is cut into splits by itself, and the sums of all of them are merged.

    keys of a request    0 1 2 3 | ....... | 700 ..... 768 ..... 1023     sinks 4, window 324, splits of 256
    splits                  0                     2         3             so a decoding row is three items of work

The windows and the sinks are numbers of the tiles, so any of them stand in one launch. Invariant: the size of a split
follows from the query's own number of keys, its window and the model, as with other rows (see tiles.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from graftwork.engine.attention.backend import PlacedSlice
from graftwork.engine.attention.tiles import (
    SMALLEST_SPLIT,
    Cutting,
    DecodeTiles,
    PageTables,
    QueryTiles,
    Words,
    max_splits,
)
from graftwork.engine.core.sampling import RollingWindow

_PARTLY_SEEN = 3
"""Splits that a query may see a part of: the last one of its sinks, the first and the last one of its window."""


@dataclass(frozen=True, slots=True)
class RollingChunkTiles(QueryTiles):
    """Tiles of the chunks of requests with a rolling window. `tile_table` is where page 0 would be if all pages were kept."""

    tile_window: Words
    tile_sinks: Words
    tile_sink_table: Words
    """Where the page table of the sinks begins."""


@dataclass(frozen=True, slots=True)
class RollingDecodeTiles(QueryTiles):
    """The decoding rows of requests with a rolling window: parts of tiles, in items of work. An item is one split of one part."""

    tile_window: Words
    tile_sinks: Words
    tile_is_sinks: Words
    """1 if the part is the sinks, 0 if it is the window."""
    tile_query: Words
    """The number of the first query among the queries of all parts."""
    tile_split: Words
    """Keys of each split."""
    item_tile: Words  # [num_items]
    item_split: Words  # [num_items] the number of the split, counted from key 0
    part_slot: Words  # [queries of all parts] the first slot
    num_items: Words  # [1]


@dataclass(frozen=True, slots=True)
class RollingCut:
    """The rows of a step that have a rolling window, in the layers without a window of their own."""

    decode: RollingDecodeTiles
    chunk: RollingChunkTiles
    merged: DecodeTiles
    """The other decoding rows. Behind their queries stand these, as if each slot were a split of one key."""
    num_slots: int
    """The slots of all decoding rows."""


def rolling_split(window: RollingWindow, num_keys: int, num_kv_heads: int) -> int:
    """Returns the keys of a split, for a query that has `num_keys` keys up to its own position."""
    size = SMALLEST_SPLIT
    while _seen(window, num_keys) > (max_splits(num_kv_heads) - _PARTLY_SEEN) * size:
        size *= 2
    return size


def most_rolling_splits(num_keys: int, num_kv_heads: int) -> int:
    """Returns the most splits of a query that sees at most `num_keys` keys."""
    return min(num_keys // SMALLEST_SPLIT + _PARTLY_SEEN, max_splits(num_kv_heads))


def turn_distances(placed: Sequence[PlacedSlice], num_rows: int) -> Words:
    """Returns by how many positions each row's query is turned back to its sinks: [num_rows], 0 for other rows."""
    distances = np.zeros(num_rows, np.int32)
    for one in placed:
        window = one.piece.rolling_window
        if window is not None:
            rows = slice(one.start_row, one.start_row + one.piece.num_tokens)
            positions = np.arange(one.piece.start, one.piece.end, dtype=np.int32)
            distances[rows] = np.maximum(positions - (window.sinks + window.window - 1), 0)
    return distances


PlacedRows = tuple[Sequence[PlacedSlice], PageTables]
"""Slices of a step, and their page tables."""


def parted(placed: Sequence[PlacedSlice], tables: PageTables) -> tuple[PlacedRows, PlacedRows]:
    """Returns the slices without a rolling window, and those with one."""
    pairs = list(zip(placed, tables.starts, strict=True))
    sides = (
        [pair for pair in pairs if (pair[0].piece.rolling_window is None) is not is_rolling]
        for is_rolling in (False, True)
    )
    others, rolling = (
        ([one for one, _ in side], PageTables([start for _, start in side], tables.page_ids)) for side in sides
    )
    return others, rolling


def cut_rolling(
    placed: Sequence[PlacedSlice], tables: PageTables, cutting: Cutting, others: DecodeTiles, num_slots: int
) -> RollingCut:
    """Cuts the rows of requests with a rolling window; all of `placed` have one.

    `others` and `num_slots` are those of the other decoding rows.
    """
    parts = _Parts(num_slots)
    chunks: list[tuple[int, ...]] = []
    for one, table in zip(placed, tables.starts, strict=True):
        for rows, split in _runs(one, cutting):
            parts.add(one, rows, split, table)
        window, rows = _window_of(one), one.chunk_rows
        numbers = window.window, window.sinks, table + one.piece.num_given_up
        for first in range(rows.start, rows.stop, cutting.chunk_queries):
            length = min(cutting.chunk_queries, rows.stop - first)
            chunks.append((first, length, one.num_keys(first) - 1, table, *numbers))
    chunks.sort(key=lambda tile: -min(tile[2] + tile[1], tile[4] + tile[5]))
    tiles = RollingChunkTiles(*_columns(chunks, len(fields(RollingChunkTiles))))
    return RollingCut(parts.tiles(), tiles, parts.behind(others), parts.num_slots)


class _Parts:
    """Collects the parts of decoding tiles."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._tiles: list[tuple[int, ...]] = []
        self._splits: list[range] = []
        self._slots: list[int] = []
        self._merged: list[tuple[int, int, int, int]] = []

    def add(self, one: PlacedSlice, rows: range, split: int, table: int) -> None:
        """Adds adjacent decoding rows of one request. `table` is where its page 0 would be if all pages were kept."""
        window, position = _window_of(one), one.num_keys(rows.start) - 1
        sinks_end = min(window.sinks, position + len(rows))
        place = rows.start, len(rows), position
        numbers = window.window, window.sinks
        sinks_query, window_query = len(self._slots), len(self._slots) + len(rows)
        if sinks_end:
            tile = *place, table + one.piece.num_given_up, *numbers, 1, sinks_query, split
            self._add_tile(tile, range(-(-sinks_end // split)))
        if position + len(rows) > window.sinks:
            first_key = max(position + 1 - window.window, window.sinks)
            tile = *place, table, *numbers, 0, window_query, split
            self._add_tile(tile, range(first_key // split, (position + len(rows) - 1) // split + 1))
        of_window = []
        for row in rows:
            sinks_slots, window_slots = _slots_of(window, one.num_keys(row), split)
            self._merged.append((row, sinks_slots + window_slots, 1, self.num_slots))
            self._slots.append(self.num_slots)
            of_window.append(self.num_slots + sinks_slots)
            self.num_slots += sinks_slots + window_slots
        self._slots += of_window

    def _add_tile(self, tile: tuple[int, ...], splits: range) -> None:
        self._tiles.append(tile)
        self._splits.append(splits)

    def tiles(self) -> RollingDecodeTiles:
        """Returns all parts, those with the largest splits first."""
        order = sorted(range(len(self._tiles)), key=lambda tile: -self._tiles[tile][-1])  # stable
        columns = _columns([self._tiles[tile] for tile in order], 9)
        first, counts = _columns([(self._splits[tile].start, len(self._splits[tile])) for tile in order], 2)
        item_tile = np.repeat(np.arange(len(order), dtype=np.int32), counts)
        item_split = np.arange(len(item_tile)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        slots, num_items = np.array(self._slots, np.int32), np.array([len(item_tile)], np.int32)
        return RollingDecodeTiles(*[*columns, item_tile, item_split.astype(np.int32), slots, num_items])

    def behind(self, others: DecodeTiles) -> DecodeTiles:
        """Returns other decoding rows with these behind those that are merged."""
        names = ("query_row", "query_keys", "query_split", "query_slot")
        own = dict(zip(names, _columns(self._merged, len(names)), strict=True))
        values = {field.name: getattr(others, field.name) for field in fields(DecodeTiles)}
        return DecodeTiles(**values | {name: np.concatenate([values[name], own[name]]) for name in names})


def _runs(one: PlacedSlice, cutting: Cutting) -> Iterator[tuple[range, int]]:
    """Yields the decoding rows of a slice in runs that fit into a tile, with the keys of their splits."""
    window, rows = _window_of(one), one.decoding_rows
    start = rows.start
    while start < rows.stop:
        split = rolling_split(window, one.num_keys(start), cutting.num_kv_heads)
        end = start + 1
        last = min(rows.stop, start + cutting.decode_queries)
        while end < last and rolling_split(window, one.num_keys(end), cutting.num_kv_heads) == split:
            end += 1
        yield range(start, end), split
        start = end


def _slots_of(window: RollingWindow, num_keys: int, split: int) -> tuple[int, int]:
    """Returns the splits of the sinks and of the window that a query sees."""
    sinks_slots = -(-min(window.sinks, num_keys) // split)
    if num_keys <= window.sinks:
        return sinks_slots, 0
    return sinks_slots, (num_keys - 1) // split - max(num_keys - window.window, window.sinks) // split + 1


def _seen(window: RollingWindow, num_keys: int) -> int:
    return min(num_keys, window.sinks + window.window)


def _window_of(one: PlacedSlice) -> RollingWindow:
    assert one.piece.rolling_window is not None, "the request has no rolling window"
    return one.piece.rolling_window


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> list[Words]:
    return list(np.array(rows, dtype=np.int32).reshape(-1, width).T.copy())
