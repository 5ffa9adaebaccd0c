"""Defines a draft: guessed next tokens of a request, and their source.

A draft is never output by itself. The step that verifies it samples the true token at each position and drops the
draft from the first difference on. So a draft cannot change an answer, only make it faster.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class DraftSource(StrEnum):
    """Where a draft token comes from."""

    GRAMMAR = "grammar"
    """The request's grammar, at a position where it allows only one text."""
    PREDICTION = "prediction"
    """The client's prediction of the answer."""
    SESSION = "session"
    """Earlier tokens of the request's own prompt and answer."""
    CACHE = "cache"
    """Earlier answers to requests of the same domain (usually one tenant) with the same adapters."""
    MODEL = "model"
    """A draft model: a small model with the vocabulary of the served one, or a head that reads its hidden states."""


@dataclass(frozen=True, slots=True)
class DraftSpan:
    """Consecutive draft tokens (guessed next tokens of a request) from one source."""

    source: DraftSource
    evidence: int
    """How sure the source is. For text that was found: the number of tokens right before the span that also occur right
    before the place where it was found. For a draft model: the odds of the token by its own probability p, p / (1 - p).
    """
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """The guessed next tokens of a request. Each span of tokens comes from one source."""

    spans: tuple[DraftSpan, ...] = ()

    def __len__(self) -> int:
        return sum(len(span.token_ids) for span in self.spans)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for span in self.spans for token in span.token_ids)

    def first(self, num_tokens: int) -> "Draft":
        """Returns a draft of only the first `num_tokens` tokens."""
        if num_tokens >= len(self):
            return self
        spans: list[DraftSpan] = []
        for span in self.spans:
            kept = span.token_ids[:num_tokens]
            if kept:
                spans.append(DraftSpan(span.source, span.evidence, kept))
            num_tokens -= len(kept)
        return Draft(tuple(spans))


class Drafter(Protocol):
    """Guesses the next tokens of one request from one source. Reads the request's tokens, and changes only its own
    state.
    """

    def observe(self) -> None:
        """Reads the tokens that were added to the request since the last call."""
        ...

    def propose(self, drafted: tuple[int, ...], max_tokens: int) -> DraftSpan | None:
        """Guesses up to `max_tokens` tokens that follow the request's tokens and the draft tokens `drafted`.

        Returns None if this drafter has no guess.
        """
        ...


class DraftConstraint(Protocol):
    """Tells which draft tokens the grammar of a request allows. The methods change nothing."""

    def forced_token_ids(self, max_tokens: int) -> tuple[int, ...]:
        """Returns up to `max_tokens` next tokens that the grammar forces: no other text is allowed.

        If several token sequences give this text, returns the one with the longest tokens. Returns no token if nothing
        is forced.
        """
        ...

    def allowed_length(self, token_ids: tuple[int, ...]) -> int:
        """Returns how many of `token_ids`, from the first on, the grammar allows as the next tokens of the answer."""
        ...
