"""Estimates when a new request would get its first token, and refuses requests whose deadlines cannot be met.

    Backlog              what is ahead of one new request, as numbers
    estimate_first_token the estimate: from the backlog, the step times (step_time.py) and the rate of ends
    Correction           how much longer than estimated first tokens have taken
    DeadlineAdmission    refuses on arrival, and finds the waiting requests whose deadlines have passed

Owns the deadlines of waiting requests. Never refuses on evidence that it lacks: without measured steps there is no
estimate, and no request is refused. An estimate counts what is here now in the order in which it is served, and the part
of the service that goes to requests which arrive later and come first: of higher tiers, and of domains (usually, one
domain is one tenant) below their share.
Source: admission by estimated time to first token, as in "early rejection" of Mooncake (arXiv 2407.00079).
"""

import heapq
import math
from dataclasses import dataclass, field
from itertools import count

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.step import StepPlan
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.scheduler.request_state import FirstTokenEstimate, RequestState
from graftwork.engine.scheduler.service_rates import EndRate, ServedShares, Shares
from graftwork.engine.scheduler.step_time import PromptWork, StepTimes
from graftwork.engine.scheduler.tenant_bounds import BatchShares, in_step_order
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.engine.scheduler.waiting_order import TIER_PRIORITY, RequestTables
from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended, DeadlineExceeded, GraftworkError, Unavailable
from graftwork.platform.ids import RequestId
from graftwork.platform.quotas.in_flight import ThroughputEstimate

DEADLINE_UNREACHABLE = "deadline_unreachable"
"""The code of the error for a request that would get its first token after its deadline."""
_LONG = 4
"""From this length on an estimate is long: from 15 steps on, because its binary logarithm is taken."""
_SHORT_QUANTILE, _LONG_QUANTILE = 0.9, 0.99
_LEARNING_RATE = 0.1
_NUM_LENGTHS = 8
_LEAST_FACTOR, _LARGEST_FACTOR = 0.5, 8.0


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


def estimate_first_token(backlog: Backlog, times: StepTimes, ends: EndRate) -> FirstTokenEstimate | None:
    """Estimates when the first token of a request with this backlog comes. None if nothing was measured yet.

    The request waits for a place, and for the prompts ahead of it. Both go on at the same time, and its own prompt is
    computed after them. Requests that will arrive and pass it lengthen both.
    """
    if not times.costs.is_known:
        return None
    places_s = 0.0
    if backlog.ends_needed:
        places_s = backlog.most_steps * times.mean_s
        if ends_per_second := ends.per_second * backlog.running:
            places_s = min(places_s, backlog.ends_needed / ends_per_second)
    own_s = times.seconds_of_prompts(backlog.own, backlog.decoding)
    ahead_s = times.seconds_of_prompts(backlog.ahead.plus(backlog.own), backlog.decoding) - own_s
    wait_s = max(places_s / (1 - backlog.passing.requests), ahead_s / (1 - backlog.passing.tokens))
    return FirstTokenEstimate(wait_s, own_s)


class Correction:
    """Learns how much longer first tokens take than estimated, for example because answers become longer.

    `factor` is a high percentile of the times divided by their estimates: so many times are shorter than the estimate
    times the factor. It rises after a longer time much more than it falls after a shorter one. An estimate of few steps
    is off by a step or two, which is a large part of it, and one of many steps only by a small part. So there is a factor
    for each length, in powers of two of the mean step. Long estimates can be held to a higher percentile, because it
    refuses few more; in an overload, those that are admitted are mostly those that just meet their deadlines.
    Source: stochastic approximation of a quantile (Robbins and Monro 1951).
    """

    def __init__(self) -> None:
        self._factors = [1.0] * _NUM_LENGTHS

    def factor(self, estimated_s: float, mean_step_s: float) -> float:
        """Returns the factor for an estimate, both in seconds."""
        return self._factors[_length_of(estimated_s, mean_step_s)]

    def record(self, estimated_s: float, took_s: float, mean_step_s: float) -> None:
        """Records a time and its estimate, in seconds."""
        length = _length_of(estimated_s, mean_step_s)
        factor = self._factors[length]
        quantile = _SHORT_QUANTILE if length < _LONG else _LONG_QUANTILE
        change = quantile if took_s > estimated_s * factor else quantile - 1
        self._factors[length] = min(max(factor * (1 + _LEARNING_RATE * change), _LEAST_FACTOR), _LARGEST_FACTOR)


def _length_of(seconds: float, mean_step_s: float) -> int:
    """Returns the binary logarithm of a time in mean steps, between 0 and the largest that is told apart."""
    if mean_step_s <= 0:
        return 0
    return min(int(math.log2(1 + seconds / mean_step_s)), _NUM_LENGTHS - 1)


