"""Follows one answer in its grammar: accepts tokens, masks the tokens that must not follow, and proposes drafts.

GrammarCursor is the answer's position in the grammar. The engine loop uses it between steps, and the mask thread uses
it during a step. They never use it at the same time, because the loop waits for the masks.

A mask row says which tokens may stand at one position of the answer. The loop makes the row before a step, and the mask
thread fills it during the step. If the cursor has moved between these two times, filling the row returns an error.

GrammarDrafts proposes the tokens that the grammar fixes. A schema often fixes the next key but not the whitespace:
`,"b"` and `, "b"` are both allowed. So drafts come from a second, compact grammar, which allows only one spelling of
each answer. When the model writes another spelling, there are no more drafts from the compact grammar.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from graftwork.engine.core.step import MaskRow
from graftwork.engine.grammar.matching.matcher import Matcher, Words
from graftwork.engine.grammar.matching.vocabulary import Vocabulary
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError, InternalFailure, InvalidRequest


class GrammarCursor:
    """Tracks one running request's position in its grammar. GrammarManager owns the cursor."""

    def __init__(
        self,
        matcher: Matcher,
        stop_token_ids: Iterable[int],
        eos_token_ids: Iterable[int],
        *,
        max_fill_s: float,
        clock: Clock,
    ) -> None:
        """`stop_token_ids` end the answer if the grammar is complete. `eos_token_ids` are never part of the text.
        `max_fill_s` is the most processor time of one mask, in seconds.
        """
        self._matcher = matcher
        self._stops = sorted(stop_token_ids)
        self._eos = sorted({*eos_token_ids})
        self._max_fill_s = max_fill_s
        self._clock = clock
        self._stopped = False
        self.num_accepted = 0

    @property
    def is_over(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._stopped

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows the answer to end here."""
        return self._stopped or self._matcher.is_complete()

    def accept(self, token_id: int) -> bool:
        """Moves past one token of the answer. Returns False, and changes nothing, if the grammar does not allow the
        token.
        """
        if self._stopped:
            return False
        if token_id in self._stops and self._matcher.is_complete():
            self._stopped = True
        elif token_id in self._eos or not self._matcher.accept(token_id):
            return False
        self.num_accepted += 1
        return True

    def accept_all(self, token_ids: Sequence[int]) -> int:
        """Moves past tokens of the answer, up to the first token that the grammar does not allow.

        Returns how many tokens were accepted.
        """
        for count, token_id in enumerate(token_ids):
            if not self.accept(token_id):
                return count
        return len(token_ids)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Returns how many of `token_ids` the grammar allows next, before the first forbidden one. Changes nothing."""
        allowed = self.accept_all(token_ids)
        self.rollback(allowed)
        return allowed

    def rollback(self, num_tokens: int) -> None:
        """Moves back to the position before the last `num_tokens` accepted tokens."""
        if num_tokens == 0:
            return
        assert num_tokens <= self.num_accepted
        self.num_accepted -= num_tokens
        if self._stopped:
            self._stopped = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def row(self, drafts: Sequence[int] = (), banned: Iterable[int] = (), num_in_flight: int = 0) -> MaskRow:
        """Returns a mask row: the tokens that the grammar allows after the draft tokens `drafts`, without the `banned`
        tokens.

        The grammar must allow the draft tokens. The row is filled later: `num_in_flight` tokens, which a step in flight
        samples, must be accepted first.
        """
        return _CursorRow(self, tuple(drafts), tuple(banned), self.num_accepted + num_in_flight)

    def fill(self, drafts: tuple[int, ...], banned: tuple[int, ...], words: Words) -> GraftworkError | None:
        """Computes which tokens may follow the draft tokens `drafts`, and sets their bits in `words`. Does not move the
        position.

        The bits of `banned` tokens are not set. Returns the error that ends the request: the mask took too long, or no
        token may follow although the answer is not complete. Returns None if there is no error.
        """
        started = self._clock.worked()
        accepted = self.accept_all(drafts)
        try:
            assert accepted == len(drafts), "drafts are cut to what the grammar allows before they are planned"
            error = self._fill_here(banned, words)
        finally:
            self.rollback(accepted)
        if self._clock.worked() - started > self._max_fill_s:
            return InvalidRequest(
                f"One step of this grammar took more than {self._max_fill_s} s. Simplify it.", code="grammar_too_slow"
            )
        return error

    def _fill_here(self, banned: tuple[int, ...], words: Words) -> GraftworkError | None:
        if self._stopped:
            words.fill(0)
            return None
        if not self._matcher.fill(words):
            return InvalidRequest("This grammar grew too complex while it was followed.", code="grammar_too_complex")
        _clear(words, self._eos)
        if self._matcher.is_complete():
            _set(words, self._stops)
        _clear(words, banned)
        if words.any() or self._matcher.is_complete():
            return None
        return InvalidRequest(
            "The grammar allows no token here: nothing that the model can write fits. Widen it.",
            code="grammar_dead_end",
        )


class _CursorRow:
    """A mask row that is filled later. The row is valid only while the answer has `length` tokens."""

    def __init__(self, cursor: GrammarCursor, drafts: tuple[int, ...], banned: tuple[int, ...], length: int) -> None:
        self._cursor = cursor
        self._drafts = drafts
        self._banned = banned
        self._length = length

    def fill(self, words: Words) -> GraftworkError | None:
        if self._cursor.num_accepted != self._length:
            return InternalFailure("A grammar's mask was asked for at another length than it was planned for.")
        return self._cursor.fill(self._drafts, self._banned, words)


def _set(words: Words, token_ids: Iterable[int]) -> None:
    bits = words.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(words: Words, token_ids: Iterable[int]) -> None:
    bits = words.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)


