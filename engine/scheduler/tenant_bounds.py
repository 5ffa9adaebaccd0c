"""Bounds what one domain may take while others wait: places in the batch, and room in the queue.

    BatchShares   orders the candidates for places, and names who gives up a place
    QueueBounds   decides whether a request may wait, and which waiting requests make room for it

Owns the rules only. Never admits, preempts or fails a request itself: the scheduler asks, and acts on the answer.
Invariant: a domain that is alone may use everything, and nothing stays unused because of a rule here.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from graftwork.engine.scheduler.fair_share import FairShare, QueueSize
from graftwork.engine.scheduler.request_state import RequestState
from graftwork.platform.errors import CapacityContended
from graftwork.platform.ids import IsolationDomain


class BatchShares:
    """The places that each domain holds in the batch, and its fair number of them.

    The fair number is the domain's part of all places by weight, among the domains that run or wait; at least 1.
    It is no limit by itself: a domain exceeds it as long as no other domain is below its own and waits.
    """

    def __init__(self, max_running: int, running: Iterable[RequestState], waiting: Iterable[RequestState]) -> None:
        """Counts the requests that run now. `waiting` are the requests that could start now."""
        self._running = list(running)
        weights: dict[IsolationDomain, float] = {}
        for state in (*self._running, *waiting):
            weights[state.domain] = max(weights.get(state.domain, 0.0), state.request.weight)
        total = sum(weights.values())
        self._fair = {domain: max(1, int(max_running * weight / total)) for domain, weight in weights.items()}
        self._held = Counter(state.domain for state in self._running)

    def ordered(self, candidates: Iterable[RequestState]) -> list[RequestState]:
        """Returns candidates in their order, but first those that fit into their domains' fair numbers."""
        held = self._held.copy()
        within: list[RequestState] = []
        beyond: list[RequestState] = []
        for state in candidates:
            held[state.domain] += 1
            (within if held[state.domain] <= self._fair[state.domain] else beyond).append(state)
        return within + beyond

    def started(self, state: RequestState) -> None:
        """Counts a request that has got a place."""
        self._running.append(state)
        self._held[state.domain] += 1

    def preempted(self, state: RequestState) -> None:
        """Counts a request that has given up its place."""
        self._running.remove(state)
        self._held[state.domain] -= 1

    def victim_for(self, state: RequestState, priority: int) -> RequestState | None:
        """Returns the running request that gives its place to a waiting request of `priority`; None if there is none.

        A domain below its fair number takes a place from the domain that is farthest above its own, whatever the
        priorities. Besides, a request of higher priority takes the place of one of lower priority, unless that would
        take a place from a domain that is within its fair number for a domain that is not.
        """
        movable = [one for one in self._running if not one.pending_loads]
        is_below = self.excess(state) < 0
        over = [one for one in movable if is_below and self._is_above(one)]
        if over:
            return max(over, key=lambda one: (self.excess(one), one.priority, one.arrived_at))
        lower = [one for one in movable if one.priority > priority]
        taken = [one for one in lower if is_below or one.domain == state.domain or self._is_above(one)]
        return max(taken, key=lambda one: (one.priority, one.arrived_at), default=None)

    def excess(self, state: RequestState) -> int:
        """Returns how many places the request's domain holds above its fair number; negative if below."""
        return self._held[state.domain] - self._fair[state.domain]

    def preemption_order(self, state: RequestState) -> tuple[bool, int, int, float]:
        """Returns a key that is largest for the running request to preempt first if pages are short.

        Domains above their fair numbers come first, then low priorities, then domains with many places, then the last
        to arrive.
        """
        return self._is_above(state), state.priority, self.excess(state), state.arrived_at

    def _is_above(self, state: RequestState) -> bool:
        return self.excess(state) > 0