class DeadlineAdmission:
    """Refuses requests whose deadlines cannot be met, and finds those whose deadlines have passed while they waited.

    The scheduler tells it of each step, and of each request that starts or ends.
    """

    def __init__(
        self, limits: SchedulerLimits, requests: RequestTables, kv_cache: KvCacheManager, times: StepTimes, clock: Clock
    ) -> None:
        self._limits = limits
        self._requests = requests
        self._running = requests.running
        self._waiting = requests.waiting
        self._kv_cache = kv_cache
        self._times = times
        self._clock = clock
        self._throughput = ThroughputEstimate(clock)
        self._ends = EndRate()
        self._served = ServedShares()
        self.correction = Correction()
        self._due: list[tuple[float, int, RequestState]] = []
        """A heap of the waiting requests with deadlines, by the time at which they must start to meet them. Some may wait
        no more. Each has a number, so that no two entries are equal.
        """
        self._numbers = count()

    def step_ended(self, plan: StepPlan, seconds: float) -> None:
        """Learns from the oldest step that had not ended, which took so many seconds."""
        now = self._clock.monotonic()
        self._ends.record_step(seconds, len(plan.slices))
        for piece in plan.slices:
            state = self._running.get(piece.request_id)
            if state is not None and state.expected is not None and piece.samples:
                self._learn(state.expected, now - state.arrived_at)
                state.expected = None

    def _learn(self, expected: FirstTokenEstimate, took_s: float) -> None:
        """Learns from a request that has got its first token, or none by its deadline, after so many seconds."""
        self.correction.record(expected.total_s, took_s, self._times.mean_s)

    def record_start(self, state: RequestState) -> None:
        """Records that a waiting request gets a place and pages."""
        self._served.record_start(state)

    def record_finished(self) -> None:
        """Records that a request ends at the time of this call."""
        self._ends.record_finished()
        self._throughput.record_finished()

    def retry_after_s(self) -> float:
        """Returns how many seconds a client should wait before it sends a request again that found the queue full."""
        return self._throughput.retry_after_s()

    # ---- on arrival -------------------------------------------------------------------------------------------

    def check(self, state: RequestState) -> None:
        """Raises CapacityContended, with the time to retry, if the new request cannot have its first token by its
        deadline. Raises Unavailable if it could not even on an idle engine, so that waiting does not help.

        Does nothing for a request without a deadline. Must be called before the request is queued. `expired` watches a
        request that is not refused.
        """
        deadline_s, due_at = state.request.deadline_s, state.due_at
        if deadline_s is None or due_at is None:
            return
        backlog = self.backlog(state)
        state.expected = expected = estimate_first_token(backlog, self._times, self._ends)
        alone_s = 0.0
        if expected is not None:
            alone_s = self._times.seconds_of_prompts(backlog.own, 0)
            estimate_s = expected.total_s * self.correction.factor(expected.total_s, self._times.mean_s)
            if estimate_s > deadline_s:
                raise _unreachable(deadline_s, estimate_s, alone_s)
        heapq.heappush(self._due, (due_at - alone_s, next(self._numbers), state))

    def backlog(self, state: RequestState) -> Backlog:
        """Returns what would be ahead of a new request, if it were queued now."""
        self._waiting.enqueue(state)
        try:
            order = list(self._waiting.candidates())
        finally:
            self._waiting.remove(state)
        running = list(self._running.values())
        shares = BatchShares(self._limits.max_running, running, order)
        place = next(place for place, one in enumerate(order) if one is state)
        ahead = order[:place]
        in_turn = in_step_order([*running, *ahead, state], self._waiting, self._limits.max_running)
        before = in_turn[: next(place for place, one in enumerate(in_turn) if one is state)]
        prompts = [self._work(one) for one in before if one.num_uncomputed > 1]
        decoding = sum(one.num_uncomputed <= 1 for one in running) + len(prompts) // 2
        ends_needed = self._ends_needed(state, ahead, shares)
        most_steps = sorted(_most_steps(one) for one in running)
        return Backlog(
            own=self._work(state),
            ahead=sum(prompts, PromptWork()),
            decoding=min(decoding, self._limits.max_running - 1),
            ends_needed=ends_needed,
            running=len(running),
            most_steps=_sum_of_rounds(most_steps, ends_needed),
            passing=self._passing(state, order[place + 1 :]),
        )

    def _passing(self, state: RequestState, behind: list[RequestState]) -> Shares:
        """Returns which parts of the service go to requests that arrive while `state` waits, and pass it.

        These are requests of higher tiers, and those of other domains (usually, one domain is one tenant) that have got
        less service lately for their weight, and of which nothing waits behind. What a domain has got, it will get.
        """
        tier, own = state.request.tier, state.domain
        late = {(one.request.tier, one.domain) for one in behind}
        weights = {one.domain: one.request.weight for one in (*behind, *self._waiting, *self._running.values(), state)}
        fair = weights[own] / sum(weights.values())
        served = self._served.of()
        own_tokens = served.get((tier, own), Shares()).tokens / weights[own]
        requests = tokens = 0.0
        for (other_tier, domain), share in served.items():
            is_higher = TIER_PRIORITY[other_tier] < TIER_PRIORITY[tier]
            has_less = share.tokens / weights.get(domain, 1.0) < own_tokens
            is_lighter = other_tier is tier and has_less and (tier, domain) not in late
            if is_higher or is_lighter:
                requests, tokens = requests + share.requests, tokens + share.tokens
        return Shares(requests, tokens).at_most(1 - min(fair, 0.5))

    def _work(self, state: RequestState) -> PromptWork:
        """Returns what must be computed of a request before its first token."""
        tokens = self._uncached(state)
        return PromptWork.of(len(state.token_ids) - tokens, tokens)

    def _ends_needed(self, state: RequestState, ahead: list[RequestState], shares: BatchShares) -> int:
        """Returns how many running requests must end before `state` has a place and pages, if those `ahead` come first."""
        free_places = self._limits.max_running - len(self._running)
        size = self._limits.page_tokens
        free_pages = self._kv_cache.page_store.could_allocate
        fitting, pages = 0, len(self._running)
        for one in [*ahead, state]:
            pages += pages_for(self._uncached(one), size)
            if fitting == free_places or not (free_pages(Tier.DEVICE, pages) or not self._running):
                break
            fitting += 1
        missing = len(ahead) + 1 - fitting
        if missing <= 0 or shares.victims_for(state, self._waiting.priority(state)):
            return 0
        return missing

    def queued_tokens(self) -> int:
        """Returns how many prompt tokens of waiting and running requests must still be computed."""
        return sum(self._uncached(one) for one in self._requests.by_id.values() if one.num_uncomputed > 1)

    @property
    def prefill_token_s(self) -> float | None:
        """The seconds for each prompt token of the largest step, as the latest steps suggest; None before any was measured."""
        if not self._times.costs.is_known:
            return None
        most = self._limits.max_batch_tokens
        return self._times.seconds_of_prompts(PromptWork.of(0, most), 0) / most

    def _uncached(self, state: RequestState) -> int:
        """Returns how many known tokens of a request must still be computed, at least 1. Looks up a waiting request in
        the cache once.
        """
        if state.request_id in self._running:
            return max(state.num_uncomputed, 1)
        if state.uncached_tokens is None:
            match = self._kv_cache.match(state.path(state.num_reusable))
            state.uncached_tokens = max(len(state.token_ids) - len(match) * self._limits.page_tokens, 1)
        return state.uncached_tokens

    # ---- while requests wait ----------------------------------------------------------------------------------

    def expired(self) -> list[RequestId]:
        """Returns the waiting requests that can no longer meet their deadlines, even if they started now, each once. A
        request that has run is never one.
        """
        now, expired = self._clock.monotonic(), list[RequestId]()
        while self._due and (self._due[0][0] <= now or not self._waits(self._due[0][2])):
            state = heapq.heappop(self._due)[2]
            if self._waits(state):
                expired.append(state.request_id)
                if state.expected is not None:
                    self._learn(state.expected, now - state.arrived_at)
        return expired

    def seconds_to_next(self) -> float | None:
        """Returns the seconds until `expired` returns the next request that waits now, at least 0. None if there is none."""
        while self._due and not self._waits(self._due[0][2]):
            heapq.heappop(self._due)
        return max(self._due[0][0] - self._clock.monotonic(), 0.0) if self._due else None

    def _waits(self, state: RequestState) -> bool:
        request_id = state.request_id
        return (
            self._requests.by_id.get(request_id) is state and request_id not in self._running and not state.is_admitted
        )


