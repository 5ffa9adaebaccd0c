"""Keeps earlier answers to draft from, separately for each cache scope: one domain under one adapter or mixture.

Owns the answers, within a limit in bytes over all scopes. A full scope drops its oldest answers. A full cache drops
the least recently used scope.
Invariant: a scope finds only its own answers, so the speed of an answer reveals nothing about other tenants.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graftwork.engine.core.prefix_keys import CacheScope
from graftwork.engine.speculative.draft import DraftSource, DraftSpan
from graftwork.engine.speculative.suffix_index import BYTES_PER_TOKEN, SuffixIndex

_SCOPE_FRACTION = 8
"""One scope takes at most an eighth of the cache."""


@dataclass(slots=True)
class _Answers:
    """The answers of one scope in one list, the oldest first."""

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
        """Drops whole answers, the oldest first, until at most `num_tokens` are left."""
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
    """Answers by scope. Used by the engine loop's thread alone."""

    def __init__(self, max_bytes: int) -> None:
        self._max_tokens = max_bytes // BYTES_PER_TOKEN
        self._answers: OrderedDict[CacheScope, _Answers] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_bytes(self) -> int:
        return self._num_tokens * BYTES_PER_TOKEN

    @property
    def scopes(self) -> tuple[CacheScope, ...]:
        """Returns all scopes, the least recently used first."""
        return tuple(self._answers)

    def remember(self, scope: CacheScope, adapter_digests: Iterable[str], answer: Sequence[int]) -> None:
        """Stores an answer, which may begin with a few tokens of the prompt.

        Stores only the end of an answer that is too long.
        """
        most = self._max_tokens // _SCOPE_FRACTION
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
        """Returns the tokens that followed the longest known suffix of `tail`, in the latest answer that contains it."""
        answers = self._answers.get(scope)
        match = None if answers is None else answers.index.find(tail)
        if answers is None or match is None:
            return None
        following = answers.tokens[match.position : match.position + max_tokens]
        return DraftSpan(DraftSource.CACHE, match.match_length, tuple(following))

    def forget_adapter(self, digest: str) -> None:
        """Drops every scope that uses this adapter."""
        for scope in [scope for scope, answers in self._answers.items() if digest in answers.adapter_digests]:
            self._forget(scope)

    def _forget(self, scope: CacheScope) -> None:
        self._num_tokens -= len(self._answers.pop(scope).tokens)

    def check_integrity(self) -> None:
        """Asserts that the token counts are right and within the limit."""
        assert self._num_tokens == sum(len(answers.tokens) for answers in self._answers.values())
        assert self._num_tokens <= self._max_tokens
