"""Orders the waiting requests by deficit longest prefix match: fair between tenants, without destroying locality.

Owns the queues and their counters. Never changes a request, and never checks whether there is room for it.

    service tier      a higher tier goes first; a lower tier with an overdue request gets every `TIER_TURN`-th admission
    domain            (usually one tenant) whose counter is below the limit of the round; see fair_group.py
    flow              one session, or the requests of one set of adapters outside sessions; see domain_queue.py
    request           the best of the oldest of its flow

Among these, a request that has run before goes first, then one that computes what no other computes already, then the one
that saves most: the tokens of its prompt whose KV is cached, and the load of its adapters if they are on the device.
Among the flows of a domain, the next turn of a running agent program goes before new programs. An overdue request gets
a fixed part of the admissions, so nobody waits for ever, whatever the others send.

Each tier has its own counters. Source: Deficit Longest Prefix Match, Cao et al. 2025 (arXiv 2501.14312).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Iterator

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.order.domain_queue import DomainQueue, DomainWalk, Entry, flow_of
from graftwork.engine.scheduler.order.fair_group import FairGroup, GroupWalk, round_limit
from graftwork.engine.scheduler.order.locality import Locality, NoLocality
from graftwork.engine.scheduler.order.request_rank import DeficitSettings, RequestRanks, WalkRanks
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import (
    TIER_PRIORITY,
    QueueLine,
    QueueLines,
    ServicePrices,
    ServiceUse,
    WaitingDomain,
)
from graftwork.engine.scheduler.order.waiting_sizes import QueueSize, WaitingNeeds, WaitingSizes
from graftwork.platform.clock import Clock
from graftwork.platform.ids import IsolationDomain, RequestId

TIER_TURN = 8
"""A tier with an overdue request gets at least one of so many admissions."""


class DeficitPrefixOrder:
    """Owns one queue of waiting requests for each service tier. Implements WaitingOrder."""

    shares_places = True

    def __init__(
        self,
        clock: Clock,
        locality: Locality | None = None,
        prices: ServicePrices | None = None,
        settings: DeficitSettings | None = None,
    ) -> None:
        self._clock = clock
        self._prices = prices or ServicePrices()
        self._ranks = RequestRanks(clock, locality or NoLocality(), self._prices, settings or DeficitSettings())
        self._tiers = {tier: _TierQueue() for tier in sorted(ServiceTier, key=TIER_PRIORITY.__getitem__)}
        self._entries: dict[RequestId, Entry] = {}
        self._sizes = WaitingSizes()
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestState]:
        return (state for *_, state in self._entries.values())

    def size_of(self, domain: IsolationDomain) -> QueueSize:
        return self._sizes.of(domain)

    @property
    def all_domains(self) -> Collection[IsolationDomain]:
        return self._sizes.domains

    def last_of(self, domain: IsolationDomain) -> Iterator[RequestState]:
        return self._sizes.last_of(domain, self.priority)

    def total_size(self) -> QueueSize:
        return self._sizes.total

    def enqueue(self, state: RequestState) -> None:
        entry = self._entries[state.request_id] = (state.arrived_at, self._num_arrived, state)
        self._num_arrived += 1
        self._sizes.add(state)
        self._tiers[state.request.tier].add(entry)

    def remove(self, state: RequestState) -> None:
        entry = self._entries.pop(state.request_id)
        self._sizes.remove(state)
        self._tiers[state.request.tier].remove(entry)
        self._ranks.locality.forget(state)

    def start(self, state: RequestState) -> None:
        entry = self._entries[state.request_id]
        for tier, queue in self._tiers.items():
            if tier is state.request.tier:
                queue.count_start(entry)
            elif TIER_PRIORITY[tier] > TIER_PRIORITY[state.request.tier] and queue.is_overdue(self._ranks):
                queue.num_passed += 1
        self._ranks.locality.start(state)
        self.remove(state)
        self._ranks.programs.record_turn(state)

    def candidates(self) -> Iterator[RequestState]:
        if len(self._entries) == 1:  # nothing to rank
            yield from self
            return
        ranks = self._ranks.walk()
        walks = {tier: queue.walk(ranks) for tier, queue in self._tiers.items() if queue.by_age}
        passed = {tier: self._tiers[tier].num_passed for tier in walks if self._tiers[tier].is_overdue(self._ranks)}
        while True:
            ready = [tier for tier, walk in walks.items() if walk.best() is not None]
            if not ready:
                return
            due = [tier for tier in ready if passed.get(tier, 0) >= TIER_TURN - 1]
            tier = (due or ready)[0]
            state, _ = walks[tier].take()
            for lower in passed:
                passed[lower] += TIER_PRIORITY[lower] > TIER_PRIORITY[tier]
            passed.update({tier: 0} if tier in passed else {})
            yield state

    def domains(self) -> Iterator[WaitingDomain]:
        for tier, queue in self._tiers.items():
            yield from queue.domains(tier, self._ranks.settings.quantum)

    def best_of(self, waiting: WaitingDomain) -> Iterator[RequestState]:
        walk = self._tiers[waiting.tier].walk_domain(waiting.domain, self._ranks.walk())
        while walk.best() is not None:
            yield walk.take()[0]

    def service(self, state: RequestState) -> float:
        return self.counter(state.request.tier, state.domain)

    @property
    def needs(self) -> WaitingNeeds:
        return self._sizes.needs

    def uncached_tokens(self, state: RequestState) -> int:
        return max(len(state.token_ids) - self._ranks.locality.cached_tokens(state), 1)

    def lines(self, tokens_of: Callable[[RequestState], int]) -> tuple[QueueLines, list[RequestState]]:
        def cost_of(state: RequestState) -> float:
            tokens = 0 if state.is_admitted else tokens_of(state)
            return self._prices.cost(ServiceUse(input_tokens=tokens)) / state.request.weight

        lines: dict[tuple[ServiceTier, IsolationDomain], QueueLine] = {}
        starts: list[tuple[tuple[int, float], RequestState]] = []
        for tier, queue in self._tiers.items():
            for domain, line, states in queue.lines(cost_of):
                lines[tier, domain] = line
                at = [(TIER_PRIORITY[tier], line.counter + cost) for cost in line.costs]
                starts += zip(at, states, strict=False)  # the last cost is that of all
        starts.sort(key=lambda one: one[0])
        floors = {tier: queue.group.floor() for tier, queue in self._tiers.items()}
        keys = tuple(key for key, _ in starts)
        return QueueLines(keys, lines, floors, self._prices.input_token), [state for _, state in starts]

    def priority(self, state: RequestState) -> int:
        """Returns the current priority of a request: 0 is the highest, larger numbers are lower.

        The number falls by one each time that the request has waited for the patience of the order once more.
        """
        promotions = int((self._clock.monotonic() - state.arrived_at) / self._ranks.settings.patience_s)
        return max(TIER_PRIORITY[state.request.tier] - promotions, 0)

    def charge(self, state: RequestState, use: ServiceUse) -> None:
        cost = self._prices.cost(use) / state.request.weight
        self._tiers[state.request.tier].charge(state, cost)

    def counter(self, tier: ServiceTier, domain: IsolationDomain) -> float:
        """Returns the service that a domain has received in a tier: its cost, divided by the domain's weight."""
        return self._tiers[tier].group.counter(domain)

    def check_integrity(self) -> None:
        """Checks that each waiting request is in exactly one flow of its tier and domain."""
        for queue in self._tiers.values():
            queue.check_integrity()
        assert len(self._entries) == sum(len(queue.by_age) for queue in self._tiers.values())
        assert self._sizes.total.requests == len(self._entries)
        self._sizes.check_integrity()