def in_step_order(running: Collection[RequestState], waiting: FairShare, max_running: int) -> list[RequestState]:
    """Returns the running requests in the order in which they get their parts of a step.

    Decoding requests come first; of them, the one to preempt first is the last. Prefills follow by their present
    priority, which rises with time; of equal ones the domains take turns, and the one with few places begins.
    """
    shares = BatchShares(max_running, running, ())
    decoding = [one for one in running if one.num_uncomputed <= 1]
    turns: Counter[tuple[IsolationDomain, int]] = Counter()
    prefills: list[tuple[int, int, int, float, RequestState]] = []
    for state in sorted((one for one in running if one.num_uncomputed > 1), key=lambda one: one.arrived_at):
        priority = waiting.priority(state)
        turn = turns[state.domain, priority]
        prefills.append((priority, turn, shares.excess(state), state.arrived_at, state))
        turns[state.domain, priority] += 1
    in_turn = sorted(prefills, key=lambda entry: entry[:4])
    return sorted(decoding, key=shares.preemption_order) + [state for *_, state in in_turn]


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The most that may wait, over all domains and of one domain. Prompt tokens are counted, not answers."""

    requests: int
    tokens: int
    domain_requests: int
    domain_tokens: int


class QueueBounds:
    """Decides whether a request may wait. A request with no other of its domain in the queue fits its own limits.

    When the whole queue is full, the domain with most waiting makes room for a domain with less: its last request of
    the lowest priority is displaced. Requests that have run before are never displaced.
    """

    def __init__(self, limits: QueueLimits, waiting: FairShare) -> None:
        self._limits = limits
        self._waiting = waiting

    def displaced_by(self, state: RequestState, free_places: int, retry_after_s: float) -> list[RequestState]:
        """Returns the waiting requests that make room for a new one; usually none.

        `free_places` is the number of free places in the batch, which requests in the queue may count on. Raises
        CapacityContended, with the time to retry, if the new request is the one to refuse.
        """
        limits, own = self._limits, self._waiting.size_of(state.domain)
        own_room = QueueSize(limits.domain_requests + free_places, limits.domain_tokens)
        if own.requests and not own.plus(state).fits(own_room):
            raise _full(f"{own} of yours wait, and no more may", retry_after_s)
        total, room = self._waiting.total_size(), QueueSize(limits.requests + free_places, limits.tokens)
        displaced: list[RequestState] = []
        while total.requests and not total.plus(state).fits(room):
            by_tokens = total.requests < room.requests
            last = self._last_of_largest(displaced, by_tokens=by_tokens)
            if last is None or not self._has_more(last, state, displaced, by_tokens=by_tokens):
                raise _full(f"the queue is full: {self._waiting.total_size()} wait", retry_after_s)
            displaced.append(last)
            total = total.minus(last)
        return displaced

    def _last_of_largest(self, gone: list[RequestState], *, by_tokens: bool) -> RequestState | None:
        """Returns the last request of the domain with most waiting, not counting those that are `gone`."""
        movable = [one for one in self._waiting if not one.is_admitted and one not in gone]
        sizes = {domain: self._left(domain, gone) for domain in {one.domain for one in movable}}

        def order(one: RequestState) -> tuple[int, int, float]:
            return sizes[one.domain].measure(by_tokens=by_tokens), self._waiting.priority(one), one.arrived_at

        return max(reversed(movable), key=order, default=None)

    def _has_more(self, last: RequestState, state: RequestState, gone: list[RequestState], *, by_tokens: bool) -> bool:
        """Returns whether the domain of `last` has at least as much without it as the new request's domain with it."""
        left = self._left(last.domain, [*gone, last]).measure(by_tokens=by_tokens)
        own = self._left(state.domain, gone).plus(state).measure(by_tokens=by_tokens)
        return last.domain != state.domain and left >= own

    def _left(self, domain: IsolationDomain, gone: list[RequestState]) -> QueueSize:
        size = self._waiting.size_of(domain)
        for one in gone:
            size = size.minus(one) if one.domain == domain else size
        return size


def displaced_error(retry_after_s: float) -> CapacityContended:
    """Returns the error of a waiting request that made room for a request of another domain."""
    return _full("the queue is full, and most of it are requests of yours", retry_after_s)


def _full(reason: str, retry_after_s: float) -> CapacityContended:
    message = f"This request cannot wait: {reason}. Send fewer requests at a time, and try again later."
    return CapacityContended(message, retry_after_s=retry_after_s)
