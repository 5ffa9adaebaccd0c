"""Defines what attention is to the rest of the engine: a backend plans a step once, and then every layer attends.

Attention only reads the pages of the KV cache. The keys and values of a step's own tokens must have been written to
their pages before a layer attends. Each backend owns the tensors that it derives from a step: masks, page tables, or
tiles. A row is one token of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from graftwork.engine.core.step import RequestSlice


@dataclass(frozen=True, slots=True)
class PlacedSlice:
    """The slice (part) of one request in a step, and where its rows are in the batch."""

    start_row: int
    piece: RequestSlice

    @property
    def chunk_rows(self) -> range:
        """The rows of the prefill chunk: several known tokens. Empty if there is only one known token."""
        num_known = self.piece.num_known
        return range(self.start_row, self.start_row + (num_known if num_known > 1 else 0))

    @property
    def decoding_rows(self) -> range:
        """The rows that are computed as decoding rows: the draft tokens, and the known token if there is only one."""
        num_known = self.piece.num_known
        return range(self.start_row + (num_known if num_known > 1 else 0), self.start_row + self.piece.num_tokens)

    def num_keys(self, row: int) -> int:
        """Returns the number of keys up to a row's own position, its own key included."""
        return self.piece.start + row - self.start_row + 1


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What attention must know of a step."""

    placed: tuple[PlacedSlice, ...]
    """The slices of the step, in the order of their rows."""
    positions: torch.Tensor  # [num_rows] int64 on the device, padding rows included

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def prompt_rows(self) -> list[range]:
        """The rows of all prefill chunks, ascending."""
        return [rows for one in self.placed if (rows := one.chunk_rows)]


class StepAttention(Protocol):
    """Computes the attention of one step, layer by layer."""

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Computes attention for all queries of a step, over KV that is in the pages of `layer`.

        query: [num_rows, heads, head_dim]. Returns [num_rows, heads * head_dim] in the dtype of `query`. The result of
        a padding row is finite and means nothing.
        """
        ...


class AttentionBackend(Protocol):
    """Computes attention over the pages of one KV cache."""

    @property
    def serves_rolling(self) -> bool:
        """Whether it computes rows with a rolling window too. If not, a hook must."""
        ...

    def plan(self, batch: AttentionBatch) -> StepAttention:
        """Prepares a step. The result is valid until the next step is planned."""
        ...


class AttentionHook(Protocol):
    """Adds something to the attention of some steps."""

    def around(self, attention: StepAttention, placed: Sequence[PlacedSlice]) -> StepAttention:
        """Returns the attention of a step with what the hook adds; `attention` itself if that is nothing."""
        ...
