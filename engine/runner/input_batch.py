"""Builds the input tensors of one step from its StepPlan. The tensors are built once, and every layer reads them.

A row is one token of the step. For a decoding row, attention is computed for this row alone. A chunk is several rows of
one prompt whose attention is computed together. Rows are sorted by adapter. The rows of one adapter begin with its
decoding rows, and its chunks follow.

Invariant: the bits of a row depend on its own request alone.

- Small batches are padded with unused rows. Decoding rows are computed together only if their page tables are padded to
  the same length. This length follows from the position of the token (see BatchInvariance).
- Attention for several queries at once adds in another order than attention for one query (benchmarks/row_bits.py). So
  a draft token is never part of a chunk. It is computed as a decoding row, as if the draft tokens before it had been
  generated one by one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.step import RequestSlice, StepPlan
from graftwork.engine.lora.torch_backend import padded_rows
from graftwork.engine.model.layers import BatchInvariance

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
    pages: torch.Tensor  # [num_tables * max_pages] flat page tables, padded with the null page
    num_tables: int
    """The number of page tables: one for each query, or 1 if all queries are of one request."""
    visible: torch.Tensor  # [num_queries, 1, 1, max_pages * page_tokens] True where a key may be seen

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The rows of one prefill chunk: several known tokens of one request. Their attention is computed together."""

    start_row: int
    end_row: int
    pages: torch.Tensor  # [num_pages]
    num_keys: int
    visible: torch.Tensor  # [end_row - start_row, num_keys] causal mask


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """Masks of the keys that each query may see. Layers with the same sliding window share them."""

    decodes: tuple[torch.Tensor, ...]  # as DecodeRows.visible, in the order of BatchTensors.decodes
    chunks: tuple[torch.Tensor, ...]  # as ChunkRows.visible, in the order of BatchTensors.chunks


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """The rows (tokens) [start_row, end_row) of a step, which all use the same adapter or the same mixture of adapters.

    A step samples the next token for some rows only (the sampled rows). In the list of the sampled rows, [first_sample,
    last_sample) are those that use this adapter or mixture.
    """

    adapters: tuple[AdapterUse, ...]
    start_row: int
    end_row: int
    first_sample: int
    last_sample: int
    decoding: tuple[int, ...]
    """The numbers of the decoding rows in this range, ascending. The other rows of the range belong to chunks."""


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """The input tensors of one forward pass. The weights and the cached KV are not among them."""

    slices: tuple[RequestSlice, ...]
    """The slices of the step, in the order of their rows."""
    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    row_pages: torch.Tensor  # [num_tokens] the page that each row's KV is written to
    row_offsets: torch.Tensor  # [num_tokens] the position in that page
    begun_pages: torch.Tensor  # pages whose first token is written in this step; zeroed before
    sampled_rows: torch.Tensor  # [num_sampled], padded with repeats to the smallest allowed number of rows
    num_sampled: int
    decodes: tuple[DecodeRows, ...]
    chunks: tuple[ChunkRows, ...]
    adapter_runs: tuple[AdapterRun, ...]

    def visible_keys(self, window: int | None) -> VisibleKeys:
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


@dataclass(frozen=True, slots=True)
class _Query:
    """One decoding row, and how many of its request's pages it attends to."""

    row: int
    start_row: int
    piece: RequestSlice
    num_pages: int

    @property
    def num_keys(self) -> int:
        return self.piece.start + self.row - self.start_row + 1