def deadline_passed() -> DeadlineExceeded:
    """Returns the error for a request that has waited so long that it can no longer meet its deadline."""
    return DeadlineExceeded(
        "The request has waited in the queue until its first token could no longer come by its deadline. Send it again "
        "later, or with a longer x-deadline-ms."
    )


def _unreachable(deadline_s: float, estimate_s: float, alone_s: float) -> GraftworkError:
    if alone_s > deadline_s:
        message = (
            f"The first token takes about {alone_s:.2f} s even on an idle engine, and the deadline is {deadline_s:.2f} s. "
            "Send a shorter prompt, or a longer x-deadline-ms."
        )
        return Unavailable(message, code=DEADLINE_UNREACHABLE)
    late_s = estimate_s - deadline_s
    message = (
        f"The first token would come in about {estimate_s:.2f} s, and the deadline is {deadline_s:.2f} s. Send the request "
        f"again in {math.ceil(late_s)} s, or with a longer x-deadline-ms."
    )
    return CapacityContended(message, code=DEADLINE_UNREACHABLE, retry_after_s=late_s)


def _most_steps(state: RequestState) -> int:
    """Returns after how many steps at most a running request ends, if each of its prompt chunks takes one step."""
    return max(state.max_total_tokens - state.num_tokens, 0) + 1


def _sum_of_rounds(most_steps: list[int], ends_needed: int) -> int:
    """Returns the steps after which `ends_needed` requests have ended. Those that start meanwhile are taken to run as
    long as the longest that runs now.
    """
    if not ends_needed or not most_steps:
        return 0
    rounds, rest = divmod(ends_needed - 1, len(most_steps))
    return rounds * most_steps[-1] + most_steps[rest]