class VirtualTokenCounter(DeficitPrefixOrder):
    """Strict turns between domains by their counters, and between the flows of a domain, whatever is cached.

    Source: Sheng et al. 2024 (arXiv 2401.00588).
    """

    def __init__(self, clock: Clock, prices: ServicePrices | None = None) -> None:
        super().__init__(clock, prices=prices, settings=DeficitSettings(quantum=0.0, programs_first=False))


class _TierQueue:
    """The waiting requests of one service tier, by domain."""

    def __init__(self) -> None:
        self.group = FairGroup()
        self.by_age: list[Entry] = []
        self.num_passed = 0
        """Admissions of higher tiers since this tier had an admission, while its oldest request was overdue."""
        self._domains: dict[IsolationDomain, DomainQueue] = {}

    def add(self, entry: Entry) -> None:
        insort(self.by_age, entry)
        domain = entry[2].domain
        self._domains.setdefault(domain, DomainQueue()).add(entry)
        self.group.begin_waiting(domain)

    def remove(self, entry: Entry) -> None:
        del self.by_age[bisect_left(self.by_age, entry[:2])]
        domain = entry[2].domain
        self._domains[domain].remove(entry)
        if not self._domains[domain].by_age:
            del self._domains[domain]
            self.group.stop_waiting(domain)

    def count_start(self, entry: Entry) -> None:
        self.num_passed = 0
        self._domains[entry[2].domain].count_start(entry)

    def is_overdue(self, ranks: RequestRanks) -> bool:
        return bool(self.by_age) and ranks.is_overdue(self.by_age[0][2])

    def charge(self, state: RequestState, cost: float) -> None:
        self.group.charge(state.domain, cost)
        if state.domain in self._domains:
            self._domains[state.domain].group.charge(flow_of(state.request), cost)

    def lines(
        self, cost_of: Callable[[RequestState], float]
    ) -> Iterator[tuple[IsolationDomain, QueueLine, list[RequestState]]]:
        """Yields each remembered domain, where its new requests would stand, and its waiting requests in order."""
        for domain, counter in self.group.counters().items():
            queue = self._domains.get(domain)  # type: ignore[call-overload]
            line, entries = (QueueLine(counter), []) if queue is None else queue.line(counter, cost_of)
            yield domain, line, [entry[2] for entry in entries]  # type: ignore[misc]

    def domains(self, tier: ServiceTier, quantum: float) -> Iterator[WaitingDomain]:
        """Yields the domains with waiting requests, the smallest counter first."""
        waiting = self.group.waiting
        limit = round_limit(waiting[0][0], quantum) if waiting else 0.0
        for counter, _, member in waiting:
            oldest = self._domains[member.key].by_age[0][2]  # type: ignore[index]
            yield WaitingDomain(tier, oldest, counter < limit)

    def walk(self, ranks: WalkRanks) -> GroupWalk:
        def open_domain(domain: Hashable) -> DomainWalk:
            return self.walk_domain(domain, ranks)  # type: ignore[arg-type]

        return GroupWalk(self.group, open_domain, ranks.settings.quantum, ranks.settings.window)

    def walk_domain(self, domain: IsolationDomain, ranks: WalkRanks) -> DomainWalk:
        return DomainWalk(self._domains[domain], ranks)

    def check_integrity(self) -> None:
        self.group.check_integrity()
        assert self.by_age == sorted(self.by_age, key=lambda entry: entry[:2])
        assert {member.key for *_, member in self.group.waiting} == set(self._domains)
        for queue in self._domains.values():
            queue.check_integrity()
        assert sum(len(queue.by_age) for queue in self._domains.values()) == len(self.by_age)
