"""Orders the waiting requests by virtual token counters: strict turns between tenants, whatever is cached.

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

from graftwork.engine.scheduler.request_state import RequestState
from graftwork.engine.scheduler.service_cost import ServicePrices, ServiceUse
from graftwork.engine.scheduler.waiting_order import TIER_PRIORITY, QueueSize, WaitingSizes
from graftwork.platform.clock import Clock
from graftwork.platform.ids import IsolationDomain


class VirtualTokenCounter:
    """Owns one queue of waiting requests for each domain (usually one tenant). Implements WaitingOrder."""

    def __init__(self, clock: Clock, prices: ServicePrices | None = None, seconds_per_tier: float = 10.0) -> None:
        """A request rises by one service tier for every `seconds_per_tier` that it waits."""
        self._clock = clock
        self._prices = prices or ServicePrices()
        self._seconds_per_tier = seconds_per_tier
        self._waiting: dict[IsolationDomain, deque[RequestState]] = {}
        self._sizes = WaitingSizes()
        self._counters: dict[IsolationDomain, float] = {}
        self._last_served = 0.0

    def __len__(self) -> int:
        return self._sizes.total.requests

    def __iter__(self) -> Iterator[RequestState]:
        for queue in self._waiting.values():
            yield from queue

    def size_of(self, domain: IsolationDomain) -> QueueSize:
        return self._sizes.of(domain)

    def total_size(self) -> QueueSize:
        return self._sizes.total

    def enqueue(self, state: RequestState) -> None:
        domain = state.domain
        if domain not in self._waiting:
            floor = min((self._counters[other] for other in self._waiting), default=self._last_served)
            self._counters[domain] = max(self._counters.get(domain, 0.0), floor)
            self._waiting[domain] = deque()
        self._waiting[domain].append(state)
        self._sizes.add(state)

    def remove(self, state: RequestState) -> None:
        domain = state.domain
        self._waiting[domain].remove(state)
        self._sizes.remove(state)
        if not self._waiting[domain]:
            del self._waiting[domain]

    def candidates(self) -> Iterator[RequestState]:
        priorities = {state.request_id: self.priority(state) for state in self}

        def order(state: RequestState) -> tuple[int, float, float]:
            return priorities[state.request_id], self._counters[state.domain], state.arrived_at

        return iter(sorted(self, key=order))

    def priority(self, state: RequestState) -> int:
        """Returns the current priority of a request: 0 is the highest, larger numbers are lower.

        The number falls while the request waits.
        """
        promotions = int((self._clock.monotonic() - state.arrived_at) / self._seconds_per_tier)
        return max(TIER_PRIORITY[state.request.tier] - promotions, 0)

    def charge(self, state: RequestState, use: ServiceUse) -> None:
        domain = state.domain
        cost = self._prices.cost(use) / state.request.weight
        self._counters[domain] = self._counters.get(domain, self._last_served) + cost
        self._last_served = self._counters[domain]
