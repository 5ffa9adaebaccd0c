"""Limits what one domain (usually one tenant) gets while others wait: places in the batch, and room in the queue.

    BatchShares      chooses the running request that gives up its place to a waiting one
    in_step_order    the order in which running requests get tokens of the next step
    RunningPrompts   holds back a request whose prompt would only wait in the batch
    QueueBounds      decides whether a request may wait, and which waiting requests make room for it

Owns only the rules. Never admits, preempts or fails a request: the scheduler does.
Invariant: if only one domain sends requests, it may use all places. No place stays empty because of a rule here.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from graftwork.engine.scheduler.request_state import RequestState
from graftwork.engine.scheduler.step_time import PromptWork
from graftwork.engine.scheduler.waiting_order import QueueSize, WaitingOrder
from graftwork.platform.errors import CapacityContended
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
        waiting: Iterable[RequestState],
        settled_since: float = float("inf"),
    ) -> None:
        """`running` are the requests in the batch. `waiting` are the requests that could start now.

        Only requests that started at step `settled_since` or before have run long enough to give up their places.
        """
        self._running = list(running)
        self._settled_since = settled_since
        weights: dict[IsolationDomain, float] = {}
        for state in (*self._running, *waiting):
            weights[state.domain] = max(weights.get(state.domain, 0.0), state.request.weight)
        self._max_running, self._weight = max_running, sum(weights.values())
        self._fair = {domain: self._places_of(weight, self._weight) for domain, weight in weights.items()}
        self._held = Counter(state.domain for state in self._running)
        self._without_victims: set[tuple[IsolationDomain, int]] = set()

    def _places_of(self, weight: float, total: float) -> int:
        return max(1, int(self._max_running * weight / total))

    def excess_by_domain(self) -> dict[IsolationDomain, int]:
        """Returns the `excess` of each domain (usually one tenant) with running or waiting requests."""
        return {domain: self._held[domain] - fair for domain, fair in self._fair.items()}

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
        fair number, these are the requests of domains above their own fair number, whatever the priorities. Otherwise
        they are requests of lower priority: of the same domain, or of a domain above its fair number.
        """
        rank = (state.domain, priority)
        if rank in self._without_victims:
            return []
        movable = [one for one in self._running if not one.pending_loads and one.started_at_step <= self._settled_since]
        is_below = self.excess(state) < 0
        victims = [one for one in movable if is_below and self._is_above(one)]
        if not victims:
            lower = [one for one in movable if one.priority > priority]
            victims = [one for one in lower if is_below or one.domain == state.domain or self._is_above(one)]
        if not victims:
            self._without_victims.add(rank)
        return victims

    def excess(self, state: RequestState) -> int:
        """Returns how many places the request's domain (usually one tenant) has above its fair number.

        The number is negative if the domain has fewer places.
        """
        return self._held[state.domain] - self._fair[state.domain]

    def has_few_places(self, state: RequestState) -> bool:
        """Returns whether the request's domain (usually one tenant) has at most half its fair number of places."""
        return 2 * self._held[state.domain] <= self._fair[state.domain]

    def preemption_order(self, state: RequestState) -> tuple[int, int]:
        """Returns a sort key: the running request with the largest key is preempted first.

        The key is larger for a lower priority, and among equals for a domain (usually one tenant) with more places above
        its fair number.
        """
        return state.priority, self.excess(state)

    def _is_above(self, state: RequestState) -> bool:
        return self.excess(state) > 0


def in_step_order(
    running: Collection[RequestState], waiting: WaitingOrder, max_running: int, max_tokens: int
) -> list[RequestState]:
    """Returns the running requests in the order in which they get tokens of the next step.

    Decoding requests come first; among them, the request that would be preempted first is the last. Then come requests
    whose prompts are not computed, by their current priority, which rises with time. At equal priority, the domains
    (usually, one domain is one tenant) take turns. Those with places above their fair number come last. A prompt of more
    tokens than `max_tokens`, those of a step, lets shorter ones of other domains pass: its own domain has been charged for
    all of it. Among equals, the request that started first begins.
    """
    shares = BatchShares(max_running, running, ())
    decoding = [one for one in running if one.num_uncomputed <= 1]
    decoding.sort(key=lambda one: (*shares.preemption_order(one), one.arrived_at))
    return decoding + [state for _, state in _prompts_in_turn(running, waiting, shares, max_tokens)]


