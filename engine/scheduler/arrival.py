"""Estimates when a request that arrives would get its first token, and refuses it if that is after its deadline.

    Arrival              what decides about a new request, as numbers
    QueueSnapshot        what the engine has to do at one moment, as numbers
    Backlog              what is ahead of one new request
    estimate_first_token the estimate: from the backlog, the durations of steps and the rate of ends
    check_arrival        the decision: one function for the engine loop and for the thread that receives requests

Owns no state: all here is immutable, so the thread that receives requests decides at once, by the snapshot that the engine
loop has made after its latest step (engine/arrivals.py). Never refuses on evidence that it lacks: without measured steps
there is no estimate, and no request is refused.

An estimate counts what is here now in the order in which it is served, and the part of the service that goes to requests
which arrive later and come first: of higher tiers, and of domains (usually, one domain is one tenant) below their share.
Source: admission by estimated time to first token, as in "early rejection" of Mooncake (arXiv 2407.00079).
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from graftwork.engine.core.deadlines import AIM, UNSURE, unreachable
from graftwork.engine.core.requests import EngineRequest, ServiceTier
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.core.step import PromptWork
from graftwork.engine.scheduler.order.domain_queue import flow_of
from graftwork.engine.scheduler.order.prompt_turns import PromptTurns
from graftwork.engine.scheduler.order.request_state import FirstTokenEstimate
from graftwork.engine.scheduler.order.waiting_order import TIER_PRIORITY, QueueLine, QueueLines
from graftwork.engine.scheduler.step_time import StepPace
from graftwork.platform.ids import IsolationDomain

NUM_LENGTHS = 8
_ROUNDS = 4
"""Those that pass lengthen the wait, in which more pass: so often this is counted."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Fractions of the requests and of the prompt tokens that have started, 0 to 1."""

    requests: float = 0.0
    tokens: float = 0.0
    uncached: float = 1.0
    """What had to be computed of their prompts, 0 to 1."""

    def at_most(self, most: float) -> "Shares":
        return replace(self, requests=min(self.requests, most), tokens=min(self.tokens, most))


@dataclass(frozen=True, slots=True)
class Arrival:
    """What decides about a new request."""

    tier: ServiceTier
    domain: IsolationDomain
    weight: float
    flow: Hashable
    known_tokens: int
    """The tokens of its prompt."""
    uncached_tokens: int
    """What of these must be computed, at least 1."""
    window: RollingWindow | None = None

    @classmethod
    def of(cls, request: EngineRequest, uncached_tokens: int) -> "Arrival":
        known = len(request.prompt_token_ids)
        where = request.tier, request.domain, request.weight, flow_of(request)
        return cls(*where, known, uncached_tokens, request.sampling.rolling_window)

    @property
    def work(self) -> PromptWork:
        return PromptWork.of(self.known_tokens - self.uncached_tokens, self.uncached_tokens, self.window)

    @property
    def held_tokens(self) -> int:
        """About how many of the uncached tokens it holds at a time."""
        return self.uncached_tokens if self.window is None else self.window.seen_of(self.uncached_tokens)

    def cost(self, token_price: float) -> float:
        """Returns what its admission costs its domain, divided by the weight."""
        return token_price * self.uncached_tokens / self.weight


