"""Lets a model reason before the answer that its grammar describes, for as many tokens as it may.

    before        reasoning                 gap            answer
    [open tag]    any tokens … close tag    line breaks    what the grammar allows

ReasoningMatcher is a matcher around the one of the grammar. Before the answer, it allows every token but those that end
an answer, and after the last token of the budget nothing but the closing tag. Without a grammar, it keeps the budget
alone.
"""

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from graftwork.engine.core.requests import ReasoningRule
from graftwork.engine.grammar.matching.matcher import Matcher, Words

_ALL = -1  # a word with all bits set


class _Phase(Enum):
    BEFORE = auto()
    INSIDE = auto()
    GAP = auto()
    ANSWER = auto()


@dataclass(frozen=True, slots=True)
class _Position:
    """Where the answer is before its second token: the phase, and what was accepted in it."""

    phase: _Phase
    num_reasoned: int = 0
    """The tokens of reasoning so far, without the tags."""
    moved_grammar: bool = False
    """Whether the grammar has accepted the token that led here."""


class ReasoningMatcher:
    """Follows one answer through its reasoning, and then in its grammar."""

    def __init__(self, rule: ReasoningRule, answer: Matcher | None) -> None:
        """`answer` is the matcher of the grammar; None allows any answer."""
        self._rule = rule
        self._answer = answer
        self._positions = [_Position(_Phase.INSIDE if rule.is_open else _Phase.BEFORE)]
        """The position at the start, and after each token up to the first of the answer."""
        self._num_later = 0
        """The tokens of the answer after its first."""

    def accept(self, token_id: int) -> bool:
        if self._here.phase is _Phase.ANSWER:
            is_allowed = self._accepts_answer(token_id)
            self._num_later += is_allowed
            return is_allowed
        following = self._after(token_id)
        if following is not None:
            self._positions.append(following)
        return following is not None

    def rollback(self, num_tokens: int) -> None:
        undone = min(num_tokens, self._num_later)
        self._num_later -= undone
        for _ in range(num_tokens - undone):
            undone += self._positions.pop().moved_grammar
        if undone and self._answer is not None:
            self._answer.rollback(undone)

    def fill(self, words: Words) -> bool:
        rule = self._rule
        match self._here.phase:
            case _Phase.INSIDE:
                words.fill(0 if self._must_close else _ALL)
                _allow(words, rule.close_token_id)
                return True
            case _Phase.BEFORE | _Phase.GAP:
                is_within = self._fill_answer(words)
                for token_id in (rule.open_token_id,) if self._here.phase is _Phase.BEFORE else rule.gap_token_ids:
                    _allow(words, token_id)
                return is_within
            case _Phase.ANSWER:
                return self._fill_answer(words)

    def is_complete(self) -> bool:
        """Returns whether the answer may end here: never inside the reasoning."""
        return self._here.phase is not _Phase.INSIDE and (self._answer is None or self._answer.is_complete())

    def forced_bytes(self) -> bytes:
        """Returns nothing before the answer: its first token may be one outside of the grammar."""
        if self._here.phase is not _Phase.ANSWER or self._answer is None:
            return b""
        return self._answer.forced_bytes()

    @property
    def _here(self) -> _Position:
        return self._positions[-1]

    @property
    def _must_close(self) -> bool:
        most = self._rule.max_tokens
        return most is not None and self._here.num_reasoned >= most

    def _after(self, token_id: int) -> _Position | None:
        """Returns the position after a token that is not in the answer, or is its first. None if it is not allowed."""
        phase, num_reasoned = self._here.phase, self._here.num_reasoned
        if phase is _Phase.INSIDE:
            if token_id == self._rule.close_token_id:
                return _Position(_Phase.GAP, num_reasoned)
            return None if self._must_close else _Position(_Phase.INSIDE, num_reasoned + 1)
        if phase is _Phase.BEFORE and token_id == self._rule.open_token_id:
            return _Position(_Phase.INSIDE)
        if phase is _Phase.GAP and token_id in self._rule.gap_token_ids:
            return _Position(_Phase.ANSWER, num_reasoned)
        if self._accepts_answer(token_id):
            return _Position(_Phase.ANSWER, num_reasoned, moved_grammar=True)
        return None

    def _accepts_answer(self, token_id: int) -> bool:
        return self._answer is None or self._answer.accept(token_id)

    def _fill_answer(self, words: Words) -> bool:
        if self._answer is not None:
            return self._answer.fill(words)
        words.fill(_ALL)
        return True


def _allow(words: Words, token_id: int) -> None:
    words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
