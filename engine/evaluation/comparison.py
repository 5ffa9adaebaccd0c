"""Compares what two models expect after each token of some texts.

    perplexity       exp of the mean of -log p(token), for each model
    KL divergence    sum over tokens of p (log p - log q), p of the parent and q of the candidate, in nats a token
    agreement        the part of the positions at which both have the same likeliest token

The log-probabilities of the parent wait in a file, because two large models may not fit in the memory together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

Take = Callable[[int, torch.Tensor], None]
"""Takes the number of a row, counted over all texts from 0, and the log-probabilities from this row on: [rows, vocab] in
fp32 on the CPU. A row has those of the token after a token of the text.
"""


@dataclass(frozen=True, slots=True)
class TextFigures:
    """How well one model predicts the texts."""

    num_tokens: int
    """The tokens that were predicted."""
    perplexity: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a model is from its parent."""

    mean_kl: float
    """Nats a token."""
    worst_kl: float
    """The KL divergence that 99 of 100 positions do not exceed."""
    agreement: float
    """From 0 to 1."""


class ParentRows:
    """The log-probabilities of the parent for all rows, in a file of 4 bytes a row and token of the vocabulary."""

    def __init__(self, path: Path, num_rows: int, vocab_size: int) -> None:
        self._rows = np.memmap(path, np.float32, "w+", shape=(num_rows, vocab_size))

    def put(self, first: int, rows: torch.Tensor) -> None:
        """Keeps rows, from the row `first` on."""
        self._rows[first : first + len(rows)] = rows.numpy()

    def get(self, first: int, count: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self._rows[first : first + count]))


class LikelihoodMeter:
    """Adds up how well one model predicts the texts."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._following = torch.tensor([token_id for text in texts for token_id in text[1:]])
        self._sum = 0.0
        self._num_taken = 0

    @property
    def num_rows(self) -> int:
        return len(self._following)

    def take(self, first: int, rows: torch.Tensor) -> None:
        """Adds rows, from the row `first` on: [rows, vocab] log-probabilities."""
        own = rows.gather(1, self._following[first : first + len(rows), None])
        self._num_taken += len(rows)
        self._sum -= float(own.double().sum())

    def figures(self) -> TextFigures:
        """Returns the figures of the rows that were taken. The perplexity of a broken model may be infinite or no number."""
        mean = self._sum / self._num_taken
        return TextFigures(self._num_taken, math.exp(mean) if mean < 700 else math.inf)


class RowsFrom:
    """Passes on only the rows of each text from some position on."""

    def __init__(self, texts: Sequence[Sequence[int]], starts: Sequence[int], take: Take) -> None:
        """`starts` has the first position that counts of each text."""
        bases = list(accumulate((len(text) - 1 for text in texts), initial=0))
        self._counts = torch.zeros(bases[-1], dtype=torch.bool)
        for base, end, start in zip(bases, bases[1:], starts, strict=False):
            self._counts[base + start : end] = True
        self._take = take

    def take(self, first: int, rows: torch.Tensor) -> None:
        """Takes rows, from the row `first` on: [rows, vocab] log-probabilities."""
        for run in torch.nonzero(self._counts[first : first + len(rows)])[:, 0].tolist():
            self._take(first + run, rows[run : run + 1])


class DivergenceMeter:
    """Compares the rows of a model with those of its parent."""

    def __init__(self, parent: ParentRows) -> None:
        self._parent = parent
        self._kls: list[torch.Tensor] = []
        self._same: list[torch.Tensor] = []

    def take(self, first: int, rows: torch.Tensor) -> None:
        """Compares rows, from the row `first` on: [rows, vocab] log-probabilities."""
        parent = self._parent.get(first, len(rows)).double()
        terms = parent.exp() * (parent - rows.double())
        self._kls.append(terms.masked_fill(parent == -math.inf, 0.0).sum(dim=1))
        self._same.append(parent.argmax(dim=1) == rows.argmax(dim=1))

    def figures(self) -> Divergence:
        """Returns the figures of all rows."""
        kls = torch.cat(self._kls)
        return Divergence(
            mean_kl=float(kls.mean()),
            worst_kl=float(kls.quantile(0.99)),
            agreement=float(torch.cat(self._same).double().mean()),
        )
