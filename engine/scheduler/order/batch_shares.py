"""Counts the places of each domain (usually one tenant) in the batch, and says who gives up a place to a waiting request.

Places follow service: a domain takes a place from another only if it has had less service by the counters of the order, or
has at most half its fair number of places. Otherwise it waits for a place that becomes free, which the order gives away.

Owns only the rule. Never admits or preempts a request: the scheduler does.
Invariant: if only one domain sends requests, it may use all places. No place stays empty because of this rule.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import WaitingDomain
from graftwork.platform.ids import IsolationDomain


class BatchShares:
    """Counts the places that each domain (usually one tenant) has in the batch, and its fair number of places.

    The places are divided by weight among the domains with running or waiting requests. So each domain has a fair
    number of places, at least 1. A domain may have more places, as long as no domain with fewer than its own fair
    number waits.
    """

    def __init__(
        self,
        max_running: int,
        running: Iterable[RequestState],
        waiting: Iterable[WaitingDomain] = (),
        settled_since: float = float("inf"),
        service: Callable[[RequestState], float] = lambda state: 0.0,
    ) -> None:
        """`running` are the requests in the batch, and `waiting` the domains with waiting requests. `service` returns the
        service that a request's domain has had, divided by its weight.

        Only requests that started at step `settled_since` or before have run long enough to give up their places.
        """
        self._running = list(running)
        self._settled_since = settled_since
        weights: dict[IsolationDomain, float] = {}
        for state in self._running:
            weights[state.domain] = max(weights.get(state.domain, 0.0), state.request.weight)
        for domain in waiting:
            weights[domain.domain] = max(weights.get(domain.domain, 0.0), domain.weight)
        self._service = service
        self._max_running, self._weight = max_running, sum(weights.values())
        self._fair = {domain: self._places_of(weight, self._weight) for domain, weight in weights.items()}
        self._held = Counter(state.domain for state in self._running)
        self._without_victims: set[tuple[IsolationDomain, ServiceTier, int]] = set()

    def _places_of(self, weight: float, total: float) -> int:
        return max(1, int(self._max_running * weight / total))

    def excess_by_domain(self) -> dict[IsolationDomain, int]:
        """Returns the `excess` of each domain (usually one tenant) with running or waiting requests."""
        return {domain: self._held[domain] - fair for domain, fair in self._fair.items()}

    def with_few_places(self) -> frozenset[IsolationDomain]:
        """Returns the domains (usually, one domain is one tenant) with at most half their fair number of places."""
        return frozenset(domain for domain, fair in self._fair.items() if 2 * self._held[domain] <= fair)

    def excess_of_new(self, weight: float) -> int:
        """Returns what `excess` would be of a domain with this weight that has neither running nor waiting requests."""
        return -self._places_of(weight, self._weight + weight)

    def started(self, state: RequestState) -> None:
        """Records that a request has got a place in the batch."""
        self._running.append(state)
        self._held[state.domain] += 1
        self._without_victims.clear()

    def preempted(self, state: RequestState) -> None:
        """Records that a request has given up its place in the batch."""
        self._running.remove(state)
        self._held[state.domain] -= 1
        self._without_victims.clear()

    def victims_for(self, state: RequestState, priority: int) -> list[RequestState]:
        """Returns the running requests that may have to give their places to a waiting request.

        `priority` is the priority of the waiting request. If its domain (usually one tenant) has fewer places than its
        fair number, these are the requests of domains above their own fair number, whatever the priorities, from which
        it may take a place. Otherwise they are requests of other tiers with a lower priority: of the same domain, or of a
        domain above its fair number. Within a tier the counters decide, also about requests that have waited for long:
        otherwise weights would not hold where a queue is longer than the patience of the order.
        """
        rank = (state.domain, state.request.tier, priority)
        if rank in self._without_victims:
            return []
        movable = [one for one in self._running if not one.pending_loads and one.started_at_step <= self._settled_since]
        is_below = self.excess(state) < 0
        victims = [one for one in movable if is_below and self._is_above(one) and self._may_take(state, one)]
        if not victims:
            lower = [one for one in movable if one.priority > priority and one.request.tier is not state.request.tier]
            victims = [one for one in lower if is_below or one.domain == state.domain or self._is_above(one)]
        if not victims:
            self._without_victims.add(rank)
        return victims

    def _may_take(self, state: RequestState, victim: RequestState) -> bool:
        if self.has_few_places(state) or state.request.tier is not victim.request.tier:
            return True
        return self._service(state) < self._service(victim)

    def excess(self, state: RequestState) -> int:
        """Returns how many places the request's domain (usually one tenant) has above its fair number.

        The number is negative if the domain has fewer places.
        """
        return self._held[state.domain] - self._fair.get(state.domain, 1)

    def num_lacking(self, waiting: WaitingDomain) -> int:
        """Returns how many places a domain with waiting requests has less than its fair number; 0 if it has more."""
        return max(self._fair[waiting.domain] - self._held[waiting.domain], 0)

    def num_below_half(self, waiting: WaitingDomain) -> int:
        """Returns how many places a domain may get, whatever else the order says, until it has more than half
        its fair number. 0 if it has, or if no domain has more than its fair number.
        """
        if not any(self._held[domain] > fair for domain, fair in self._fair.items()):
            return 0
        return max(self._fair[waiting.domain] // 2 + 1 - self._held[waiting.domain], 0)

    def has_few_places(self, state: RequestState) -> bool:
        """Returns whether the request's domain (usually one tenant) has at most half its fair number of places."""
        return 2 * self._held[state.domain] <= self._fair.get(state.domain, 1)

    def preemption_order(self, state: RequestState) -> tuple[int, int]:
        """Returns a sort key: the running request with the largest key is preempted first.

        The key is larger for a lower priority, and among equals for a domain (usually one tenant) with more places above
        its fair number.
        """
        return state.priority, self.excess(state)

    def _is_above(self, state: RequestState) -> bool:
        return self.excess(state) > 0
