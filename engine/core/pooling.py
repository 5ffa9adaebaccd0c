"""Says which hidden states of a prompt become its embedding, and adds them up over the steps that compute the prompt.

    PromptPool.spec ──► PoolSpec in a step's plan ──► sum of the hidden states ──► PromptPool.take ──► values

Owns the sum. Never imports torch.
Invariant: hidden states are added in float64, one after another from the first token on, however the prompt is divided
between steps.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


class Pooling(StrEnum):
    """Which hidden states of a prompt become its embedding, behind the model's last norm."""

    LAST = "last"
    """That of the last token, which has seen all tokens. Its prompt may come from the cache."""
    MEAN = "mean"
    """The mean over all tokens. All of them must be computed, so nothing comes from the cache."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The hidden states that a step adds to the sum of a prompt: those of the tokens at [start, end)."""

    start: int
    end: int
    total: Float64 | None
    """[hidden], the sum of the hidden states before `start` that count; None if none does."""


class PromptPool:
    """The embedding of one prompt, as far as steps have computed it."""

    def __init__(self, pooling: Pooling, num_prompt: int) -> None:
        """`num_prompt` is the number of tokens of the prompt."""
        self._first = num_prompt - 1 if pooling is Pooling.LAST else 0
        self._num_prompt = num_prompt
        self._next = self._first
        self._total: Float64 | None = None

    @property
    def num_reusable(self) -> int:
        """The number of tokens whose KV may come from the cache: those before the first hidden state that is missing."""
        return min(self._next, self._num_prompt - 1)

    @property
    def is_complete(self) -> bool:
        return self._next == self._num_prompt

    def spec(self, end: int) -> PoolSpec | None:
        """Returns what a step adds that computes the tokens up to position `end`; None if it adds nothing."""
        return PoolSpec(self._next, end, self._total) if self._next < end <= self._num_prompt else None

    def take(self, total: Float64, end: int) -> None:
        """Takes the sum that a step has returned for the tokens up to position `end`.

        total: [hidden].
        """
        self._total, self._next = total, end

    def values(self) -> bytes:
        """Returns the embedding, when it is complete: [hidden] in float32, little-endian."""
        assert self._total is not None, "hidden states of the prompt are missing"
        return (self._total / (self._num_prompt - self._first)).astype("<f4").tobytes()