PromptTurn = tuple[int, int, int, float, float]
"""A sort key of prompts: the priority, the turn of the domain, whether the prompt lets others pass, the step of the start,
and the time of arrival.
"""


def _lets_pass(excess: int, tokens: int, max_tokens: int) -> int:
    """Returns 2 for a prompt of a domain above its fair number of places, 1 for one of more than a step, 0 for others."""
    return 2 if excess > 0 else int(tokens > max_tokens)


def _prompts_in_turn(
    running: Iterable[RequestState], waiting: WaitingOrder, shares: BatchShares, max_tokens: int
) -> list[tuple[PromptTurn, RequestState]]:
    """Returns the requests whose prompts are not computed, in the order in which they get tokens, with their sort keys."""
    turns: Counter[tuple[IsolationDomain, int]] = Counter()
    found: list[tuple[PromptTurn, RequestState]] = []
    for state in sorted((one for one in running if one.num_uncomputed > 1), key=lambda one: one.arrived_at):
        priority = waiting.priority(state)
        turn = turns[state.domain, priority]
        passed = _lets_pass(shares.excess(state), state.num_uncomputed, max_tokens)
        found.append(((priority, turn, passed, state.started_at_step, state.arrived_at), state))
        turns[state.domain, priority] += 1
    found.sort(key=lambda entry: entry[0])
    return found


@dataclass(frozen=True, slots=True)
class PromptTurns:
    """The prompts of running requests in the order in which steps compute them, as numbers. Any thread may read it."""

    turns: tuple[PromptTurn, ...] = ()
    work: tuple[PromptWork, ...] = (PromptWork(),)
    """What stands ahead of each prompt, and behind the last one the work of all."""
    domain_turns: Mapping[tuple[IsolationDomain, int], int] = field(default_factory=dict)
    """How many of the prompts each domain (usually one tenant) has in each priority."""
    max_tokens: int = 0
    """The most tokens of a step."""

    @classmethod
    def of(
        cls, running: Iterable[RequestState], waiting: WaitingOrder, shares: BatchShares, max_tokens: int
    ) -> "PromptTurns":
        """Returns the prompts of these requests. A request whose KV is being loaded has a turn, but no work yet."""
        in_turn = _prompts_in_turn(running, waiting, shares, max_tokens)
        return cls(
            turns=tuple(turn for turn, _ in in_turn),
            work=tuple(accumulate((_work_left(state) for _, state in in_turn), initial=PromptWork())),
            domain_turns=Counter((state.domain, turn[0]) for turn, state in in_turn),
            max_tokens=max_tokens,
        )

    def before(self, domain: IsolationDomain, priority: int, excess: int, tokens: int) -> int:
        """Returns how many of the prompts would be computed before one of `tokens` tokens of a new request of `domain`, which
        has `excess` places above its fair number without it.
        """
        turn = self.domain_turns.get((domain, priority), 0)
        return bisect_left(self.turns, (priority, turn, _lets_pass(excess + 1, tokens, self.max_tokens), math.inf, 0.0))