class BatchBuilder:
    """Turns the plan of a step into the input tensors of its forward pass, on one device."""

    def __init__(self, page_tokens: int, null_page: int, device: torch.device, rules: BatchInvariance) -> None:
        """`null_page` is a page of zeros that pads page tables. The page after it takes the KV of padding rows."""
        self._page_tokens = page_tokens
        self._null_page = null_page
        self._device = device
        self.rules = rules

    def build(self, plan: StepPlan) -> BatchTensors:
        slices = tuple(sorted(plan.slices, key=lambda piece: (piece.adapters, _num_known(piece) > 1)))
        starts: list[int] = []
        num_rows = 0
        for piece in slices:
            starts.append(num_rows)
            num_rows += len(piece.token_ids)
        placed = list(zip(starts, slices, strict=True))
        adapted = any(piece.adapters for piece in slices)
        padding = [0] * (padded_rows(num_rows, self.rules.min_rows, with_adapters=adapted) - num_rows)
        sampled = [row for start, piece in placed for row in _sampled_rows(start, piece)]
        repeated = sampled[-1:] * (padded_rows(len(sampled), self.rules.min_rows, with_adapters=adapted) - len(sampled))
        positions = self._tensor([position for piece in slices for position in range(piece.start, piece.end)] + padding)
        return BatchTensors(
            slices=slices,
            token_ids=self._tensor([token for piece in slices for token in piece.token_ids] + padding),
            positions=positions,
            row_pages=self._tensor(
                [page for piece in slices for page in self._row_pages(piece)] + [self._null_page + 1] * len(padding)
            ),
            row_offsets=positions % self._page_tokens,
            begun_pages=self._tensor([page for piece in slices for page in self._begun_pages(piece)]),
            sampled_rows=self._tensor(sampled + repeated),
            num_sampled=len(sampled),
            decodes=tuple(self._decodes([query for start, piece in placed for query in self._queries(start, piece)])),
            chunks=tuple(self._chunk(start, piece) for start, piece in placed if _num_known(piece) > 1),
            adapter_runs=_adapter_runs(placed),
        )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _row_pages(self, piece: RequestSlice) -> list[int]:
        return [piece.pages[position // self._page_tokens] for position in range(piece.start, piece.end)]

    def _begun_pages(self, piece: RequestSlice) -> list[int]:
        first = -(-piece.start // self._page_tokens)
        last = -(-piece.end // self._page_tokens)
        return [piece.pages[index] for index in range(first, last)]

    def _queries(self, start_row: int, piece: RequestSlice) -> Iterator[_Query]:
        for row in _decoding_rows(start_row, piece):
            yield _Query(row, start_row, piece, pages_for(piece.start + row - start_row + 1, self._page_tokens))

    def _decodes(self, queries: list[_Query]) -> Iterator[DecodeRows]:
        """Groups queries whose page tables are padded to the same length."""
        if self.rules.allows_any_shape:
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
        is_one_request = all(query.piece is queries[0].piece for query in queries)
        tables = [query.piece.pages[: query.num_pages] for query in (queries[-1:] if is_one_request else queries)]
        padded = [[*pages, *[self._null_page] * (max_pages - len(pages))] for pages in tables]
        keys = torch.arange(max_pages * self._page_tokens, device=self._device)
        num_keys = self._tensor([query.num_keys for query in queries])
        return DecodeRows(
            rows=self._tensor([query.row for query in queries]),
            pages=self._tensor([page for pages in padded for page in pages]),
            num_tables=len(tables),
            visible=(keys < num_keys[:, None])[:, None, None, :],
        )

    def _chunk(self, start_row: int, piece: RequestSlice) -> ChunkRows:
        queries = torch.arange(piece.start, piece.known_end, device=self._device)
        keys = torch.arange(piece.known_end, device=self._device)
        return ChunkRows(
            start_row=start_row,
            end_row=start_row + _num_known(piece),
            pages=self._tensor(list(piece.pages[: pages_for(piece.known_end, self._page_tokens)])),
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
    for _, run in groupby(queries, lambda query: query.start_row):
        own = list(run)
        if (len(own) - 1) * own[-1].num_pages >= _PAGES_WORTH_A_CALL:
            alone.append(own)
        else:
            together += own
    return [*alone, together] if together else alone


def _num_known(piece: RequestSlice) -> int:
    return len(piece.token_ids) - piece.num_drafts


def _decoding_rows(start_row: int, piece: RequestSlice) -> range:
    """Returns the decoding rows of a slice: its draft tokens, and its known token if it has only one."""
    num_known = _num_known(piece)
    return range(start_row + (0 if num_known == 1 else num_known), start_row + len(piece.token_ids))


def _sampled_rows(start_row: int, piece: RequestSlice) -> range:
    end_row = start_row + len(piece.token_ids)
    return range(end_row - len(piece.samples), end_row)


def _last_keys(visible: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    """Returns `visible` without the keys at or before position - window."""
    keys = torch.arange(visible.shape[-1], device=visible.device)
    return visible & (keys > positions - window)


def _adapter_runs(placed: list[tuple[int, RequestSlice]]) -> tuple[AdapterRun, ...]:
    runs: list[AdapterRun] = []
    num_sampled = 0
    for start, piece in placed:
        first_sample, end = num_sampled, start + len(piece.token_ids)
        num_sampled += len(piece.samples)
        if not piece.adapters:
            continue
        decoding = tuple(_decoding_rows(start, piece))
        if runs and runs[-1].adapters == piece.adapters:
            decoding = runs[-1].decoding + decoding
            runs[-1] = replace(runs[-1], end_row=end, last_sample=num_sampled, decoding=decoding)
        else:
            runs.append(AdapterRun(piece.adapters, start, end, first_sample, num_sampled, decoding))
    return tuple(runs)
