"""Orders the waiting requests for admission.

Owns the queues and the fair-share counters. Never changes a request, and never checks whether there is room for it.

Order: first by service tier, which rises with waiting time so that no request starves; then by fair share between the
domains (usually, one domain is one tenant). Each domain has a counter of the service that it received, divided by its
weight. The domain with the smallest counter is served first. A domain whose queue was empty starts again at the
smallest counter of the waiting domains. If no domain waits, it starts at the counter of the domain served last. So a
domain earns nothing by being idle.

Source: Virtual Token Counter, Sheng et al. 2024 (arXiv 2401.00588).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.request_state import RequestState
from graftwork.platform.clock import Clock
from graftwork.platform.ids import IsolationDomain

INPUT_PRICE = 1.0
OUTPUT_PRICE = 2.0
_TIER_PRIORITY = {ServiceTier.PRIORITY: 0, ServiceTier.DEFAULT: 1, ServiceTier.FLEX: 2}


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


class FairShare:
    """Owns one queue of waiting requests for each domain (usually one tenant).

    `for state in fair_share` yields the requests of all domains, in no useful order. `candidates` returns them in
    order.
    """

    def __init__(self, clock: Clock, seconds_per_tier: float = 10.0) -> None:
        """A request rises by one service tier for every `seconds_per_tier` that it waits."""
        self._clock = clock
        self._seconds_per_tier = seconds_per_tier
        self._waiting: dict[IsolationDomain, deque[RequestState]] = {}
        self._sizes: dict[IsolationDomain, QueueSize] = {}
        self._counters: dict[IsolationDomain, float] = {}
        self._last_served = 0.0

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    def __iter__(self) -> Iterator[RequestState]:
        for queue in self._waiting.values():
            yield from queue

    def size_of(self, domain: IsolationDomain) -> QueueSize:
        """Returns how many requests of one domain (usually one tenant) wait."""
        return self._sizes.get(domain, QueueSize())

    def total_size(self) -> QueueSize:
        """Returns how many requests of all domains wait."""
        sizes = self._sizes.values()
        return QueueSize(sum(size.requests for size in sizes), sum(size.tokens for size in sizes))

    def enqueue(self, state: RequestState) -> None:
        """Appends a request to the queue of its domain (usually one tenant)."""
        domain = state.domain
        if domain not in self._waiting:
            floor = min((self._counters[other] for other in self._waiting), default=self._last_served)
            self._counters[domain] = max(self._counters.get(domain, 0.0), floor)
            self._waiting[domain] = deque()
        self._waiting[domain].append(state)
        self._sizes[domain] = self.size_of(domain).plus(state)

    def remove(self, state: RequestState) -> None:
        """Removes a waiting request from the queue of its domain (usually one tenant)."""
        domain = state.domain
        self._waiting[domain].remove(state)
        self._sizes[domain] = self._sizes[domain].minus(state)
        if not self._waiting[domain]:
            del self._waiting[domain], self._sizes[domain]

    def candidates(self) -> list[RequestState]:
        """Returns all waiting requests in the order in which they should be admitted."""
        priorities = {state.request_id: self.priority(state) for state in self}

        def order(state: RequestState) -> tuple[int, float, float]:
            return priorities[state.request_id], self._counters[state.domain], state.arrived_at

        return sorted(self, key=order)

    def priority(self, state: RequestState) -> int:
        """Returns the current priority of a request: 0 is the highest, larger numbers are lower.

        The number falls while the request waits.
        """
        promotions = int((self._clock.monotonic() - state.arrived_at) / self._seconds_per_tier)
        return max(_TIER_PRIORITY[state.request.tier] - promotions, 0)

    def charge_input(self, state: RequestState, uncached_tokens: int) -> None:
        """Charges the domain of a request (usually one tenant) for the computation of `uncached_tokens` prompt tokens.

        A domain with a higher charge is served later.
        """
        self._charge(state, INPUT_PRICE * uncached_tokens)

    def charge_output(self, state: RequestState, num_tokens: int) -> None:
        """Charges the domain of a request (usually one tenant) for the generation of `num_tokens` tokens.

        A domain with a higher charge is served later.
        """
        self._charge(state, OUTPUT_PRICE * num_tokens)

    def _charge(self, state: RequestState, price: float) -> None:
        domain = state.domain
        self._counters[domain] = self._counters.get(domain, self._last_served) + price / state.request.weight
        self._last_served = self._counters[domain]
