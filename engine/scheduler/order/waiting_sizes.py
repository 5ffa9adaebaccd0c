"""Counts the waiting requests of an order by domain, and knows what they need and which of them came last.

    QueueSize     a number of requests, and of the tokens in their prompts
    WaitingNeeds  the adapters and grammars that the waiting requests need
    WaitingSizes  the sizes of all domains (usually, one domain is one tenant), and the last requests of each

Every order of waiting requests has one WaitingSizes, and tells it of each request that begins or stops to wait. Owns no
request. Never orders or ends one. Invariant: no question reads the whole queue, so a flood makes no answer slower.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from heapq import merge

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.platform.ids import IsolationDomain, RequestId


@dataclass(frozen=True, slots=True)
class QueueSize:
    """A number of waiting requests, and of the tokens in their prompts."""

    requests: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.requests} requests with {self.tokens} prompt tokens"

    def plus(self, state: RequestState) -> "QueueSize":
        return QueueSize(self.requests + 1, self.tokens + state.num_prompt)

    def minus(self, state: RequestState) -> "QueueSize":
        return QueueSize(self.requests - 1, self.tokens - state.num_prompt)

    def fits(self, room: "QueueSize") -> bool:
        """Returns whether neither number is above the number in `room`."""
        return self.requests <= room.requests and self.tokens <= room.tokens

    def measure(self, *, by_tokens: bool) -> int:
        return self.tokens if by_tokens else self.requests


class WaitingNeeds:
    """The adapters and grammars that waiting requests need, so that nobody must read the whole queue to know them."""

    def __init__(self) -> None:
        self._groups: Counter[tuple[str, ...]] = Counter()
        self._with_grammar: dict[RequestId, RequestState] = {}

    @property
    def groups(self) -> Collection[tuple[str, ...]]:
        """The digests of the adapters that requests need together, each set once."""
        return self._groups.keys()

    @property
    def with_grammar(self) -> Collection[RequestState]:
        """The waiting requests with a grammar, the longest there first."""
        return self._with_grammar.values()

    def add(self, state: RequestState) -> None:
        if digests := state.request.adapter_digests:
            self._groups[digests] += 1
        if state.request.grammar is not None:
            self._with_grammar[state.request_id] = state

    def remove(self, state: RequestState) -> None:
        if digests := state.request.adapter_digests:
            self._groups[digests] -= 1
            if not self._groups[digests]:
                del self._groups[digests]
        self._with_grammar.pop(state.request_id, None)


_Entry = tuple[float, int, RequestState]
"""A waiting request with its time of arrival and a number that makes entries distinct."""


class WaitingSizes:
    """Counts the waiting requests and their prompt tokens: of each domain (usually one tenant), and of all."""

    def __init__(self) -> None:
        self._by_domain: dict[IsolationDomain, QueueSize] = {}
        self._new: dict[IsolationDomain, dict[ServiceTier, list[_Entry]]] = {}
        """Of each domain in each tier, the requests that have never run, by their arrival."""
        self._entries: dict[RequestId, _Entry] = {}
        """The same by id."""
        self._num_added = 0
        self.total = QueueSize()
        self.needs = WaitingNeeds()

    @property
    def domains(self) -> Collection[IsolationDomain]:
        """The domains with waiting requests."""
        return self._by_domain.keys()

    def of(self, domain: IsolationDomain) -> QueueSize:
        return self._by_domain.get(domain, QueueSize())

    def last_of(self, domain: IsolationDomain, priority: Callable[[RequestState], int]) -> Iterator[RequestState]:
        """Yields the waiting requests of a domain that have never run: those of the lowest priority first, and among these
        the last that came. `priority` must not be lower for a request that has waited longer in the same tier.
        """

        def order(entry: _Entry) -> tuple[int, float, int]:
            return priority(entry[2]), entry[0], entry[1]

        newest_first = [reversed(entries) for entries in self._new.get(domain, {}).values()]
        return (state for *_, state in merge(*newest_first, key=order, reverse=True))

    def add(self, state: RequestState) -> None:
        self._by_domain[state.domain] = self.of(state.domain).plus(state)
        self.total = self.total.plus(state)
        self.needs.add(state)
        if not state.has_run:
            entry = self._entries[state.request_id] = (state.arrived_at, self._num_added, state)
            self._num_added += 1
            insort(self._new.setdefault(state.domain, {}).setdefault(state.request.tier, []), entry)

    def remove(self, state: RequestState) -> None:
        left = self._by_domain.pop(state.domain).minus(state)
        if left.requests:
            self._by_domain[state.domain] = left
        self.total = self.total.minus(state)
        self.needs.remove(state)
        entry = self._entries.pop(state.request_id, None)
        if entry is not None:
            entries = self._new[state.domain][state.request.tier]
            del entries[bisect_left(entries, entry[:2])]
        if not left.requests:
            self._new.pop(state.domain, None)

    def check_integrity(self) -> None:
        """Checks that the sums are those of the domains, and that each list is in the order of arrival."""
        assert self.total.requests == sum(size.requests for size in self._by_domain.values())
        assert self.total.tokens == sum(size.tokens for size in self._by_domain.values())
        assert self._new.keys() <= self._by_domain.keys()
        lists = [entries for tiers in self._new.values() for entries in tiers.values()]
        assert all(entries == sorted(entries, key=lambda entry: entry[:2]) for entries in lists)
        assert sum(map(len, lists)) == len(self._entries) <= self.total.requests
