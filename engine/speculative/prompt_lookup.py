"""Guesses from what a sequence has said and heard before: tool results quoted, files edited, calls repeated."""

from graftwork.engine.speculative.draft import DraftSource, DraftSpan
from graftwork.engine.speculative.suffix_index import LONGEST_MATCH, SuffixIndex

_TOKENS_AT_ONCE = 16384
"""Tokens entered in one step: a longer prompt is taken in over several, so that no step waits for it."""


class SessionLookup:
    """Follows the longest known suffix of one sequence to where it stood last."""

    def __init__(self, token_ids: list[int]) -> None:
        """`token_ids` is the sequence's own list, which grows."""
        self._token_ids = token_ids
        self._index = SuffixIndex(token_ids)
        self._num_entered = 0

    def observe(self) -> None:
        end = min(len(self._token_ids), self._num_entered + _TOKENS_AT_ONCE)
        self._index.enter(0, self._num_entered, end)
        self._num_entered = end

    def propose(self, drafted: tuple[int, ...], max_tokens: int) -> DraftSpan | None:
        """Where the text overlaps itself, as in a list of equal lines, the guess goes round."""
        tail = self._token_ids[-LONGEST_MATCH:]
        if drafted:
            tail = [*tail, *drafted][-LONGEST_MATCH:]
        match = self._index.find(tail)
        if match is None:
            return None
        following = self._token_ids[match.position : match.position + max_tokens]
        return DraftSpan(DraftSource.SESSION, match.match_length, tuple(following))
