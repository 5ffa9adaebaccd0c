"""A StepPlan as tensors: made once a step, read by every layer.

Rows are ordered by adapter, so that each adapter's rows are one run. Attention sees two kinds of sequences:
those with one row (decoding), which are computed together over a padded page table, and those with a chunk.
"""

from dataclasses import dataclass

import torch

from graftwork.engine.batch import SequenceSlice, StepPlan


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences with one row each."""

    rows: torch.Tensor  # [num_sequences] row of each in the batch
    pages: torch.Tensor  # [num_sequences * max_pages] flat page table, padded with the null page
    visible: torch.Tensor  # [num_sequences, 1, 1, max_pages * page_tokens] True where a key may be seen

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """One sequence with several rows."""

    start_row: int
    end_row: int
    pages: torch.Tensor  # [num_pages]
    num_keys: int
    visible: torch.Tensor  # [end_row - start_row, num_keys] causal mask


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """Rows [start_row, end_row) use one adapter."""

    digest: str
    start_row: int
    end_row: int


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """Everything that the forward pass needs besides weights and KV."""

    slices: tuple[SequenceSlice, ...]
    """In the order of their rows."""
    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    slots: torch.Tensor  # [num_tokens] page * page_tokens + offset: where each row's KV is written
    begun_pages: torch.Tensor  # pages whose first token is written in this step; scrubbed before
    sampled_rows: torch.Tensor  # [num_sampled]
    decode: DecodeRows | None
    chunks: tuple[ChunkRows, ...]
    adapter_runs: tuple[AdapterRun, ...]


class BatchBuilder:
    """Turns plans into tensors on one device."""

    def __init__(self, page_tokens: int, null_page: int, device: torch.device) -> None:
        """`null_page` is a page of zeros that pads page tables."""
        self._page_tokens = page_tokens
        self._null_page = null_page
        self._device = device

    def build(self, plan: StepPlan) -> BatchTensors:
        slices = tuple(sorted(plan.slices, key=lambda piece: piece.adapter_digest or ""))
        starts: list[int] = []
        num_rows = 0
        for piece in slices:
            starts.append(num_rows)
            num_rows += len(piece.token_ids)
        placed = list(zip(starts, slices, strict=True))
        return BatchTensors(
            slices=slices,
            token_ids=self._tensor([token for piece in slices for token in piece.token_ids]),
            positions=self._tensor([position for piece in slices for position in range(piece.start, piece.end)]),
            slots=self._tensor([slot for piece in slices for slot in self._slots(piece)]),
            begun_pages=self._tensor([page for piece in slices for page in self._begun_pages(piece)]),
            sampled_rows=self._tensor([start + len(piece.token_ids) - 1 for start, piece in placed if piece.sample]),
            decode=self._decode([(start, piece) for start, piece in placed if len(piece.token_ids) == 1]),
            chunks=tuple(self._chunk(start, piece) for start, piece in placed if len(piece.token_ids) > 1),
            adapter_runs=_adapter_runs(placed),
        )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _slots(self, piece: SequenceSlice) -> list[int]:
        size = self._page_tokens
        return [piece.pages[position // size] * size + position % size for position in range(piece.start, piece.end)]

    def _begun_pages(self, piece: SequenceSlice) -> list[int]:
        first = -(-piece.start // self._page_tokens)
        last = -(-piece.end // self._page_tokens)
        return [piece.pages[index] for index in range(first, last)]

    def _decode(self, placed: list[tuple[int, SequenceSlice]]) -> DecodeRows | None:
        if not placed:
            return None
        max_pages = max(len(piece.pages) for _, piece in placed)
        padded = [[*piece.pages, *[self._null_page] * (max_pages - len(piece.pages))] for _, piece in placed]
        keys = torch.arange(max_pages * self._page_tokens, device=self._device)
        num_keys = self._tensor([piece.end for _, piece in placed])
        return DecodeRows(
            rows=self._tensor([start for start, _ in placed]),
            pages=self._tensor([page for pages in padded for page in pages]),
            visible=(keys < num_keys[:, None])[:, None, None, :],
        )

    def _chunk(self, start_row: int, piece: SequenceSlice) -> ChunkRows:
        queries = torch.arange(piece.start, piece.end, device=self._device)
        keys = torch.arange(piece.end, device=self._device)
        return ChunkRows(
            start_row=start_row,
            end_row=start_row + len(piece.token_ids),
            pages=self._tensor(list(piece.pages)),
            num_keys=piece.end,
            visible=keys <= queries[:, None],
        )


def _adapter_runs(placed: list[tuple[int, SequenceSlice]]) -> tuple[AdapterRun, ...]:
    runs: list[AdapterRun] = []
    for start, piece in placed:
        if piece.adapter_digest is None:
            continue
        end = start + len(piece.token_ids)
        if runs and runs[-1].digest == piece.adapter_digest:
            runs[-1] = AdapterRun(piece.adapter_digest, runs[-1].start_row, end)
        else:
            runs.append(AdapterRun(piece.adapter_digest, start, end))
    return tuple(runs)
