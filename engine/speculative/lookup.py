"""Drafts the tokens that followed the request's last tokens in an earlier text, and keeps the texts to search.

PromptLookup searches the request's own prompt and answer. AnswerLookup searches earlier answers of the same cache
scope: the requests of one domain (usually one tenant) with the same adapters.

Owns the earlier answers, within a limit in bytes: a full scope drops its oldest answers, and a full cache drops the
least recently used scope. Owns an index of each text: for a few lengths n, the position after the latest occurrence of
each sequence of n tokens (n-gram). Indexing 100,000 tokens takes milliseconds, and each new token a microsecond.
Invariant: a scope finds only its own answers, so the speed of an answer reveals nothing about other tenants.
Source: prompt lookup (Saxena 2023), but with the latest match instead of the first. SuffixDecoding (Oliaro et al. 2024)
finds matches with a suffix tree. Here, n-grams of several lengths do this.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graftwork.engine.core.prefix_keys import CacheScope
from graftwork.engine.speculative.draft import DraftSource, DraftSpan
from graftwork.platform.ids import IsolationDomain

NGRAM_LENGTHS = (8, 3)
"""The lengths n of the n-grams, longest first. Eight tokens are rarely equal by chance. Three also find recent
repetitions.
"""


LONGEST_MATCH = 32
"""The longest match that is measured. A longer match would not be more certain."""


BYTES_PER_TOKEN = 2 * 160
"""The bytes that are counted for one token: its n-gram tuples and positions, and their entries in two dictionaries."""


_FEW = 8
"""The number of tokens up to which adding them one by one is faster than all at once from slices of the list."""


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """A position in an indexed text. The `match_length` tokens before it equal the last tokens of the request.

    `match_length` is 3, 8, 16 or 32. It is the largest of these lengths for which the tokens were found to be equal.
    """

    position: int
    match_length: int


class SuffixIndex:
    """Finds earlier occurrences of n-grams (n consecutive tokens) in a growing list of tokens.

    An n-gram is added to the index when the list contains the token after it.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._following: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in NGRAM_LENGTHS}

    def enter(self, start: int, first: int, end: int) -> None:
        """Adds n-grams (n consecutive tokens) of the list to the index.

        Adds an n-gram if it begins at position `start` or later, and if the token after it is at a position from
        `first` to `end` - 1.
        """
        for length, following in self._following.items():
            begin = max(first, start + length)
            if end - begin < _FEW:
                for position in range(begin, end):
                    following[tuple(self.tokens[position - length : position])] = position
                continue
            columns = [self.tokens[begin - length + shift : end - length + shift] for shift in range(length)]
            following.update(zip(zip(*columns, strict=True), range(begin, end), strict=True))

    def find(self, tail: Sequence[int]) -> SuffixMatch | None:
        """Returns where the last tokens of `tail` occur in the indexed list: the latest such place, or None.

        `tail` has up to LONGEST_MATCH tokens, the last tokens of a request. Searches for longer n-grams first.
        """
        for length, following in self._following.items():
            if len(tail) < length:
                continue
            position = following.get(tuple(tail[-length:]))
            if position is not None:
                return SuffixMatch(position, self._agreement(tail, position, length))
        return None

    def _agreement(self, tail: Sequence[int], position: int, known: int) -> int:
        agreed = known
        for length in (LONGEST_MATCH // 2, LONGEST_MATCH):
            if not known < length <= min(len(tail), position):
                break
            if list(self.tokens[position - length : position]) != list(tail[-length:]):
                break
            agreed = length
        return agreed


_SCOPE_FRACTION = 8
"""The divisor of the cache's size that limits one scope: a scope takes at most an eighth of the cache."""


@dataclass(slots=True)
class _Answers:
    """The answers of one scope in one list, the oldest first."""

    domain: IsolationDomain
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
    """Keeps earlier answers, so that later requests with the same cache scope can draft from them.

    Requests with the same cache scope have the same domain (usually one tenant) and adapters. Only the thread of the
    engine's loop may use this class.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_tokens = max_bytes // BYTES_PER_TOKEN
        self._answers: OrderedDict[CacheScope, _Answers] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_bytes(self) -> int:
        return self._num_tokens * BYTES_PER_TOKEN

    @property
    def scopes(self) -> tuple[CacheScope, ...]:
        """All cache scopes (pairs of domain and adapters) that have stored answers, the least recently used first."""
        return tuple(self._answers)

    def remember(
        self, scope: CacheScope, domain: IsolationDomain, adapter_digests: Iterable[str], answer: Sequence[int]
    ) -> None:
        """Stores the tokens of an answer for later requests with the same cache scope (domain and adapters).

        `domain` and `adapter_digests` are those of the scope. `answer` may begin with the last few tokens of the prompt. If it is too long, only its last tokens are stored.
        """
        most = self._max_tokens // _SCOPE_FRACTION
        answer = answer[-most:] if most else ()
        if not answer:
            return
        answers = self._answers.setdefault(scope, _Answers(domain, frozenset(adapter_digests)))
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
        """Guesses up to `max_tokens` tokens that follow `tail`, from the stored answers of one cache scope.

        Finds the latest place where the last tokens of `tail` occur in these answers, and returns the tokens after it.
        Returns None if there is no such place.
        """
        answers = self._answers.get(scope)
        match = None if answers is None else answers.index.find(tail)
        if answers is None or match is None:
            return None
        following = answers.tokens[match.position : match.position + max_tokens]
        return DraftSpan(DraftSource.CACHE, match.match_length, tuple(following))

    def forget_adapter(self, digest: str) -> None:
        """Drops all stored answers that were generated with the adapter `digest`."""
        for scope in [scope for scope, answers in self._answers.items() if digest in answers.adapter_digests]:
            self._forget(scope)

    def forget_domain(self, domain: IsolationDomain) -> None:
        """Drops all stored answers of a domain (usually one tenant)."""
        for scope in [scope for scope, answers in self._answers.items() if answers.domain == domain]:
            self._forget(scope)

    def _forget(self, scope: CacheScope) -> None:
        self._num_tokens -= len(self._answers.pop(scope).tokens)

    def check_integrity(self) -> None:
        """Checks that the number of stored tokens is counted correctly and within the limit."""
        assert self._num_tokens == sum(len(answers.tokens) for answers in self._answers.values())
        assert self._num_tokens <= self._max_tokens


_TOKENS_PER_STEP = 16384
"""The most tokens to index in one step, so that a long prompt does not delay a step."""


class PromptLookup:
    """Drafts from the request's own prompt and answer. This helps when the answer quotes tool results, edits files or
    repeats calls.
    """

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
    """Drafts from earlier answers to requests of the same domain (usually one tenant) with the same adapters."""

    def __init__(self, token_ids: list[int], scope: CacheScope, cache: AnswerCache) -> None:
        """`token_ids` is the request's own list, which grows."""
        self._token_ids = token_ids
        self._scope = scope
        self._cache = cache

    def observe(self) -> None:
        """Does nothing, because an answer is added to the cache only when its request ends."""

    def propose(self, drafted: tuple[int, ...], max_tokens: int) -> DraftSpan | None:
        return self._cache.propose(self._scope, _tail(self._token_ids, drafted), max_tokens)


def _tail(token_ids: list[int], drafted: tuple[int, ...]) -> list[int]:
    """Returns the last tokens of a request and its draft, up to the longest length of a match."""
    tail = token_ids[-LONGEST_MATCH:]
    return [*tail, *drafted][-LONGEST_MATCH:] if drafted else tail
