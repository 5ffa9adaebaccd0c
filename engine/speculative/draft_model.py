"""Defines a draft model: a small model with the vocabulary of the served one, which guesses the next tokens of requests.
A head that reads the served model's hidden states is one too.

Never decides when it guesses: ModelDrafter does. Its guesses are drafts like others, so they change no answer.
Source: speculative decoding (Leviathan et al. 2023; Chen et al. 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.ids import RequestId


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The text of a request after which a draft model guesses, and how the request samples."""

    request_id: RequestId
    token_ids: Sequence[int]
    """The tokens of the request's prompt and answer so far."""
    drafted: tuple[int, ...]
    """Draft tokens right behind them."""
    sampling: SamplingParams
    seed: int
    """The request's seed. A guess is drawn with the noise of its position, as the token itself will be."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + len(self.drafted)


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft model's guess of the next token."""

    token_id: int
    chance: float
    """The probability that the draft model itself gives this token, 0 to 1."""


@dataclass(frozen=True, slots=True)
class GuessPass:
    """The result of one forward pass of a draft model."""

    guesses: tuple[Guess | None, ...]
    """The guess after each text. None for a text of which too many tokens were missing: the pass has computed a part of
    them. Also None if the KV memory is full with the texts before it, or if the served model has no such token.
    """
    num_rows: int
    """The tokens that the pass has computed."""


class DraftModel(Protocol):
    """Guesses the next tokens of several requests at once.

    Keeps the KV of their texts, as far as it has memory, so that each text is computed once.
    """

    @property
    def relative_cost(self) -> float:
        """The bytes of its weights, as a fraction of those of the served model: a first estimate of what a pass costs."""
        ...

    def reaches(self, context: DraftContext, max_tokens: int) -> bool:
        """Returns whether it could guess `max_tokens` tokens after a text: within its context, and within its KV memory."""
        ...

    def num_missing(self, context: DraftContext) -> int:
        """Returns how many tokens of a text it must compute to guess what follows; at least 1."""
        ...

    def guess(self, contexts: Sequence[DraftContext]) -> GuessPass:
        """Guesses the token after each text, in one forward pass. No request may occur twice."""
        ...

    def forget(self, request_id: RequestId) -> None:
        """Drops all that it keeps of a request. Does nothing if that is nothing."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError if what it keeps is inconsistent."""
        ...
