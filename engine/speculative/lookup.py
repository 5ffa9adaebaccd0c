"""Drafts the tokens that followed the request's last tokens in an earlier text.

Each drafter finds where the longest known suffix of the request occurred before, and drafts the tokens after it.
PromptLookup searches the request's own prompt and answer. AnswerLookup searches earlier answers of its cache scope.
"""

from graftwork.engine.core.prefix_keys import CacheScope
from graftwork.engine.speculative.answer_cache import AnswerCache
from graftwork.engine.speculative.draft import DraftSource, DraftSpan
from graftwork.engine.speculative.suffix_index import LONGEST_MATCH, SuffixIndex

_TOKENS_PER_STEP = 16384
"""The most tokens to index in one step, so that a long prompt does not delay a step."""


class PromptLookup:
    """Finds quoted tool results, edited files and repeated calls."""

    def __init__(self, token_ids: list[int]) -> None:
        """`token_ids` is the request's own list, which grows."""
        self._token_ids = token_ids
        self._index = SuffixIndex(token_ids)
        self._num_entered = 0

    def observe(self) -> None:
        end = min(len(self._token_ids), self._num_entered + _TOKENS_PER_STEP)
        self._index.enter(0, self._num_entered, end)
        self._num_entered = end

    def propose(self, drafted: tuple[int, ...], max_tokens: int) -> DraftSpan | None:
        match = self._index.find(_tail(self._token_ids, drafted))
        if match is None:
            return None
        following = self._token_ids[match.position : match.position + max_tokens]
        return DraftSpan(DraftSource.SESSION, match.match_length, tuple(following))


class AnswerLookup:
    """Finds answers that repeat an earlier one of the same domain and adapters."""

    def __init__(self, token_ids: list[int], scope: CacheScope, cache: AnswerCache) -> None:
        """`token_ids` is the request's own list, which grows."""
        self._token_ids = token_ids
        self._scope = scope
        self._cache = cache

    def observe(self) -> None:
        """Does nothing: an answer enters the cache when its request ends."""

    def propose(self, drafted: tuple[int, ...], max_tokens: int) -> DraftSpan | None:
        return self._cache.propose(self._scope, _tail(self._token_ids, drafted), max_tokens)


def _tail(token_ids: list[int], drafted: tuple[int, ...]) -> list[int]:
    """Returns the last tokens of a request and its draft, up to the longest length of a match."""
    tail = token_ids[-LONGEST_MATCH:]
    return [*tail, *drafted][-LONGEST_MATCH:] if drafted else tail
