"""Groups the queries of a step for attention in torch, and masks the keys that each query may see.

For a decoding row, attention is computed for this row alone. A chunk is several rows of one prompt whose attention is
computed together.

Invariant: the bits of a row depend on its own request alone.

- Decoding rows are computed together only if their page tables are padded to the same length. This length follows from
  the position of the token (see BatchInvariance).
- Attention for several queries at once adds in another order than attention for one query (benchmarks/row_bits.py). So
  a draft token is never part of a chunk. It is computed as a decoding row, as if the draft tokens before it had been
  generated one by one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from graftwork.engine.attention.backend import AttentionBatch, PlacedSlice
from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.step import RequestSlice
from graftwork.engine.model.batch_invariance import BatchInvariance

_KEY_BLOCK = 32
"""Attention reads keys in vectors of this length. Padding to whole vectors avoids a remainder with another sum order.
"""
_PAGES_WORTH_A_CALL = 96
"""The number of pages whose copy takes as long as one more attention call."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decoding rows whose attention is computed in one call.

    Each row is one token: the last known token of a request, or a draft token.
    """

    rows: torch.Tensor  # [num_queries] index of each row in the batch
    tables: tuple[torch.Tensor, ...]
    """For each layer group [num_tables * max_pages]: flat page tables, padded with the null page."""
    num_tables: int
    """The number of page tables: one for each query, or 1 if all queries are of one request."""
    visible: torch.Tensor  # [num_queries, 1, 1, max_pages * page_tokens] True where a key may be seen

    def __len__(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The rows of one prefill chunk: several known tokens of one request. Their attention is computed together."""

    start_row: int
    end_row: int
    tables: tuple[torch.Tensor, ...]
    """For each layer group [num_pages]: the page table. The null page stands for pages that no query sees."""
    num_keys: int
    visible: torch.Tensor  # [end_row - start_row, num_keys] causal mask


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """Masks of the keys that each query may see. Layers with the same sliding window share them."""

    decodes: tuple[torch.Tensor, ...]  # as DecodeRows.visible, in the order of KeyGroups.decodes
    chunks: tuple[torch.Tensor, ...]  # as ChunkRows.visible, in the order of KeyGroups.chunks


@dataclass(frozen=True, slots=True)
class KeyGroups:
    """All queries of a step, in groups that are computed together."""

    decodes: tuple[DecodeRows, ...]
    chunks: tuple[ChunkRows, ...]
    positions: torch.Tensor  # [num_rows]

    @property
    def is_one_decode(self) -> bool:
        """Whether all rows of the step are decoding rows of one group, in their order."""
        return not self.chunks and len(self.decodes) == 1 and len(self.decodes[0]) == self.positions.shape[0]

    @property
    def is_one_chunk(self) -> bool:
        """Whether all rows of the step are one chunk."""
        if self.decodes or len(self.chunks) != 1:
            return False
        return self.chunks[0].start_row == 0 and self.chunks[0].end_row == self.positions.shape[0]

    def visible(self, window: int | None) -> VisibleKeys:
        """Returns masks of the keys that each query may see, in layers with the sliding window `window`, in tokens.

        A query sees the last `window` keys up to its own position, its own key included. If `window` is None, it sees
        all keys up to its own. Pages outside the window are read too, but masked.
        """
        decodes = tuple(part.visible for part in self.decodes)
        chunks = tuple(part.visible for part in self.chunks)
        if window is None:
            return VisibleKeys(decodes, chunks)
        own = [self.positions[part.rows, None, None, None] for part in self.decodes]
        own_of_chunks = [self.positions[part.start_row : part.end_row, None] for part in self.chunks]
        return VisibleKeys(
            tuple(_last_keys(*part, window) for part in zip(decodes, own, strict=True)),
            tuple(_last_keys(*part, window) for part in zip(chunks, own_of_chunks, strict=True)),
        )


class _Query(NamedTuple):
    """One decoding row, and how many keys and pages of its request it attends to."""

    row: int
    placed: PlacedSlice
    num_keys: int
    num_pages: int


