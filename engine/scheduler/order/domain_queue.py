"""The waiting requests of one domain (usually one tenant) in one service tier, by flow.

    flow          one session, or the requests of one set of adapters outside sessions: shared alike in a domain
    DomainQueue   the requests of a domain by flow, and the counters of the flows
    DomainWalk    chooses the requests of a domain one after the other, without changing the queue

Of each flow, a window of its oldest requests is compared by rank (request_rank.py). If the oldest request of the domain
is overdue, it gets every `DOMAIN_TURN`-th admission of the domain. So a request is passed by others of its domain for a
bounded time. Each choice costs O(log n) comparisons, and reads the ranks of a bounded number of requests.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate

from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.scheduler.order.fair_group import FairGroup, GroupWalk, Rank
from graftwork.engine.scheduler.order.request_rank import WalkRanks
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import QueueLine
from graftwork.platform.ids import RequestId

DOMAIN_TURN = 4
"""The oldest request of a domain, if it is overdue, gets at least one of so many admissions of its domain."""

Entry = tuple[float, int, RequestState]
"""A waiting request with its time of arrival and a number that makes entries distinct."""


def flow_of(request: EngineRequest) -> Hashable:
    """Returns the key of a request's flow: its session, or its adapters if it has none.

    Requests with an earlier run on another engine have flows of their own, so that none of them waits behind a new one.
    """
    session = request.session
    return (request.adapters, None if session is None else session.session, bool(request.emitted_token_ids))


class DomainQueue:
    """The waiting requests of one domain (usually one tenant) in one tier, by flow; the oldest of each flow first."""

    def __init__(self) -> None:
        self.group = FairGroup()
        self.by_age: list[Entry] = []
        self.flows: dict[Hashable, list[Entry]] = {}
        self.num_since_oldest = 0
        """Admissions since the request that was the oldest was admitted."""

    def add(self, entry: Entry) -> None:
        insort(self.by_age, entry)
        key = flow_of(entry[2].request)
        insort(self.flows.setdefault(key, []), entry)
        self.group.begin_waiting(key)

    def remove(self, entry: Entry) -> None:
        del self.by_age[bisect_left(self.by_age, entry[:2])]
        key = flow_of(entry[2].request)
        flow = self.flows[key]
        del flow[bisect_left(flow, entry[:2])]
        if not flow:
            del self.flows[key]
            self.group.stop_waiting(key)

    def count_start(self, entry: Entry) -> None:
        self.num_since_oldest = 0 if entry is self.by_age[0] else self.num_since_oldest + 1

    def line(self, counter: float, cost_of: Callable[[RequestState], float]) -> tuple[QueueLine, list[Entry]]:
        """Returns where new requests of this domain would stand if its counter is `counter`, and its waiting requests in
        the order of `QueueLine.flow_starts`. `cost_of` returns what the admission of a request costs, divided by the weight.
        """
        flow_ends = self.group.counters()
        starts: list[tuple[float, float, Entry]] = []
        for key, entries in self.flows.items():
            for entry in entries:
                cost = cost_of(entry[2])
                starts.append((flow_ends[key], cost, entry))
                flow_ends[key] += cost
        starts.sort(key=lambda one: (one[0], one[2][:2]))
        line = QueueLine(
            counter=counter,
            flow_ends=flow_ends,
            flow_floor=self.group.floor(),
            flow_starts=tuple(start for start, *_ in starts),
            costs=tuple(accumulate((cost for _, cost, _ in starts), initial=0.0)),
        )
        return line, [entry for *_, entry in starts]

    def check_integrity(self) -> None:
        self.group.check_integrity()
        assert sorted(self.by_age) == sorted(entry for flow in self.flows.values() for entry in flow)


class _FlowWalk:
    """The requests of one flow during a walk. Implements Source."""

    def __init__(self, flow: list[Entry], ranks: WalkRanks, window: int) -> None:
        """At most the `window` oldest requests that are left are compared at a time."""
        self._flow = flow
        self._ranks = ranks
        self._window = window
        self._next = 0
        self._compared: list[tuple[Rank, int, float, int]] = []
        """A heap: the rank of a request, its place in the flow, its cost, and how many requests the walk had taken."""

    def best(self) -> Rank | None:
        while len(self._compared) < self._window and self._next < len(self._flow):
            heappush(self._compared, self._entry(self._next))
            self._next += 1
        while self._compared:
            rank, index, _, num_taken = self._compared[0]
            if num_taken == self._ranks.num_taken:
                return rank
            heapreplace(self._compared, self._entry(index))
        return None

    def take(self) -> tuple[RequestState, float]:
        self.best()
        _, index, cost, _ = heappop(self._compared)
        return self._taken(index, cost)

    def take_oldest(self) -> tuple[RequestState, float]:
        self.best()
        entry = min(self._compared, key=lambda compared: compared[1])
        self._compared.remove(entry)
        heapify(self._compared)
        return self._taken(entry[1], entry[2])

    def _entry(self, index: int) -> tuple[Rank, int, float, int]:
        rank, cost = self._ranks.rank_and_cost(self._flow[index][2])
        return rank, index, cost, self._ranks.num_taken

    def _taken(self, index: int, cost: float) -> tuple[RequestState, float]:
        state = self._flow[index][2]
        self._ranks.take(state)
        return state, cost


class DomainWalk:
    """The requests of one domain (usually one tenant) during a walk. Implements Source."""

    def __init__(self, queue: DomainQueue, ranks: WalkRanks) -> None:
        self._queue = queue
        self._ranks = ranks
        settings = ranks.settings
        self._window = max(settings.requests // len(queue.flows), 1)
        self._flows = GroupWalk(queue.group, self._open_flow, settings.quantum, settings.window)
        self._taken: set[RequestId] = set()
        self._oldest = 0
        self._num_since_oldest = queue.num_since_oldest

    def _open_flow(self, key: Hashable) -> _FlowWalk:
        return _FlowWalk(self._queue.flows[key], self._ranks, self._window)

    def best(self) -> Rank | None:
        """Returns the rank of the next request among domains. It leaves out which program the request belongs to."""
        rank = self._flows.best()
        return None if rank is None else (rank[0], rank[1], rank[3])

    def take(self) -> tuple[RequestState, float]:
        is_due = self._num_since_oldest >= DOMAIN_TURN - 1 and self._ranks.is_overdue(self._oldest_entry()[2])
        return self.take_oldest() if is_due else self._took(self._flows.take())

    def take_oldest(self) -> tuple[RequestState, float]:
        return self._took(self._flows.take_from(flow_of(self._oldest_entry()[2].request)))

    def _took(self, choice: tuple[RequestState, float]) -> tuple[RequestState, float]:
        state = choice[0]
        self._num_since_oldest = 0 if state is self._oldest_entry()[2] else self._num_since_oldest + 1
        self._taken.add(state.request_id)
        return choice

    def _oldest_entry(self) -> Entry:
        """Returns the oldest request that the walk has not taken. It is the oldest that is left of its flow."""
        while self._queue.by_age[self._oldest][2].request_id in self._taken:
            self._oldest += 1
        return self._queue.by_age[self._oldest]
