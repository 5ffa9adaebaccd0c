"""Estimates when a new request would get its first token, and refuses requests whose deadlines cannot be met.

    StepRates            what was measured: the seconds of a step by its tokens, and how often a running request ends
    Backlog              what is ahead of one new request, as numbers
    estimate_first_token the estimate: from these two
    Correction           how much longer than estimated requests have waited, and their prompts have taken
    DeadlineAdmission    refuses on arrival, and finds the waiting requests whose deadlines have passed

Never refuses on evidence that it lacks: without measured steps there is no estimate, and no request is refused. An
estimate counts what is here now. Requests of a higher tier that arrive later may still come first.
Source: admission by estimated time to first token, as in "early rejection" of Mooncake (arXiv 2407.00079).
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.step import StepPlan
from graftwork.engine.core.step_timer import StepTimer
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.scheduler.request_state import FirstTokenEstimate, RequestState
from graftwork.engine.scheduler.tenant_bounds import BatchShares, in_step_order
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.engine.scheduler.waiting_order import WaitingOrder
from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended, DeadlineExceeded, GraftworkError, Unavailable
from graftwork.platform.ids import RequestId
from graftwork.platform.quotas.in_flight import ThroughputEstimate

DEADLINE_UNREACHABLE = "deadline_unreachable"
"""The code of the error for a request that would get its first token after its deadline."""
_KEPT = 0.98
"""What a measurement still counts after each further step: the last 50 steps or so decide."""
_QUANTILE = 0.9
_LEARNING_RATE = 0.1
_LEAST_FACTOR, _LARGEST_FACTOR = 0.5, 8.0


class StepRates:
    """Learns from the latest steps how long a step takes, and how often a running request ends."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._tokens_squared = self._tokens_seconds = 0.0
        self._request_seconds = self._ended = 0.0

    def record(self, num_tokens: int, seconds: float, num_requests: int) -> None:
        """Records a step that has computed `num_tokens` tokens of `num_requests` requests in `seconds`."""
        self._weight = self._weight * _KEPT + 1
        self._tokens = self._tokens * _KEPT + num_tokens
        self._seconds = self._seconds * _KEPT + seconds
        self._tokens_squared = self._tokens_squared * _KEPT + num_tokens**2
        self._tokens_seconds = self._tokens_seconds * _KEPT + num_tokens * seconds
        self._request_seconds = self._request_seconds * _KEPT + num_requests * seconds
        self._ended *= _KEPT

    def record_finished(self) -> None:
        """Records that one request has ended with its last step."""
        self._ended += 1

    @property
    def mean_step_s(self) -> float | None:
        """The mean seconds of the latest steps; None before the first step."""
        return self._seconds / self._weight if self._weight else None

    @property
    def ends_per_second(self) -> float:
        """How many times a second one running request ends, in the mean. 0 if none has ended."""
        return self._ended / self._request_seconds if self._request_seconds else 0.0

    def step_s(self, num_tokens: float) -> float | None:
        """Estimates the seconds of a step of `num_tokens` tokens by a line through the latest steps, fitted by least
        squares. None before the first step.

        If all steps had the same number of tokens, each step counts as long as those: a larger one may take longer, but
        that was not seen.
        """
        mean_s = self.mean_step_s
        if mean_s is None:
            return None
        mean_tokens = self._tokens / self._weight
        variance = self._tokens_squared / self._weight - mean_tokens**2
        if variance <= 1e-9 * mean_tokens**2:
            return mean_s
        per_token = max((self._tokens_seconds / self._weight - mean_tokens * mean_s) / variance, 0.0)
        floor_s = mean_s - per_token * mean_tokens
        if floor_s < 0.0:  # noise has tilted the line: the best line through 0
            return num_tokens * self._tokens_seconds / self._tokens_squared
        return floor_s + per_token * num_tokens


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is ahead of a request under the order in which requests are served."""

    own_tokens: int
    """Prompt tokens of the request that must be computed. At least 1."""
    tokens_ahead: int = 0
    """Prompt tokens of others that will be computed before them."""
    decoding: int = 0
    """Requests that get one token in each step meanwhile."""
    ends_needed: int = 0
    """How many running requests must end before this one gets a place in the batch."""
    running: int = 0
    """Requests that run and may end."""
    most_steps: int = 0
    """The number of steps after which `ends_needed` requests have ended for certain, because of their limits."""


def estimate_first_token(backlog: Backlog, rates: StepRates, max_batch_tokens: int) -> FirstTokenEstimate | None:
    """Estimates when the first token of a request with this backlog comes. None if nothing was measured yet.

    The request waits for a place, and for the prompts ahead of it. Both go on at the same time, and its own prompt is
    computed after them.
    """
    mean_step_s = rates.mean_step_s
    if mean_step_s is None:
        return None
    computing = _Computing(rates, max_batch_tokens, backlog.decoding)
    wait_s = 0.0
    if backlog.ends_needed:
        wait_s = backlog.most_steps * mean_step_s
        ends_per_second = rates.ends_per_second * backlog.running
        if ends_per_second:
            wait_s = min(wait_s, backlog.ends_needed / ends_per_second)
    own_s = computing.seconds(backlog.own_tokens)
    ahead_s = computing.seconds(backlog.tokens_ahead + backlog.own_tokens) - own_s
    return FirstTokenEstimate(max(wait_s, ahead_s), own_s)


class Correction:
    """Learns how much longer something takes than estimated, for example because requests of a higher tier arrive later.

    `factor` is the 90th percentile of the times divided by their estimates: 9 of 10 times are shorter than the estimate
    times the factor. So it rises nine times as fast after a longer time as it falls after a shorter one.
    Source: stochastic approximation of a quantile (Robbins and Monro 1951).
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def record(self, estimated_s: float, took_s: float) -> None:
        """Records a time in seconds, and its estimate."""
        change = _QUANTILE if took_s > estimated_s * self.factor else _QUANTILE - 1
        self.factor = min(max(self.factor * (1 + _LEARNING_RATE * change), _LEAST_FACTOR), _LARGEST_FACTOR)