class KeyGrouper:
    """Groups the queries of steps, on one device."""

    def __init__(
        self, page_tokens: int, null_page: int, device: torch.device, rules: BatchInvariance, num_groups: int = 1
    ) -> None:
        """`null_page` is a page of zeros that pads page tables. `num_groups` is the number of layer groups."""
        self._page_tokens = page_tokens
        self._null_page = null_page
        self._device = device
        self._rules = rules
        self._groups = range(num_groups)

    def group(self, batch: AttentionBatch) -> KeyGroups:
        queries = [query for one in batch.placed for query in self._queries(one)]
        chunks = tuple(self._chunk(one) for one in batch.placed if one.piece.num_known > 1)
        return KeyGroups(tuple(self._decodes(queries)), chunks, batch.positions)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _queries(self, one: PlacedSlice) -> Iterator[_Query]:
        for row in one.decoding_rows:
            num_keys = one.num_keys(row)
            yield _Query(row, one, num_keys, pages_for(num_keys, self._page_tokens))

    def _decodes(self, queries: list[_Query]) -> Iterator[DecodeRows]:
        """Groups queries whose page tables are padded to the same length."""
        if self._rules.attends_in_any_shape:
            whole = pages_for(_KEY_BLOCK, self._page_tokens)
            for group in _groups(queries):
                most = max(query.num_pages for query in group)
                yield self._decode(group, -(-most // whole) * whole)
            return
        by_pages: dict[int, list[_Query]] = {}
        for query in queries:
            by_pages.setdefault(padded_pages(query.num_pages), []).append(query)
        for max_pages, group in by_pages.items():
            yield self._decode(group, max_pages)

    def _decode(self, queries: list[_Query], max_pages: int) -> DecodeRows:
        """Builds one group of decoding rows.

        Queries of one request share the page table of the longest one; the mask hides later keys from shorter ones.
        """
        is_one_request = all(query.placed is queries[0].placed for query in queries)
        owners = queries[-1:] if is_one_request else queries
        keys = torch.arange(max_pages * self._page_tokens, device=self._device)
        num_keys = self._tensor([query.num_keys for query in queries])
        return DecodeRows(
            rows=self._tensor([query.row for query in queries]),
            tables=tuple(
                self._tensor(
                    [
                        page
                        for query in owners
                        for page in self._padded(query.placed.piece, group, query.num_pages, max_pages)
                    ]
                )
                for group in self._groups
            ),
            num_tables=len(owners),
            visible=(keys < num_keys[:, None])[:, None, None, :],
        )

    def _padded(self, piece: RequestSlice, group: int, num_pages: int, max_pages: int) -> list[int]:
        """Returns the first `num_pages` pages of a request in a layer group, padded to `max_pages`.

        The null page stands for pages that the group does not keep: no query sees their keys.
        """
        first, pages = piece.table(group) if group else (0, piece.pages)
        return [*[self._null_page] * first, *pages[: num_pages - first], *[self._null_page] * (max_pages - num_pages)]

    def _chunk(self, one: PlacedSlice) -> ChunkRows:
        piece = one.piece
        num_pages = pages_for(piece.known_end, self._page_tokens)
        queries = torch.arange(piece.start, piece.known_end, device=self._device)
        keys = torch.arange(piece.known_end, device=self._device)
        return ChunkRows(
            start_row=one.chunk_rows.start,
            end_row=one.chunk_rows.stop,
            tables=tuple(self._tensor(self._padded(piece, group, num_pages, num_pages)) for group in self._groups),
            num_keys=piece.known_end,
            visible=keys <= queries[:, None],
        )


def padded_pages(num_pages: int) -> int:
    """Returns to how many pages a page table of `num_pages` pages is padded.

    The result is the smallest of the numbers 1, 2, 3, 4, 6, 8, 12, 16, … that is not below `num_pages`. So at most half
    as many pages again are added.
    """
    power = 1 << (num_pages - 1).bit_length()  # the next power of two
    return power * 3 // 4 if num_pages <= power * 3 // 4 and power >= 4 else power


def _groups(queries: list[_Query]) -> list[list[_Query]]:
    """Returns the groups of queries that are computed together.

    All queries are in one group, except for a request whose pages would be copied too often: this request has its own
    group.
    """
    alone: list[list[_Query]] = []
    together: list[_Query] = []
    for _, run in groupby(queries, lambda query: query.placed.start_row):
        own = list(run)
        if (len(own) - 1) * own[-1].num_pages >= _PAGES_WORTH_A_CALL:
            alone.append(own)
        else:
            together += own
    return [*alone, together] if together else alone


def _last_keys(visible: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    """Returns `visible` without the keys at or before position - window."""
    keys = torch.arange(visible.shape[-1], device=visible.device)
    return visible & (keys > positions - window)