class QueueTotal(NamedTuple):
    """What the first of the waiting requests need together."""

    work: PromptWork = PromptWork()
    pages: int = 0


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """What an engine has to do at one moment. Any thread may read it."""

    num_received: int = 0
    """How many messages with requests the engine loop had taken by then."""
    pace: StepPace = field(default_factory=StepPace)
    ends_per_second: float = 0.0
    """How many times a second one running request ends, in the mean."""
    factors: tuple[float, ...] = (1.0,) * NUM_LENGTHS
    """How much longer than estimated first tokens take, by the length of the estimate; see first_token.py."""
    queue: QueueLines = field(default_factory=QueueLines)
    totals: tuple[QueueTotal, ...] = (QueueTotal(),)
    """What the first n waiting requests of `queue` need together, for each n."""
    prompts: PromptTurns = field(default_factory=PromptTurns)
    """The prompts of running requests."""
    excess: Mapping[IsolationDomain, int] = field(default_factory=dict)
    """Of each domain (usually one tenant), its places above its fair number."""
    with_few_places: Collection[IsolationDomain] = ()
    """The domains with at most half their fair number of places: they get one by preemption."""
    new_excess: int = 0
    """The same of a domain that has nothing here yet."""
    worst_priority: int = 0
    """The lowest priority of a running request; 0 is the highest priority."""
    max_running: int = 1
    running: int = 0
    decoding: int = 0
    """Running requests that get one token in each step."""
    free_pages: int = 0
    """Device pages that requests could get, beyond one for each running request."""
    most_steps: tuple[int, ...] = ()
    """The steps after which each running request ends for certain, because of its limit, smallest first."""
    served: Mapping[tuple[ServiceTier, IsolationDomain], Shares] = field(default_factory=dict)
    """The parts of the service that each tier and domain got lately."""
    weights: Mapping[IsolationDomain, float] = field(default_factory=dict)
    """Of the domains with waiting or running requests."""

    def factor(self, estimated_s: float) -> float:
        """Returns by how much an estimate, in seconds, must be multiplied."""
        return self.factors[length_of(estimated_s, self.pace.mean_s)]

    def guess_uncached(self, request: EngineRequest) -> int:
        """Returns how many tokens of a new request must be computed, if it is as the latest ones of its domain were."""
        return max(math.ceil(len(request.prompt_token_ids) * self.uncached_share(request)), 1)

    def uncached_share(self, request: EngineRequest) -> float:
        """Returns what was uncached of the latest prompts of a request's domain, 0 to 1."""
        return self.served.get((request.tier, request.domain), Shares()).uncached


def length_of(seconds: float, mean_step_s: float) -> int:
    """Returns the binary logarithm of a time in mean steps, between 0 and the largest that is told apart."""
    if mean_step_s <= 0:
        return 0
    return min(int(math.log2(1 + seconds / mean_step_s)), NUM_LENGTHS - 1)


# ---- the estimate -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is ahead of a request under the order in which requests are served."""

    own: PromptWork
    ahead: PromptWork = field(default_factory=PromptWork)
    """Prompts of others that will be computed before its own."""
    decoding: int = 0
    """Requests that get one token in each step meanwhile."""
    ends_needed: int = 0
    """How many running requests must end before this one gets a place in the batch."""
    running: int = 0
    """Requests that run and may end."""
    most_steps: int = 0
    """The number of steps after which `ends_needed` requests have ended for certain, because of their limits."""
    passing: Shares = field(default_factory=Shares)
    """The parts of the service that go to requests which arrive later and come first all the same."""


