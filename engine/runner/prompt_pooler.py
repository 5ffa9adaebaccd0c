"""Adds up the hidden states of prompts for their embeddings.

A step gives the hidden states of a prompt's tokens. They pass the model's last norm, as they do before the output head, so
they are transformers' `last_hidden_state`. Keeps nothing between steps: the sum so far comes with the plan.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from graftwork.engine.core.pooling import Float64, PoolSpec
from graftwork.engine.core.step import RequestSlice
from graftwork.engine.runner.decoder import Decoder
from graftwork.platform.ids import RequestId

_ROWS_AT_ONCE = 64
"""The most hidden states that are in memory as float64 together."""


class PromptPooler:
    """Turns the hidden states of a step into sums of hidden states."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def pool(self, slices: Sequence[RequestSlice], hidden: torch.Tensor) -> dict[RequestId, Float64]:
        """Returns the sums that the slices of a step ask for, by request: [hidden] each.

        `hidden` has the rows of the slices, in their order: [num_tokens, hidden].
        """
        starts = accumulate((piece.num_tokens for piece in slices), initial=0)
        return {
            piece.request_id: self._sum(piece.pool, hidden[start + piece.pool.start - piece.start :])
            for piece, start in zip(slices, starts, strict=False)
            if piece.pool is not None
        }

    def _sum(self, spec: PoolSpec, hidden: torch.Tensor) -> Float64:
        """Adds rows to the sum of `spec`, one after another. The first row of `hidden` is at the position `spec.start`."""
        total = np.zeros(hidden.shape[1]) if spec.total is None else spec.total
        for first in range(0, spec.end - spec.start, _ROWS_AT_ONCE):
            rows = hidden[first : min(first + _ROWS_AT_ONCE, spec.end - spec.start)]
            normed = self._decoder.rows.norm(rows, self._decoder.weights.norm).float().cpu().numpy()
            for row in normed.astype(np.float64):
                total = total + row
        return total