@dataclass(frozen=True, slots=True)
class _Computing:
    """How long prompts take beside `decoding` other requests."""

    rates: StepRates
    max_batch_tokens: int
    decoding: int

    def seconds(self, num_tokens: int) -> float:
        chunk = max(self.max_batch_tokens - self.decoding, 1)
        whole, rest = divmod(num_tokens, chunk)
        full_s = (self.rates.step_s(chunk + self.decoding) or 0.0) * whole
        return full_s + ((self.rates.step_s(rest + self.decoding) or 0.0) if rest else 0.0)


class DeadlineAdmission:
    """Refuses requests whose deadlines cannot be met, and finds those whose deadlines have passed while they waited.

    The scheduler tells it of each step and of each request that ends.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        running: Mapping[RequestId, RequestState],
        waiting: WaitingOrder,
        by_id: Mapping[RequestId, RequestState],
        kv_cache: KvCacheManager,
        clock: Clock,
    ) -> None:
        """`by_id` are all requests that wait or run."""
        self._by_id = by_id
        self._limits = limits
        self._running = running
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._clock = clock
        self._timer = StepTimer(clock)
        self._throughput = ThroughputEstimate(clock)
        self.rates = StepRates()
        self.wait_correction, self.own_correction = Correction(), Correction()
        self._due: list[tuple[float, int, RequestState]] = []
        """A heap of the waiting requests with deadlines, by the time at which they must start to meet them. Some may wait
        no more. Each has a number, so that no two entries are equal.
        """
        self._numbers = count()

    def step_begins(self) -> None:
        """Starts to measure a step. Each step must be ended by `step_ended`, in the same order."""
        self._timer.begin()

    def step_ended(self, plan: StepPlan) -> None:
        """Learns how long the oldest step took that has not ended."""
        seconds, now = self._timer.end(), self._clock.monotonic()
        self.rates.record(plan.num_tokens, seconds, len(plan.slices))
        for piece in plan.slices:
            state = self._running.get(piece.request_id)
            if state is not None and state.expected is not None:
                if state.started_at is None:
                    state.started_at = now - seconds
                if piece.samples:
                    self._learn(state, state.expected, state.started_at, now)
                    state.expected = None

    def _learn(self, state: RequestState, expected: FirstTokenEstimate, started_at: float, now: float) -> None:
        """Learns from a request with a deadline, which has got its first token now."""
        self.own_correction.record(expected.own_s, now - started_at)
        if expected.wait_s > expected.own_s:  # a shorter wait is mostly the end of the step that ran on arrival
            self.wait_correction.record(expected.wait_s, started_at - state.arrived_at)

    def record_finished(self) -> None:
        """Records that a request ends at the time of this call."""
        self.rates.record_finished()
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
        backlog, most_tokens = self.backlog(state), self._limits.max_batch_tokens
        state.expected = expected = estimate_first_token(backlog, self.rates, most_tokens)
        own_s = 0.0
        if expected is not None:
            own_s = expected.own_s * self.own_correction.factor
            estimate_s = expected.wait_s * self.wait_correction.factor + own_s
            if estimate_s > deadline_s:
                alone = estimate_first_token(Backlog(backlog.own_tokens), self.rates, most_tokens)
                raise _unreachable(deadline_s, estimate_s, alone.own_s if alone else 0.0)
        heapq.heappush(self._due, (due_at - own_s, next(self._numbers), state))

    def backlog(self, state: RequestState) -> Backlog:
        """Returns what would be ahead of a new request, if it were queued now."""
        self._waiting.enqueue(state)
        try:
            order = list(self._waiting.candidates())
        finally:
            self._waiting.remove(state)
        running = list(self._running.values())
        shares = BatchShares(self._limits.max_running, running, order)
        ahead = order[: next(place for place, one in enumerate(order) if one is state)]
        in_turn = in_step_order([*running, *ahead, state], self._waiting, self._limits.max_running)
        before = in_turn[: next(place for place, one in enumerate(in_turn) if one is state)]
        ends_needed = self._ends_needed(state, ahead, shares)
        most_steps = sorted(_most_steps(one) for one in running)
        return Backlog(
            own_tokens=self._uncached(state),
            tokens_ahead=sum(self._uncached(one) for one in before if one.num_uncomputed > 1),
            decoding=sum(one.num_uncomputed <= 1 for one in running),
            ends_needed=ends_needed,
            running=len(running),
            most_steps=_sum_of_rounds(most_steps, ends_needed),
        )

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
        return expired

    def seconds_to_next(self) -> float | None:
        """Returns the seconds until `expired` returns the next request that waits now, at least 0. None if there is none."""
        while self._due and not self._waits(self._due[0][2]):
            heapq.heappop(self._due)
        return max(self._due[0][0] - self._clock.monotonic(), 0.0) if self._due else None

    def _waits(self, state: RequestState) -> bool:
        request_id = state.request_id
        return self._by_id.get(request_id) is state and request_id not in self._running and not state.is_admitted


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