class RunningPrompts:
    """Holds back a waiting request as long as its prompt would only wait in the batch.

    A request with a place has passed all checks of the queue: nobody refuses it any more, and no lighter domain (usually,
    one domain is one tenant) goes before it by the counters. So a request starts only if fewer prompt tokens stand ahead of
    it than one step computes. Requests that have run before, and so have a part of their answer, are never held back.
    """

    def __init__(self, running: Collection[RequestState], waiting: WaitingOrder, max_tokens: int) -> None:
        """`running` may change later: call `started` then. `max_tokens` is the most tokens of a step."""
        self._running = running
        self._waiting = waiting
        self._max_tokens = max_tokens
        self._total = sum(_work_left(state).tokens for state in running)
        self._turns: PromptTurns | None = None

    @property
    def room(self) -> int:
        """How many more prompt tokens may start until only those of lighter domains and higher tiers may."""
        return self._max_tokens - self._total

    def started(self, state: RequestState) -> None:
        """Records that a request has got a place."""
        self._total += _work_left(state).tokens
        self._turns = None

    def hold(self, state: RequestState, shares: BatchShares) -> bool:
        """Returns whether a waiting request must not start now."""
        if self._total < self._max_tokens or state.has_run:
            return False
        if self._turns is None:
            self._turns = PromptTurns.of(self._running, self._waiting, shares, self._max_tokens)
        priority, excess = self._waiting.priority(state), shares.excess(state)
        before = self._turns.before(state.domain, priority, excess, self._waiting.uncached_tokens(state))
        return self._turns.work[before].tokens >= self._max_tokens


def _work_left(state: RequestState) -> PromptWork:
    """Returns what the next steps compute of a running request's prompt; nothing while its KV is loaded."""
    if state.pending_loads or state.num_uncomputed <= 1:
        return PromptWork()
    return PromptWork.of(state.num_scheduled, state.num_uncomputed)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The most requests and prompt tokens in the queue: of all domains, and of one domain (usually one tenant)."""

    requests: int
    tokens: int
    domain_requests: int
    domain_tokens: int


class QueueBounds:
    """Decides whether a request may wait.

    One request of each domain (usually one tenant) may wait, however long its prompt is. For more, the domain's limits
    hold. If the whole queue is full, a domain with fewer waiting requests displaces the last request of the domain
    with the most. Requests that have run before are never displaced.
    """

    def __init__(self, limits: QueueLimits, waiting: WaitingOrder) -> None:
        self._limits = limits
        self._waiting = waiting

    def displaced_by(self, state: RequestState, free_places: int, retry_after_s: float) -> list[RequestState]:
        """Returns the waiting requests that must end to make room for the new request `state`. Usually there are none.

        `free_places` is the number of free places in the batch: so many more requests may wait. Raises
        CapacityContended, with `retry_after_s`, if the new request may not wait. A request with an earlier run may always
        wait: its client has a part of the answer.
        """
        if state.has_run:
            return []
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
        """Returns the last waiting request of the domain (usually one tenant) with the most waiting.

        Leaves out the requests in `gone` and requests that have run before. Returns None if no request is left.
        """
        movable = [one for one in self._waiting if not one.has_run and one not in gone]
        sizes = {domain: self._left(domain, gone) for domain in {one.domain for one in movable}}

        def order(one: RequestState) -> tuple[int, int, float]:
            return sizes[one.domain].measure(by_tokens=by_tokens), self._waiting.priority(one), one.arrived_at

        return max(reversed(movable), key=order, default=None)

    def _has_more(self, last: RequestState, state: RequestState, gone: list[RequestState], *, by_tokens: bool) -> bool:
        """Returns whether the domain (usually one tenant) of `last` has at least as many waiting without `last` as the
        domain of the new request `state` has with it. Always False for the same domain.
        """
        left = self._left(last.domain, [*gone, last]).measure(by_tokens=by_tokens)
        own = self._left(state.domain, gone).plus(state).measure(by_tokens=by_tokens)
        return last.domain != state.domain and left >= own

    def _left(self, domain: IsolationDomain, gone: list[RequestState]) -> QueueSize:
        size = self._waiting.size_of(domain)
        for one in gone:
            size = size.minus(one) if one.domain == domain else size
        return size


def displaced_error(retry_after_s: float) -> CapacityContended:
    """Returns the error for a waiting request that makes room for a request of another domain (usually one tenant)."""
    return _full("the queue is full, and most of it are requests of yours", retry_after_s)


def _full(reason: str, retry_after_s: float) -> CapacityContended:
    message = f"This request cannot wait: {reason}. Send fewer requests at a time, and try again later."
    return CapacityContended(message, retry_after_s=retry_after_s)
