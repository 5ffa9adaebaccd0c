"""Matches the log-probabilities of an answer's tokens with the pieces of text in which the tokens begin.

Owns the log-probabilities of tokens whose text was not sent yet. Never computes a probability: the engine does that.
Invariant: a streamed answer has the same log-probabilities as a whole one. Stop tokens, and tokens whose whole text is
in a stop string, have no log-probabilities, because they are not part of the text. Only an answer after an echoed
prompt has those of its stop token, because evaluation clients count one entry for each generated token.

Also collects the log-probabilities of a prompt's own tokens, which arrive before the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graftwork.engine.core.events import EngineEvent, PromptAdmitted, PromptScored, StepsTraced, TokenLogprobs
from graftwork.sessions.text.tokenizer import Detokenizer, TextTokenizer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, with its log-probability and its bytes."""

    token_id: int
    logprob: float
    """The natural logarithm of the token's probability."""
    spelling: bytes
    """The bytes of the token, which may be part of a character."""


@dataclass(frozen=True, slots=True)
class OutputTokenLogprobs:
    """One token of an answer, and the likeliest tokens at its position."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """The likeliest tokens at this position, the likeliest first."""
    offset: int
    """Where the token's text begins in the answer, in characters."""


_IMPOSSIBLE = -9999.0
"""OpenAI's log-probability for a token that cannot occur. JSON has no number for minus infinity."""


def finite_logprob(token: TokenLogprob) -> float:
    """Returns the log-probability of a token as a number that JSON has."""
    return max(_IMPOSSIBLE, token.logprob)  # in this order also for NaN


def token_scores(score: OutputTokenLogprobs) -> dict[str, Any]:
    """Returns the log-probabilities at one position in the form of OpenAI's chat completions and Responses API."""
    return _scored(score.token) | {"top_logprobs": [_scored(one) for one in score.top]}


def _scored(token: TokenLogprob) -> dict[str, Any]:
    text = token.spelling.decode(errors="replace")
    return {"token": text, "logprob": finite_logprob(token), "bytes": list(token.spelling)}


@dataclass(frozen=True, slots=True)
class PromptTokenLogprobs:
    """One token of a prompt, and the likeliest tokens at its position."""

    token_id: int
    spelling: bytes
    offset: int
    """Where the token's text begins in the text of the whole prompt, in characters. Control tokens have text too."""
    logprob: float | None = None
    """The natural logarithm of the token's probability. None for the first token, which follows nothing."""
    rank: int | None = None
    """The token's place among all tokens, 1 is the likeliest. None for the first token."""
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens at this position, the likeliest first."""


_BEFORE_ANSWER = (PromptAdmitted, PromptScored, StepsTraced)
"""The kinds of events that may come before all tokens of the prompt are scored."""


class PromptLogprobCollector:
    """Collects the log-probabilities of the tokens of one prompt, in the order in which the engine reports them."""

    def __init__(self, tokenizer: TextTokenizer, token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        self._num_characters = 0
        self._tokens: list[PromptTokenLogprobs] = []
        self._add(None)

    def take(self, event: EngineEvent) -> tuple[PromptTokenLogprobs, ...] | None:
        """Reads the next event of the request. Returns all tokens of the prompt at the first event after the prompt."""
        if isinstance(event, PromptScored):
            for logprobs in event.logprobs:
                self._add(logprobs)
        return None if isinstance(event, _BEFORE_ANSWER) else tuple(self._tokens)

    def _add(self, logprobs: TokenLogprobs | None) -> None:
        token_id = self._token_ids[len(self._tokens)]
        spelling = self._tokenizer.token_bytes(token_id)
        token = PromptTokenLogprobs(token_id, spelling, self._num_characters)
        if logprobs is not None:
            top = tuple(TokenLogprob(one, value, self._tokenizer.token_bytes(one)) for one, value in logprobs.top)
            token = PromptTokenLogprobs(token_id, spelling, self._num_characters, logprobs.logprob, logprobs.rank, top)
        self._tokens.append(token)
        self._num_characters += len(self._detokenizer.push(token_id))


class LogprobCollector:
    """Collects the log-probabilities of one answer, and returns them piece by piece, with the text that is sent."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.logprobs: list[OutputTokenLogprobs] = []
        """The log-probabilities of all tokens so far, in order."""
        self.num_taken = 0
        """How many entries of `logprobs` the method `take_for` has returned."""
        self._num_characters = 0
        """The number of characters of text for which log-probabilities were returned."""

    def add(self, token_id: int, logprobs: TokenLogprobs, offset: int) -> None:
        """Adds the next token of the answer, with its log-probabilities.

        `offset` is the number of characters in the answer before the text of this token.
        """
        chosen = self._with_spelling(token_id, logprobs.logprob)
        top = tuple(self._with_spelling(other, logprob) for other, logprob in logprobs.top)
        self.logprobs.append(OutputTokenLogprobs(chosen, top, offset))

    def take_for(self, text: str) -> tuple[OutputTokenLogprobs, ...]:
        """Returns the log-probabilities of the tokens that begin in `text`, the next piece of the answer."""
        first = self.num_taken
        self._num_characters += len(text)
        while self.num_taken < len(self.logprobs) and self.logprobs[self.num_taken].offset < self._num_characters:
            self.num_taken += 1
        return tuple(self.logprobs[first : self.num_taken])

    def drop_rest(self) -> None:
        """Drops the log-probabilities that `take_for` has not returned.

        Call this method if a stop string has ended the answer: these tokens are then not part of the text.
        """
        del self.logprobs[self.num_taken :]

    def _with_spelling(self, token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token_id, logprob, self._tokenizer.token_bytes(token_id))
