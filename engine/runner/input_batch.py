"""Builds the input tensors of one step from its StepPlan. The tensors are built once, and every layer reads them.

A row is one token of the step. A decoding row is the last known token of a request, or a draft token. A chunk is
several rows of one prompt (see PlacedSlice). Rows are sorted by adapter. The rows of one adapter begin with its
decoding rows, and its chunks follow.

Invariant: the bits of a row depend on its own request alone. So small batches are padded with unused rows (see
BatchInvariance), and a draft token is computed as a decoding row, as if the draft tokens before it had been generated
one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch

from graftwork.engine.attention.backend import AttentionBatch, PlacedSlice
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.step import RequestSlice, StepPlan
from graftwork.engine.lora.torch_backend import padded_rows
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.layers import usual_rows


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
class BatchRows:
    """The rows of one step on the host: the numbers from which the tensors of its forward pass are made."""

    slices: tuple[RequestSlice, ...]
    """The slices of the step, in the order of their rows."""
    placed: tuple[PlacedSlice, ...]
    token_ids: list[int]
    """The token of each row; 0 where a row awaits its token, and in padding."""
    positions: list[int]
    row_pages: list[int]
    row_offsets: list[int]
    begun_pages: list[int]
    """The pages whose first token is written in this step."""
    window_row_pages: tuple[list[int], ...]
    """As `row_pages`, for each layer group after the first."""
    window_begun_pages: tuple[list[int], ...]
    """As `begun_pages`, for each layer group after the first."""
    sampled_rows: list[int]
    """Padded with repeats to the smallest allowed number of rows."""
    num_sampled: int
    adapter_runs: tuple[AdapterRun, ...]

    @property
    def has_rolling(self) -> bool:
        """Whether a request of the step has a rolling window."""
        return any(piece.rolling_window is not None for piece in self.slices)

    @property
    def is_mixed(self) -> bool:
        """Whether the step has more than decoding rows that are all sampled: rows of prompts."""
        return any(piece.num_known != 1 or len(piece.samples) != piece.num_tokens for piece in self.slices)

    @property
    def num_live(self) -> int:
        """The number of rows that are tokens of requests. The others are padding."""
        return sum(piece.num_tokens for piece in self.slices)

    @property
    def num_decoding(self) -> int:
        """The number of rows that attention computes as decoding rows."""
        return sum(len(one.decoding_rows) for one in self.placed)


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """The input tensors of one forward pass. The weights and the cached KV are not among them."""

    slices: tuple[RequestSlice, ...]
    """The slices of the step, in the order of their rows."""
    token_ids: torch.Tensor  # [num_tokens] 0 where a row awaits its token, which the runner fills in
    positions: torch.Tensor  # [num_tokens]
    row_pages: torch.Tensor  # [num_tokens] the page that each row's KV is written to
    row_offsets: torch.Tensor  # [num_tokens] the position in that page
    begun_pages: torch.Tensor  # pages whose first token is written in this step; zeroed before
    window_row_pages: tuple[torch.Tensor, ...]
    """As `row_pages`, for each layer group after the first."""
    window_begun_pages: tuple[torch.Tensor, ...]
    """As `begun_pages`, for each layer group after the first; none where kernels need none."""
    sampled_rows: torch.Tensor  # [num_sampled], padded with repeats to the smallest allowed number of rows
    num_sampled: int
    attention: AttentionBatch
    """What attention must know of the step."""
    adapter_runs: tuple[AdapterRun, ...]
    last_position: int = 0
    """The largest of the positions, or 0 if none can be behind the context."""

    @property
    def row_pages_by_group(self) -> tuple[torch.Tensor, ...]:
        return (self.row_pages, *self.window_row_pages)

    @property
    def begun_pages_by_group(self) -> tuple[torch.Tensor, ...]:
        return (self.begun_pages, *self.window_begun_pages)


class BatchBuilder:
    """Turns the plan of a step into the input tensors of its forward pass, on one device."""

    def __init__(
        self,
        page_tokens: int,
        null_page: int,
        device: torch.device,
        rules: BatchInvariance,
        *,
        usual_sizes: bool = False,
        num_groups: int = 1,
    ) -> None:
        """`null_page` is a page of zeros that pads page tables. The page after it takes the KV of padding rows.
        `num_groups` is the number of layer groups.

        With `usual_sizes`, steps are padded to one of few sizes: for weights in blocks (see usual_rows).
        """
        self._page_tokens = page_tokens
        self._null_page = null_page
        self.device = device
        self.rules = rules
        self._usual_sizes = usual_sizes
        self._windowed_groups = range(1, num_groups)

    def build(self, plan: StepPlan) -> BatchTensors:
        return self.tensors(self.arrange(plan))

    def tensors(self, rows: BatchRows) -> BatchTensors:
        """Copies the rows of a step to the device."""
        positions = self._tensor(rows.positions)
        return BatchTensors(
            slices=rows.slices,
            token_ids=self._tensor(rows.token_ids),
            positions=positions,
            row_pages=self._tensor(rows.row_pages),
            row_offsets=self._tensor(rows.row_offsets),
            begun_pages=self._tensor(rows.begun_pages),
            window_row_pages=tuple(map(self._tensor, rows.window_row_pages)),
            window_begun_pages=tuple(map(self._tensor, rows.window_begun_pages)),
            sampled_rows=self._tensor(rows.sampled_rows),
            num_sampled=rows.num_sampled,
            attention=AttentionBatch(rows.placed, positions),
            adapter_runs=rows.adapter_runs,
            last_position=max(rows.positions, default=0),
        )

    def arrange(self, plan: StepPlan) -> BatchRows:
        """Arranges the rows of a step, on the host."""
        slices = tuple(sorted(plan.slices, key=_row_order))
        *starts, num_tokens = accumulate((piece.num_tokens for piece in slices), initial=0)
        size = self._page_tokens
        placed = tuple(
            PlacedSlice(start, piece.in_places(size) if piece.is_compacted else piece)
            for start, piece in zip(starts, slices, strict=True)
        )
        adapted = any(piece.adapters for piece in slices)
        padding = [0] * (self._padded_rows(num_tokens, with_adapters=adapted) - num_tokens)
        sampled = [row for one in placed for row in _sampled_rows(one)]
        repeated = sampled[-1:] * (self._padded_rows(len(sampled), with_adapters=adapted) - len(sampled))
        positions = [position for piece in slices for position in range(piece.start, piece.end)] + padding
        scrap = [self._null_page + 1] * len(padding)
        return BatchRows(
            slices=slices,
            placed=placed,
            token_ids=[token for piece in slices for token in _row_tokens(piece)] + padding,
            positions=positions,
            row_pages=self._row_pages(slices, 0) + scrap,
            row_offsets=[position % self._page_tokens for position in positions],
            begun_pages=self._begun_pages(slices, 0),
            window_row_pages=tuple(self._row_pages(slices, group) + scrap for group in self._windowed_groups),
            window_begun_pages=tuple(self._begun_pages(slices, group) for group in self._windowed_groups),
            sampled_rows=sampled + repeated,
            num_sampled=len(sampled),
            adapter_runs=_adapter_runs(placed),
        )

    def padded(self, rows: BatchRows, num_rows: int) -> BatchRows:
        """Returns a step with more unused rows: `num_rows` in all. Their KV goes to the page after the null page."""
        more = [0] * (num_rows - len(rows.token_ids))
        scrap = [self._null_page + 1] * len(more)
        return replace(
            rows,
            token_ids=rows.token_ids + more,
            positions=rows.positions + more,
            row_pages=rows.row_pages + scrap,
            window_row_pages=tuple(pages + scrap for pages in rows.window_row_pages),
            row_offsets=rows.row_offsets + more,
        )

    def _padded_rows(self, num_rows: int, *, with_adapters: bool) -> int:
        rows = padded_rows(num_rows, self.rules, with_adapters=with_adapters)
        return usual_rows(rows) if self._usual_sizes else rows

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _row_pages(self, slices: Sequence[RequestSlice], group: int) -> list[int]:
        """Returns the page of each row in a layer group."""
        found: list[int] = []
        for piece in slices:
            first, pages = piece.table(group) if group else (piece.num_given_up, piece.pages)
            shift = first * self._page_tokens
            found += [pages[row // self._page_tokens] for row in range(piece.start - shift, piece.end - shift)]
        return found

    def _begun_pages(self, slices: Sequence[RequestSlice], group: int) -> list[int]:
        """Returns the pages of a layer group whose first token is written in a step."""
        found: list[int] = []
        for piece in slices:
            first, pages = piece.table(group) if group else (piece.num_given_up, piece.pages)
            found += pages[-(-piece.start // self._page_tokens) - first : -(-piece.end // self._page_tokens) - first]
        return found


def _row_order(piece: RequestSlice) -> tuple[list[tuple[str, float]], bool]:
    """Returns a sort key: by adapters as they compare, in plain values, which the interpreter compares by itself."""
    return [(use.digest, use.weight) for use in piece.adapters], piece.num_known > 1


def _row_tokens(piece: RequestSlice) -> tuple[int, ...]:
    """Returns the token of each row of a slice; 0 for a row that awaits its token."""
    return (0,) if piece.awaits_token else piece.token_ids


def _sampled_rows(one: PlacedSlice) -> range:
    end_row = one.start_row + one.piece.num_tokens
    return range(end_row - len(one.piece.samples), end_row)


def _adapter_runs(placed: Sequence[PlacedSlice]) -> tuple[AdapterRun, ...]:
    runs: list[AdapterRun] = []
    num_sampled = 0
    for adapters, group in groupby(placed, lambda one: one.piece.adapters):
        own = list(group)
        first_sample, end_row = num_sampled, own[-1].start_row + own[-1].piece.num_tokens
        num_sampled += sum(len(one.piece.samples) for one in own)
        if adapters:
            decoding = tuple(row for one in own for row in one.decoding_rows)
            runs.append(AdapterRun(adapters, own[0].start_row, end_row, first_sample, num_sampled, decoding))
    return tuple(runs)
