"""The scores of an answer's tokens, with what each token spells, told with the text in which it begins.

    tokens and their logprobs -> LogprobCollector -> with each piece of text, the scores of the tokens that begin in it

Owns the scores of tokens whose text is still held back.
Keeps: told piece by piece or all at once, an answer has the same scores. The token that ends an answer has none, and
neither have those that lie wholly in a stop string: they are no part of the text.
"""

from dataclasses import dataclass

from graftwork.engine.core.events import TokenLogprobs
from graftwork.sessions.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    token_id: int
    logprob: float
    spelling: bytes
    """What it stands for, which may be part of a character."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of an answer, and what stood beside it."""

    token: ScoredToken
    top: tuple[ScoredToken, ...]
    """The likeliest tokens in its place, likeliest first."""
    offset: int
    """Where its text begins, in characters of the answer."""


class LogprobCollector:
    """The scores of one answer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.scores: list[TokenScore] = []
        self.num_told = 0
        self._num_characters = 0
        """Of the text that was told."""

    def add(self, token_id: int, logprobs: TokenLogprobs, offset: int) -> None:
        """One more token, in order; `offset` as in TokenScore."""
        chosen = self._scored(token_id, logprobs.logprob)
        top = tuple(self._scored(other, logprob) for other, logprob in logprobs.top)
        self.scores.append(TokenScore(chosen, top, offset))

    def told_with(self, text: str) -> tuple[TokenScore, ...]:
        """The scores of the tokens that begin in the next piece of the answer's text."""
        first = self.num_told
        self._num_characters += len(text)
        while self.num_told < len(self.scores) and self.scores[self.num_told].offset < self._num_characters:
            self.num_told += 1
        return tuple(self.scores[first : self.num_told])

    def cut(self) -> None:
        """The text is over, and what was not told is no part of it."""
        del self.scores[self.num_told :]

    def _scored(self, token_id: int, logprob: float) -> ScoredToken:
        return ScoredToken(token_id, logprob, self._tokenizer.token_bytes(token_id))
