"""Defines a draft: guessed next tokens of a request, and their source.

A draft is never output by itself. The step that verifies it samples the true token at each position and drops the
draft from the first difference on. So a draft cannot change an answer, only make it faster.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class DraftSource(StrEnum):
    """The source of a draft token."""

    GRAMMAR = "grammar"
    """The only tokens that the request's grammar allows."""
    PREDICTION = "prediction"
    """The answer that the client predicted."""
    SESSION = "session"
    """Earlier tokens of the same prompt and answer."""
    CACHE = "cache"
    """Earlier answers of the same domain under the same adapters."""


@dataclass(frozen=True, slots=True)
class DraftSpan:
    """Consecutive draft tokens from one source."""

    source: DraftSource
    match_length: int
    """The number of tokens right before the span that also occur right before the place where the span was found."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed next tokens of a request, as consecutive spans."""

    spans: tuple[DraftSpan, ...] = ()

    def __len__(self) -> int:
        return sum(len(span.token_ids) for span in self.spans)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for span in self.spans for token in span.token_ids)

    def first(self, num_tokens: int) -> "Draft":
        """Returns the first `num_tokens` of the draft."""
        if num_tokens >= len(self):
            return self
        spans: list[DraftSpan] = []
        for span in self.spans:
            kept = span.token_ids[:num_tokens]
            if kept:
                spans.append(DraftSpan(span.source, span.match_length, kept))
            num_tokens -= len(kept)
        return Draft(tuple(spans))


class Drafter(Protocol):
    """One source of draft tokens for one request. Reads the request's tokens and changes only its own state."""

    def observe(self) -> None:
        """Processes the tokens that the request has gained since the last call."""
        ...

    def propose(self, drafted: tuple[int, ...], max_tokens: int) -> DraftSpan | None:
        """Drafts 1 to `max_tokens` tokens after the request's tokens and `drafted`. Returns None if it finds none."""
        ...


class DraftConstraint(Protocol):
    """Tells which draft tokens the grammar of a request allows. The methods change nothing."""

    def forced_token_ids(self, max_tokens: int) -> tuple[int, ...]:
        """Returns the next tokens as long as the grammar allows only one text.

        Spells that text with the longest tokens that fit.
        """
        ...

    def allowed_length(self, token_ids: tuple[int, ...]) -> int:
        """Returns how many of these tokens the grammar allows next, in this order."""
        ...
