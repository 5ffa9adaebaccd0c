"""Cuts the queries of a step into tiles and splits, for the Triton kernels. Uses numpy only.

A tile is up to some number of adjacent queries of one request: they share a page table and most of their keys. Decoding
rows are also cut into splits: runs of keys that different programs compute.

    keys of a request    0 ......... 256 ......... 512 ... 600
    splits of 256             0             1           2         so a decoding row is three items of work

Invariant: the size of a split follows from the query's own number of keys and from the model, so the bits of a row do
not depend on the rows beside it. All queries of a tile have one size of splits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graftwork.engine.attention.backend import PlacedSlice

Words = NDArray[np.int32]

SMALLEST_SPLIT = 256
"""Keys of the smallest split. A split must take long beside the start of a program and the writing of its sums."""
_PROGRAMS_OF_ONE_ROW = 256
"""Splits times KV heads of one long decoding row: as many programs as fill a large GPU."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """How the queries of one model are cut, in the layers with one window."""

    num_kv_heads: int
    decode_queries: int
    """The most queries of a tile of decoding rows."""
    chunk_queries: int
    """The most queries of a tile of a chunk."""
    window: int | None
    """A query sees this many keys up to its own; None means all."""

    def visible_keys(self, num_keys: int) -> int:
        """Returns how many keys a query sees that has `num_keys` keys up to its own position."""
        return num_keys if self.window is None else min(num_keys, self.window)

    def split_tokens(self, num_keys: int) -> int:
        """Returns the keys of a split, for a query that has `num_keys` keys up to its own position.

        The result is SMALLEST_SPLIT times a power of two: so large that no query has more than `max_splits` splits.
        Splits begin at multiples of it, so a window may begin in the middle of one.
        """
        size = SMALLEST_SPLIT
        while self.visible_keys(num_keys) > (max_splits(self.num_kv_heads) - 1) * size:
            size *= 2
        return size

    def most_splits(self, num_keys: int) -> int:
        """Returns the most splits of a query that has at most `num_keys` keys."""
        touched = -(-self.visible_keys(num_keys) // SMALLEST_SPLIT) + (self.window is not None)
        return min(touched, max_splits(self.num_kv_heads))

    def first_split(self, num_keys: Words, split_tokens: Words) -> Words:
        """Returns the first split that each query sees. `num_keys` are its keys up to its own position."""
        first_key = np.zeros_like(num_keys) if self.window is None else np.maximum(num_keys - self.window, 0)
        return first_key // split_tokens


def max_splits(num_kv_heads: int) -> int:
    """Returns the most splits of one query: 32 to 128. Models with few KV heads get more."""
    return min(max(_PROGRAMS_OF_ONE_ROW // num_kv_heads, 32), 128)


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Tiles of queries. All arrays are [num_tiles] int32. The kernels' arguments have the same names."""

    tile_row: Words
    """The first row in the batch."""
    tile_length: Words
    """The number of queries."""
    tile_position: Words
    """The position of the first query."""
    tile_table: Words
    """Where the page table of the request begins in the page numbers of the step."""


@dataclass(frozen=True, slots=True)
class DecodeTiles(QueryTiles):
    """The decoding rows of a step, in tiles and in items of work. An item is one split of one tile.

    A slot is the memory for the partial sums of one query over one of its splits.
    """

    tile_query: Words
    """The number of the first query among all decoding rows."""
    tile_split: Words
    """Keys of each split."""
    item_tile: Words  # [num_items]
    item_split: Words  # [num_items] the number of the split, counted from key 0
    query_row: Words  # [num_queries] the row of each decoding row in the batch
    query_keys: Words  # [num_queries] its keys up to its own position; 0 for a padding row
    query_split: Words  # [num_queries] keys of each of its splits
    query_slot: Words  # [num_queries] its first slot
    num_items: Words  # [1]


@dataclass(frozen=True, slots=True)
class PageTables:
    """The page tables of a step, one after another."""

    starts: Sequence[int]
    """Where each request's table begins, in the order of the slices."""
    page_ids: Words


def page_tables(placed: Sequence[PlacedSlice]) -> PageTables:
    """Returns the page numbers of all slices, one after another."""
    return group_tables(placed, 1)[0]


