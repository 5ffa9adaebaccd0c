"""What a drafter hands over: tokens that a sequence may go on with, and how well they are founded.

A draft is a guess and never output: the step that computes it samples the true token after every row, and what does
not equal the draft is dropped. So nothing here can change what a request answers, only how soon.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class DraftSource(StrEnum):
    """Where a guess comes from."""

    GRAMMAR = "grammar"
    """Spelled out by the constraint that the answer must keep."""
    PREDICTION = "prediction"
    """What the client expects the answer to be."""
    SESSION = "session"
    """What stood before in this prompt and answer."""
    CACHE = "cache"
    """Earlier answers of the same isolation domain under the same adapters."""


@dataclass(frozen=True, slots=True)
class DraftSpan:
    """Tokens in a row from one source."""

    source: DraftSource
    match_length: int
    """How many tokens before the first of them agree with where they were found."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """Spans that follow one another."""

    spans: tuple[DraftSpan, ...] = ()

    def __len__(self) -> int:
        return sum(len(span.token_ids) for span in self.spans)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for span in self.spans for token in span.token_ids)

    def first(self, num_tokens: int) -> "Draft":
        """The draft cut to its first tokens."""
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
    """One source of guesses for one sequence; reads the sequence's tokens, and changes nothing but its own memory."""

    def observe(self) -> None:
        """Take in the tokens that were added to the sequence since the last time."""
        ...

    def propose(self, drafted: tuple[int, ...], max_tokens: int) -> DraftSpan | None:
        """Guess what follows the sequence and `drafted`, in 1 to `max_tokens` tokens; None where nothing is known."""
        ...


class DraftConstraint(Protocol):
    """What a sequence may say at all, as far as drafts are concerned. Asking changes nothing."""

    def forced_token_ids(self, max_tokens: int) -> tuple[int, ...]:
        """What must come next, as far as it is settled, in its most compact spelling."""
        ...

    def allowed_length(self, token_ids: tuple[int, ...]) -> int:
        """How many of these tokens may stand next, in this order; a guess beyond them is sure to fail."""
        ...
