"""Orders the waiting requests by deficit longest prefix match: fair between tenants, without destroying locality.

Owns the queues and their counters. Never changes a request, and never checks whether there is room for it.

    service tier      a higher tier goes first; a lower tier with an overdue request gets every `TIER_TURN`-th admission
    domain            (usually one tenant) whose counter is below the limit of the round; see fair_group.py
    flow              one session, or the requests of one set of adapters outside sessions: shared alike in a domain
    request           the oldest of its flow

Among domains below the limit, a request that was preempted goes first, then the one that saves most: the tokens of its
prompt whose KV is cached, and the load of its adapters if they are on the device. Among the flows of a domain, the next
turn of a running agent program goes before new programs. If the oldest request of a domain is overdue, it gets every
`DOMAIN_TURN`-th admission of the domain. So nobody waits for ever, whatever the others send.

Each tier has its own counters. Source: Deficit Longest Prefix Match, Cao et al. 2025 (arXiv 2501.14312).
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from graftwork.engine.core.requests import ServiceTier, SessionKey
from graftwork.engine.scheduler.fair_group import FairGroup, GroupWalk, Rank
from graftwork.engine.scheduler.locality import Locality, NoLocality
from graftwork.engine.scheduler.request_state import RequestState
from graftwork.engine.scheduler.service_cost import ServicePrices, ServiceUse
from graftwork.engine.scheduler.waiting_order import TIER_PRIORITY, QueueSize, WaitingSizes
from graftwork.platform.clock import Clock
from graftwork.platform.ids import IsolationDomain, RequestId

TIER_TURN = 8
"""A tier with an overdue request gets at least one of so many admissions."""
DOMAIN_TURN = 4
"""The oldest request of a domain, if it is overdue, gets at least one of so many admissions of its domain."""
MAX_PROGRAMS = 4096
"""The most sessions whose last turn is remembered."""

Entry = tuple[float, int, RequestState]
"""A waiting request with its time of arrival and a number that makes entries distinct."""


@dataclass(frozen=True, slots=True)
class DeficitSettings:
    """How far the order may deviate from strict turns, and for how long."""

    quantum: float = 2048.0
    """The most by which two domains of weight 1 may differ for the sake of locality, in uncached prompt tokens; 0 means
    strict turns. A good value is a few steps of prompt tokens.
    """
    patience_s: float = 30.0
    """A request that has waited so many seconds is overdue."""
    adapter_tokens: int = 256
    """How many cached tokens an adapter on the device is worth: the tokens that are computed in the time of a load."""
    programs_first: bool = True
    """Whether turns of running agent programs go before new programs of the same domain."""
    program_idle_s: float = 300.0
    """A session whose last turn started longer ago is no running program any more."""
    window: int = 16
    """The most members of a group that are compared by locality in a round."""


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
        self._view = _View(clock, locality or NoLocality(), self._prices, settings or DeficitSettings())
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
        self._view.locality.forget(state)

    def start(self, state: RequestState) -> None:
        entry = self._entries[state.request_id]
        for tier, queue in self._tiers.items():
            if tier is state.request.tier:
                queue.count_start(entry)
            elif TIER_PRIORITY[tier] > TIER_PRIORITY[state.request.tier] and queue.is_overdue(self._view):
                queue.num_passed += 1
        self.remove(state)
        self._view.programs.record_turn(state)

    def candidates(self) -> Iterator[RequestState]:
        walks = {tier: queue.walk(self._view) for tier, queue in self._tiers.items() if queue.by_age}
        passed = {tier: self._tiers[tier].num_passed for tier in walks if self._tiers[tier].is_overdue(self._view)}
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

    def priority(self, state: RequestState) -> int:
        """Returns the current priority of a request: 0 is the highest, larger numbers are lower.

        The number falls by one each time that the request has waited for the patience of the order once more.
        """
        promotions = int((self._clock.monotonic() - state.arrived_at) / self._view.settings.patience_s)
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


class VirtualTokenCounter(DeficitPrefixOrder):
    """Strict turns between domains by their counters, and between the flows of a domain, whatever is cached.

    Source: Sheng et al. 2024 (arXiv 2401.00588).
    """

    def __init__(self, clock: Clock, prices: ServicePrices | None = None) -> None:
        super().__init__(clock, prices=prices, settings=DeficitSettings(quantum=0.0, programs_first=False))


class _Programs:
    """Remembers when each session last started a turn."""

    def __init__(self, clock: Clock, idle_s: float) -> None:
        self._clock = clock
        self._idle_s = idle_s
        self._turns: OrderedDict[tuple[IsolationDomain, SessionKey], float] = OrderedDict()

    def record_turn(self, state: RequestState) -> None:
        if state.request.session is None:
            return
        key = (state.domain, state.request.session.session)
        self._turns[key] = self._clock.monotonic()
        self._turns.move_to_end(key)
        if len(self._turns) > MAX_PROGRAMS:
            self._turns.popitem(last=False)

    def is_running(self, state: RequestState) -> bool:
        session = state.request.session
        last = None if session is None else self._turns.get((state.domain, session.session))
        return last is not None and self._clock.monotonic() - last <= self._idle_s


class _View:
    """What decides between requests besides the counters: locality, costs, running programs, and time."""

    def __init__(self, clock: Clock, locality: Locality, prices: ServicePrices, settings: DeficitSettings) -> None:
        self._clock = clock
        self.locality = locality
        self._prices = prices
        self.settings = settings
        self.programs = _Programs(clock, settings.program_idle_s)

    def rank_and_cost(self, state: RequestState) -> tuple[Rank, float]:
        """Returns the rank of a request among the flows of its domain, and what its admission will cost the domain."""
        cached = self.locality.cached_tokens(state)
        saved = cached + (self.settings.adapter_tokens if self.locality.has_adapters(state) else 0)
        is_new = not (self.settings.programs_first and self.programs.is_running(state))
        uncached = 0 if state.is_admitted else max(state.num_prompt - cached, 1)
        cost = self._prices.cost(ServiceUse(input_tokens=uncached)) / state.request.weight
        return (not state.is_admitted, is_new, -saved, state.arrived_at), cost

    def is_overdue(self, entry: Entry) -> bool:
        return self._clock.monotonic() - entry[0] >= self.settings.patience_s


class _TierQueue:
    """The waiting requests of one service tier, by domain."""

    def __init__(self) -> None:
        self.group = FairGroup()
        self.by_age: list[Entry] = []
        self.num_passed = 0
        """Admissions of higher tiers since this tier had an admission, while its oldest request was overdue."""
        self._domains: dict[IsolationDomain, _DomainQueue] = {}

    def add(self, entry: Entry) -> None:
        insort(self.by_age, entry)
        domain = entry[2].domain
        self._domains.setdefault(domain, _DomainQueue()).add(entry)
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

    def is_overdue(self, view: _View) -> bool:
        return bool(self.by_age) and view.is_overdue(self.by_age[0])

    def charge(self, state: RequestState, cost: float) -> None:
        self.group.charge(state.domain, cost)
        if state.domain in self._domains:
            self._domains[state.domain].group.charge(flow_of(state), cost)

    def walk(self, view: _View) -> GroupWalk:
        def open_domain(domain: Hashable) -> _DomainWalk:
            return _DomainWalk(self._domains[domain], view)  # type: ignore[index]

        return GroupWalk(self.group, open_domain, view.settings.quantum, view.settings.window)

    def check_integrity(self) -> None:
        self.group.check_integrity()
        assert self.by_age == sorted(self.by_age, key=lambda entry: entry[:2])
        assert {member.key for *_, member in self.group.waiting} == set(self._domains)
        for queue in self._domains.values():
            queue.check_integrity()
        assert sum(len(queue.by_age) for queue in self._domains.values()) == len(self.by_age)


def flow_of(state: RequestState) -> Hashable:
    """Returns the key of a request's flow: its session, or its adapters if it has none."""
    session = state.request.session
    return (state.request.adapters, None if session is None else session.session)