def group_tables(placed: Sequence[PlacedSlice], num_groups: int) -> list[PageTables]:
    """Returns the page tables of each layer group. All groups share one array of page numbers.

    A windowed group keeps only a request's last pages. Its table begins where its first page would be, so that page n
    of the request is entry n; it may begin before the array, and no kernel reads entries before the kept pages.
    """
    found = [one.piece.table(group) for group in range(num_groups) for one in placed]
    tables = [np.array(pages, np.int32) for _, pages in found]
    ends = np.cumsum([0, *map(len, tables)]).tolist()
    starts = [end - first for end, (first, _) in zip(ends, found, strict=False)]
    page_ids = np.concatenate(tables) if tables else np.zeros(0, np.int32)
    count = len(placed)
    return [PageTables(starts[group * count : (group + 1) * count], page_ids) for group in range(num_groups)]


def cut_decoding(
    placed: Sequence[PlacedSlice], padding_rows: range, tables: PageTables, cutting: Cutting
) -> tuple[DecodeTiles, int]:
    """Cuts the decoding rows of a step into tiles and splits. Returns them, and the number of slots.

    Tiles with the largest splits come first. A padding row becomes a query without keys, whose result is zero.
    """
    tiles: list[tuple[int, ...]] = []
    queries: list[tuple[int, ...]] = []
    for one, table in zip(placed, tables.starts, strict=True):
        for rows, split in _runs(one, cutting):
            tiles.append((rows.start, len(rows), one.num_keys(rows.start) - 1, table, len(queries), split))
            queries += [(row, one.num_keys(row), split) for row in rows]
    queries += [(row, 0, SMALLEST_SPLIT) for row in padding_rows]
    tiles.sort(key=lambda tile: -tile[-1])  # stable
    row, length, position, table_start, first_query, tile_split = _columns(tiles, 6)
    query_row, query_keys, query_split = _columns(queries, 3)
    first = cutting.first_split(position + 1, tile_split)
    num_splits = (position + length - 1) // tile_split - first + 1
    item_tile = np.repeat(np.arange(len(tiles), dtype=np.int32), num_splits)
    item_split = np.arange(len(item_tile)) - np.repeat(np.cumsum(num_splits) - num_splits - first, num_splits)
    num_slots = (query_keys - 1) // query_split - cutting.first_split(query_keys, query_split) + 1  # [num_queries]
    ends = np.cumsum(num_slots, dtype=np.int32)
    decode = DecodeTiles(
        tile_row=row,
        tile_length=length,
        tile_position=position,
        tile_table=table_start,
        tile_query=first_query,
        tile_split=tile_split,
        item_tile=item_tile,
        item_split=item_split.astype(np.int32),
        query_row=query_row,
        query_keys=query_keys,
        query_split=query_split,
        query_slot=ends - num_slots,
        num_items=np.array([len(item_tile)], np.int32),
    )
    return decode, int(num_slots.sum())


def cut_chunks(placed: Sequence[PlacedSlice], padding_rows: range, tables: PageTables, cutting: Cutting) -> QueryTiles:
    """Cuts the prefill chunks of a step into tiles. Those with most keys come first, because they take longest.

    Padding rows become tiles without keys, whose result is zero.
    """
    tiles: list[tuple[int, ...]] = []
    for one, table in zip(placed, tables.starts, strict=True):
        rows = one.chunk_rows
        for first in range(rows.start, rows.stop, cutting.chunk_queries):
            length = min(cutting.chunk_queries, rows.stop - first)
            tiles.append((first, length, one.num_keys(first) - 1, table))
    for first in range(padding_rows.start, padding_rows.stop, cutting.chunk_queries):
        length = min(cutting.chunk_queries, padding_rows.stop - first)
        tiles.append((first, length, -length, 0))  # all positions are before the first key
    tiles.sort(key=lambda tile: -cutting.visible_keys(tile[2] + tile[1]))
    return QueryTiles(*_columns(tiles, 4))


def _runs(one: PlacedSlice, cutting: Cutting) -> Iterator[tuple[range, int]]:
    """Yields the decoding rows of a slice in runs that fit into a tile, with the keys of their splits."""
    rows = one.decoding_rows
    start = rows.start
    while start < rows.stop:
        split = cutting.split_tokens(one.num_keys(start))
        end = start + 1
        last = min(rows.stop, start + cutting.decode_queries)
        while end < last and cutting.split_tokens(one.num_keys(end)) == split:
            end += 1
        yield range(start, end), split
        start = end


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> list[Words]:
    return list(np.array(rows, dtype=np.int32).reshape(-1, width).T.copy())