def backlog_of(snapshot: QueueSnapshot, arrival: Arrival, added: Sequence[Arrival] = ()) -> Backlog:
    """Returns what is ahead of a new request. `added` are the requests that have come since the snapshot was made."""
    queue = snapshot.queue
    before = _passed_by(queue, arrival, added)
    start = queue.start_of(arrival.tier, arrival.domain, arrival.flow, _cost_of_domain(queue, arrival, before))
    num_ahead = bisect_right(queue.starts, start)
    excess = snapshot.excess.get(arrival.domain, snapshot.new_excess)
    priority = start[0]
    has_few = arrival.domain in snapshot.with_few_places or arrival.domain not in snapshot.excess
    prompts = snapshot.prompts.before(arrival.domain, priority, excess, arrival.uncached_tokens, has_few_places=has_few)
    num_prompts = prompts + num_ahead + len(before)
    ahead = snapshot.totals[num_ahead].work + snapshot.prompts.work[prompts]
    ends_needed = _ends_needed(snapshot, num_ahead, before, arrival)
    if (has_few and any(more > 0 for more in snapshot.excess.values())) or snapshot.worst_priority > priority:
        ends_needed = 0  # it gets a place by preemption
    return Backlog(
        own=arrival.work,
        ahead=sum((one.work for one in before), ahead),
        decoding=min(snapshot.decoding + num_prompts // 2, snapshot.max_running - 1),
        ends_needed=ends_needed,
        running=snapshot.running,
        most_steps=_sum_of_rounds(snapshot.most_steps, ends_needed),
        passing=_passing(snapshot, arrival, start, ahead.tokens + sum(one.uncached_tokens for one in before)),
    )


def _passed_by(queue: QueueLines, arrival: Arrival, added: Sequence[Arrival]) -> list[Arrival]:
    """Returns those of `added` that start before the new request: those of its domain, and others in the fair order."""
    costs: dict[tuple[ServiceTier, IsolationDomain], float] = {}
    starts = []
    for one in added:
        key = (one.tier, one.domain)
        starts.append(queue.start_of(*key, one.flow, costs.get(key, 0.0)))
        costs[key] = costs.get(key, 0.0) + one.cost(queue.token_price)
    own = (arrival.tier, arrival.domain)
    last = queue.start_of(*own, arrival.flow, costs.get(own, 0.0))
    return [one for one, start in zip(added, starts, strict=True) if (one.tier, one.domain) == own or start <= last]


def _cost_of_domain(queue: QueueLines, arrival: Arrival, before: Sequence[Arrival]) -> float:
    own = (arrival.tier, arrival.domain)
    return sum(one.cost(queue.token_price) for one in before if (one.tier, one.domain) == own)


def _ends_needed(snapshot: QueueSnapshot, num_ahead: int, before: Sequence[Arrival], arrival: Arrival) -> int:
    """Returns how many running requests must end before the new one has a place and pages, if those ahead come first."""
    size = snapshot.pace.page_tokens
    missing_places = num_ahead + len(before) + 1 - (snapshot.max_running - snapshot.running)
    pages = snapshot.totals[num_ahead].pages + sum(_pages(one, size) for one in (*before, arrival))
    if pages <= snapshot.free_pages or not snapshot.running:
        return max(missing_places, 0)
    fitting = bisect_right(snapshot.totals, snapshot.free_pages, key=lambda total: total.pages) - 1
    return max(missing_places, num_ahead + len(before) + 1 - min(fitting, num_ahead))


def _pages(arrival: Arrival, page_tokens: int) -> int:
    return -(-arrival.held_tokens // page_tokens)


def _passing(snapshot: QueueSnapshot, arrival: Arrival, start: tuple[int, float], ahead_tokens: int) -> Shares:
    """Returns which parts of the service go to requests that arrive while the new one waits, and pass it.

    These are requests of higher tiers, and those of other domains (usually, one domain is one tenant) of which nothing
    waits behind: they pass until their counters are where the new one's is. What a domain has got, it will get: its part of
    the service until the new one starts is that of late, and what it has waiting is counted already.
    """
    most = {
        key: _could_pass(snapshot, *key, start)
        for key in snapshot.served
        if key != (arrival.tier, arrival.domain) and TIER_PRIORITY[key[0]] <= start[0]
    }
    tokens = dict.fromkeys(most, 0.0)
    for _ in range(_ROUNDS):
        total = ahead_tokens + sum(tokens.values())
        for (tier, domain), (waiting, could_pass) in most.items():
            will_get = snapshot.served[tier, domain].tokens * total
            tokens[tier, domain] = min(max(will_get - waiting, 0.0), could_pass)
    total = max(ahead_tokens + sum(tokens.values()), 1.0)
    weights = {**snapshot.weights, arrival.domain: arrival.weight}
    fair = arrival.weight / sum(weights.values())
    requests = sum(
        part / total * snapshot.served[key].requests / snapshot.served[key].tokens for key, part in tokens.items()
    )
    return Shares(requests, sum(tokens.values()) / total).at_most(1 - min(fair, 0.5))


def _could_pass(
    snapshot: QueueSnapshot, tier: ServiceTier, domain: IsolationDomain, start: tuple[int, float]
) -> tuple[float, float]:
    """Returns how many prompt tokens of a domain in a tier wait, and how many more may start before the sort key `start`."""
    queue, weight = snapshot.queue, snapshot.weights.get(domain, 1.0)
    line = queue.lines.get((tier, domain), QueueLine(queue.floors.get(tier, 0.0)))
    in_tokens = weight / queue.token_price
    gap = start[1] - line.counter - line.costs[-1] if TIER_PRIORITY[tier] == start[0] else math.inf
    return line.costs[-1] * in_tokens, max(gap, 0.0) * in_tokens


def estimate_first_token(backlog: Backlog, pace: StepPace, ends_per_second: float) -> FirstTokenEstimate | None:
    """Estimates when the first token of a request with this backlog comes. None if nothing was measured yet.

    The request waits for a place, and for the prompts ahead of it. Both go on at the same time, and its own prompt is
    computed after them. Requests that will arrive and pass it lengthen both.
    """
    if not pace.is_known:
        return None
    places_s = 0.0
    if backlog.ends_needed:
        places_s = backlog.most_steps * pace.mean_s
        if ends_per_second and backlog.running:
            places_s = min(places_s, backlog.ends_needed / (ends_per_second * backlog.running))
    own_s = pace.seconds_of_prompts(backlog.own, backlog.decoding)
    ahead_s = pace.seconds_of_prompts(backlog.ahead + backlog.own, backlog.decoding) - own_s
    wait_s = max(places_s / (1 - backlog.passing.requests), ahead_s / (1 - backlog.passing.tokens))
    return FirstTokenEstimate(wait_s, own_s)


def _sum_of_rounds(most_steps: Sequence[int], ends_needed: int) -> int:
    """Returns the steps after which `ends_needed` requests have ended. Those that start meanwhile are taken to run as
    long as the longest that runs now.
    """
    if not ends_needed or not most_steps:
        return 0
    rounds, rest = divmod(ends_needed - 1, len(most_steps))
    return rounds * most_steps[-1] + most_steps[rest]


# ---- the decision -------------------------------------------------------------------------------------------------


def check_arrival(
    snapshot: QueueSnapshot, arrival: Arrival, deadline_s: float, added: Sequence[Arrival] = ()
) -> FirstTokenEstimate | None:
    """Returns when the first token of a new request is expected; None if nothing was measured yet.

    Raises CapacityContended, with the time to retry, if that is too late for a deadline in `deadline_s` seconds (see `AIM`).
    Raises Unavailable if the deadline could not be met even on an idle engine, so that waiting does not help.
    """
    expected = estimate_first_token(backlog_of(snapshot, arrival, added), snapshot.pace, snapshot.ends_per_second)
    if expected is not None and (estimate_s := _corrected_s(snapshot, expected)) > AIM * deadline_s:
        raise unreachable(deadline_s, estimate_s, snapshot.pace.seconds_of_prompts(arrival.work, 0))
    return expected


def expected_first_token_s(snapshot: QueueSnapshot, arrival: Arrival, added: Sequence[Arrival] = ()) -> float | None:
    """Returns the seconds to the first token of a new request that `check_arrival` holds against its deadline; None if
    nothing was measured yet.
    """
    expected = estimate_first_token(backlog_of(snapshot, arrival, added), snapshot.pace, snapshot.ends_per_second)
    return None if expected is None else _corrected_s(snapshot, expected)


def _corrected_s(snapshot: QueueSnapshot, expected: FirstTokenEstimate) -> float:
    estimate_s = expected.total_s * snapshot.factor(expected.total_s)
    if snapshot.running:
        estimate_s += snapshot.pace.mean_s  # of the step that runs: nothing is admitted before it ends
    return estimate_s


def is_sure(snapshot: QueueSnapshot, arrival: Arrival, deadline_s: float) -> bool:
    """Returns whether a request may be refused although it is only a guess what of its prompt is cached: the guess must be
    a small part of the deadline.
    """
    return snapshot.pace.seconds_of_prompts(arrival.work, 0) <= UNSURE * deadline_s