class _DomainQueue:
    """The waiting requests of one domain (usually one tenant) in one tier, by flow; the oldest of each flow first."""

    def __init__(self) -> None:
        self.group = FairGroup()
        self.by_age: list[Entry] = []
        self.flows: dict[Hashable, list[Entry]] = {}
        self.num_since_oldest = 0
        """Admissions since the request that was the oldest was admitted."""

    def add(self, entry: Entry) -> None:
        insort(self.by_age, entry)
        key = flow_of(entry[2])
        insort(self.flows.setdefault(key, []), entry)
        self.group.begin_waiting(key)

    def remove(self, entry: Entry) -> None:
        del self.by_age[bisect_left(self.by_age, entry[:2])]
        key = flow_of(entry[2])
        flow = self.flows[key]
        del flow[bisect_left(flow, entry[:2])]
        if not flow:
            del self.flows[key]
            self.group.stop_waiting(key)

    def count_start(self, entry: Entry) -> None:
        self.num_since_oldest = 0 if entry is self.by_age[0] else self.num_since_oldest + 1

    def check_integrity(self) -> None:
        self.group.check_integrity()
        assert sorted(self.by_age) == sorted(entry for flow in self.flows.values() for entry in flow)


class _FlowWalk:
    """The requests of one flow during a walk. Implements Source."""

    def __init__(self, flow: list[Entry], view: _View) -> None:
        self._flow = flow
        self._view = view
        self._index = 0
        self._head: tuple[Rank, float] | None = None

    def best(self) -> Rank | None:
        if self._index == len(self._flow):
            return None
        if self._head is None:
            self._head = self._view.rank_and_cost(self._flow[self._index][2])
        return self._head[0]

    def take(self) -> tuple[RequestState, float]:
        self.best()
        assert self._head is not None
        state, cost = self._flow[self._index][2], self._head[1]
        self._index, self._head = self._index + 1, None
        return state, cost


class _DomainWalk:
    """The requests of one domain (usually one tenant) during a walk. Implements Source."""

    def __init__(self, queue: _DomainQueue, view: _View) -> None:
        self._queue = queue
        self._view = view
        self._flows = GroupWalk(queue.group, self._open_flow, view.settings.quantum, view.settings.window)
        self._taken: set[RequestId] = set()
        self._oldest = 0
        self._num_since_oldest = queue.num_since_oldest

    def _open_flow(self, key: Hashable) -> _FlowWalk:
        return _FlowWalk(self._queue.flows[key], self._view)

    def best(self) -> Rank | None:
        """Returns the rank of the next request among domains. It leaves out which program the request belongs to."""
        rank = self._flows.best()
        return None if rank is None else (rank[0], rank[2])

    def take(self) -> tuple[RequestState, float]:
        oldest = self._oldest_entry()
        is_due = self._num_since_oldest >= DOMAIN_TURN - 1 and self._view.is_overdue(oldest)
        state, cost = self._flows.take_from(flow_of(oldest[2])) if is_due else self._flows.take()
        self._taken.add(state.request_id)
        self._num_since_oldest = 0 if state is oldest[2] else self._num_since_oldest + 1
        return state, cost

    def _oldest_entry(self) -> Entry:
        """Returns the oldest request that the walk has not taken. It is the first that is left of its flow."""
        while self._queue.by_age[self._oldest][2].request_id in self._taken:
            self._oldest += 1
        return self._queue.by_age[self._oldest]