class Speller:
    """Splits text into tokens. At each position, takes the longest token of the vocabulary with which the rest of the
    text begins.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token}
        self._longest = max(map(len, self._ids), default=0)

    def spell(self, text: bytes) -> list[int]:
        """Returns the tokens of a text. Stops where the rest of the text begins with no token of the vocabulary."""
        token_ids: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(start + self._longest, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                break
            token_ids.append(self._ids[text[start:end]])
            start = end
        return token_ids


class GrammarDrafts:
    """Proposes draft tokens from the grammar of one running request.

    Also counts how many tokens of a draft from another source this grammar allows.
    """

    def __init__(self, cursor: GrammarCursor, compact: Matcher | None, speller: Speller | None) -> None:
        """`compact` follows the answer in the grammar with only one spelling of each answer. If it is None, the grammar
        proposes no drafts, and needs no `speller`.
        """
        self._cursor = cursor
        self._compact = compact
        self._speller = speller

    def follow(self, token_id: int) -> None:
        """Tells the compact grammar (the one that allows only one spelling of each answer) the next token of the
        answer.

        If the compact grammar does not allow this token, no more drafts are taken from this grammar.
        """
        if self._compact is not None and not self._compact.accept(token_id):
            self._compact = None

    def forced_token_ids(self, max_tokens: int) -> tuple[int, ...]:
        """Returns the next tokens that the grammar fixes, at most `max_tokens`.

        Where the grammar leaves only the spelling open, such as whitespace, the tokens have the most compact spelling.
        Leaves out the last token, because text that follows later could make it part of a longer token.
        """
        if self._compact is None or self._speller is None or self._cursor.is_over:
            return ()
        token_ids = self._speller.spell(self._compact.forced_bytes())[:-1][:max_tokens]
        return tuple(token_ids[: self.allowed_length(tuple(token_ids))])

    def allowed_length(self, token_ids: tuple[int, ...]) -> int:
        """Returns how many of the draft tokens `token_ids` the grammar allows next, before the first forbidden one."""
        return self._cursor.num_allowed(token_ids)
