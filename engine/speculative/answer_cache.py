"""Earlier answers to guess from, kept apart by scope: one isolation domain under one adapter or mixture.

Bounded in bytes over all scopes; a full scope forgets its oldest answers, a full cache the scope that was used longest
ago. A scope goes with its adapter. Nothing is ever found across scopes, so no tenant can tell from the pace of its own
answers what another has been told.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graftwork.engine.core.prefix_keys import CacheScope
from graftwork.engine.speculative.draft import DraftSource, DraftSpan
from graftwork.engine.speculative.suffix_index import BYTES_PER_TOKEN, LONGEST_MATCH, SuffixIndex

_SCOPE_SHARE = 8
"""A scope takes at most this part of the cache."""


@dataclass(slots=True)
class _Answers:
    """The answers of one scope, one behind the other, oldest first."""

    adapter_digests: frozenset[str]
    tokens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    index: SuffixIndex = field(init=False)

    def __post_init__(self) -> None:
        self.index = SuffixIndex(self.tokens)

    def add(self, answer: Sequence[int]) -> None:
        start = len(self.tokens)
        self.starts.append(start)
        self.tokens += answer
        self.index.enter(start, start, len(self.tokens))

    def keep_last(self, num_tokens: int) -> None:
        """Forget whole answers, the oldest first, until at most `num_tokens` are left."""
        ends = [*self.starts[1:], len(self.tokens)]
        kept = [
            self.tokens[start:end]
            for start, end in zip(self.starts, ends, strict=True)
            if len(self.tokens) - start <= num_tokens
        ]
        self.tokens, self.starts = [], []
        self.index = SuffixIndex(self.tokens)
        for answer in kept:
            self.add(answer)


class AnswerCache:
    """Answers by scope. Owned by the engine's loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_tokens = max_bytes // BYTES_PER_TOKEN
        self._answers: OrderedDict[CacheScope, _Answers] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_bytes(self) -> int:
        return self._num_tokens * BYTES_PER_TOKEN

    @property
    def scopes(self) -> tuple[CacheScope, ...]:
        """The one used longest ago first."""
        return tuple(self._answers)

    def remember(self, scope: CacheScope, adapter_digests: Iterable[str], answer: Sequence[int]) -> None:
        """Keep an answer, with the few tokens before it that lead to its beginning; one that is too long in part."""
        most = self._max_tokens // _SCOPE_SHARE
        answer = answer[-most:] if most else ()
        if not answer:
            return
        answers = self._answers.setdefault(scope, _Answers(frozenset(adapter_digests)))
        self._answers.move_to_end(scope)
        if len(answers.tokens) + len(answer) > most:
            self._num_tokens -= len(answers.tokens)
            answers.keep_last(min(most // 2, most - len(answer)))
            self._num_tokens += len(answers.tokens)
        answers.add(answer)
        self._num_tokens += len(answer)
        while self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._answers)))

    def propose(self, scope: CacheScope, tail: Sequence[int], max_tokens: int) -> DraftSpan | None:
        """What followed the longest known suffix of `tail` in the latest answer that has it."""
        answers = self._answers.get(scope)
        match = None if answers is None else answers.index.find(tail)
        if answers is None or match is None:
            return None
        following = answers.tokens[match.position : match.position + max_tokens]
        return DraftSpan(DraftSource.CACHE, match.match_length, tuple(following))

    def forget_adapter(self, digest: str) -> None:
        """Drop every scope that this adapter is part of."""
        for scope in [scope for scope, answers in self._answers.items() if digest in answers.adapter_digests]:
            self._forget(scope)

    def _forget(self, scope: CacheScope) -> None:
        self._num_tokens -= len(self._answers.pop(scope).tokens)

    def check_integrity(self) -> None:
        """Recount, and hold the count to its bound."""
        assert self._num_tokens == sum(len(answers.tokens) for answers in self._answers.values())
        assert self._num_tokens <= self._max_tokens


class CacheLookup:
    """The cache as one sequence's drafter."""

    def __init__(self, token_ids: list[int], scope: CacheScope, cache: AnswerCache) -> None:
        """`token_ids` is the sequence's own list, which grows."""
        self._token_ids = token_ids
        self._scope = scope
        self._cache = cache

    def observe(self) -> None:
        """An answer is entered once it has ended."""

    def propose(self, drafted: tuple[int, ...], max_tokens: int) -> DraftSpan | None:
        tail = self._token_ids[-LONGEST_MATCH:]
        if drafted:
            tail = [*tail, *drafted][-LONGEST_MATCH:]
        return self._cache.propose(self._scope, tail, max_tokens)
