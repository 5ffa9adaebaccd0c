"""Arranges the rows of a routed layer by expert, so that each expert computes adjacent rows.

A row is one token at one of its experts. Rows of one expert form a run. A run may end with padding rows, which repeat a
token and whose results nobody reads:

    chosen   token 0: experts 2, 0      token 1: experts 2, 1
    rows     expert 0 | 0 . . .         expert 1 | 1 . . .         expert 2 | 0 1 . .         (by token; . is padding)

Never computes a product. Invariant: the rows of one expert are in the order of their tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExpertRun:
    """The rows [start, end) of one expert, padding rows included."""

    expert: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class HostRows:
    """The rows without padding, on the host, in their order."""

    rows: Numbers  # [num_tokens * num_chosen] the number of each row
    tokens: Numbers  # [num_tokens * num_chosen] its token
    experts: Numbers  # [num_tokens * num_chosen] its expert


@dataclass(frozen=True, slots=True)
class Routes:
    """Which rows one routed layer computes in one step."""

    runs: tuple[ExpertRun, ...]
    tokens: torch.Tensor  # [num_rows] int64 on the device, the token of each row, padding rows included
    places: torch.Tensor  # [num_tokens, num_chosen] int64 on the device, the row of each choice
    weights: torch.Tensor  # [num_tokens, num_chosen] fp32 on the device
    host: HostRows
    host_tokens: Numbers  # [num_rows] `tokens` on the host

    @classmethod
    def of(cls, chosen: torch.Tensor, weights: torch.Tensor, padded: Callable[[int], int]) -> "Routes":
        """Arranges the choices of a step's tokens. Waits for the device, because the host must know the runs.

        chosen: [num_tokens, num_chosen]; `weights` likewise. `padded` returns the length of a run of so many rows.
        """
        flat = chosen.cpu().numpy().ravel()
        order = np.argsort(flat, kind="stable")
        experts = flat[order]
        counts = np.bincount(flat)
        found = np.flatnonzero(counts)
        lengths = np.zeros(len(counts), np.int64)
        lengths[found] = [padded(count) for count in counts[found].tolist()]
        starts = np.cumsum(lengths) - lengths
        firsts = np.cumsum(counts) - counts
        rows = starts[experts] + np.arange(len(flat)) - firsts[experts]
        places, tokens = np.empty(len(flat), np.int64), np.zeros(int(lengths.sum()), np.int64)
        places[order] = rows
        tokens[rows] = order // chosen.shape[1]
        runs = tuple(
            ExpertRun(int(expert), int(starts[expert]), int(starts[expert] + lengths[expert])) for expert in found
        )
        device = chosen.device
        return cls(
            runs,
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(places).view(chosen.shape).to(device),
            weights,
            HostRows(rows, tokens[rows], experts),
            tokens,
        )

    def combined(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns each token's weighted sum of its experts' outputs: [num_tokens, hidden] in the dtype of `outputs`.

        outputs: [num_rows, hidden]. Sums in fp32, from the first choice to the last, and rounds once.
        """
        return combined(outputs, self.places, self.weights)


def combined(outputs: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns each token's weighted sum of rows: [num_tokens, hidden]. See Routes.combined.

    outputs: [num_rows, hidden], places and weights: [num_tokens, num_chosen].
    """
    total = outputs.new_zeros(len(places), outputs.shape[1], dtype=torch.float32)
    for choice in range(places.shape[1]):
        part = outputs.index_select(0, places[:, choice]).float()
        total += part * weights[:, choice, None]
    return total.to(outputs.dtype)
