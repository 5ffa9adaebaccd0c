"""Refuses requests whose deadlines cannot be met, when they come and while they wait, and learns what first tokens take.

    EndRate              how many times a second one running request ends
    ServedShares         the fractions of requests and of prompt tokens that started for each tier and domain
    Correction           how much longer than estimated first tokens have taken
    DeadlineAdmission    makes snapshots for the estimate of arrival.py, and finds requests that have waited too long

Owns the deadlines of waiting requests, and the counts by which first tokens are estimated. What an engine with a queue has
served lately is what it will serve next: a domain (usually one tenant) that always gets its requests through at once,
because it is below its fair share, goes on to pass those that wait.
"""

import heapq
from dataclasses import dataclass
from itertools import accumulate, count

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.core.step import PromptWork, StepPlan
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.scheduler.arrival import (
    NUM_LENGTHS,
    Arrival,
    Backlog,
    QueueSnapshot,
    QueueTotal,
    Shares,
    backlog_of,
    check_arrival,
    length_of,
)
from graftwork.engine.scheduler.order.batch_shares import BatchShares
from graftwork.engine.scheduler.order.prompt_turns import PromptTurns
from graftwork.engine.scheduler.order.request_state import FirstTokenEstimate, RequestState
from graftwork.engine.scheduler.order.waiting_order import RequestTables
from graftwork.engine.scheduler.step_time import StepTimes
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.clock import Clock
from graftwork.platform.errors import DeadlineExceeded
from graftwork.platform.ids import IsolationDomain, RequestId
from graftwork.platform.quotas.in_flight import ThroughputEstimate

_STEPS_KEPT = 0.98
"""What a step still counts after each further step: the last 50 steps or so decide."""
_STARTS_KEPT = 0.99
"""What a start still counts after each further start: the last 100 starts or so decide."""
_NEGLIGIBLE = 0.01
"""A domain with a count below this is forgotten."""
_LONG = 2
"""From this length on an estimate is long: from 3 steps on, because its binary logarithm is taken."""
_SHORT_QUANTILE, _LONG_QUANTILE = 0.9, 0.995
_LEARNING_RATE = 0.1
_LEAST_FACTOR, _LARGEST_FACTOR = 0.5, 8.0


class EndRate:
    """Learns from the latest steps how often a running request ends."""

    def __init__(self) -> None:
        self._request_seconds = self._ended = 0.0

    def record_step(self, seconds: float, num_requests: int) -> None:
        """Records a step of `num_requests` requests that took `seconds`."""
        self._request_seconds = self._request_seconds * _STEPS_KEPT + num_requests * seconds
        self._ended *= _STEPS_KEPT

    def record_finished(self) -> None:
        """Records that one request has ended with its last step."""
        self._ended += 1

    @property
    def per_second(self) -> float:
        """How many times a second one running request ends, in the mean. 0 if none has ended."""
        return self._ended / self._request_seconds if self._request_seconds else 0.0


@dataclass(slots=True)
class _Count:
    requests: float = 0.0
    tokens: float = 0.0
    known_tokens: float = 0.0
    at: int = 0
    """The number of starts when the count was last faded."""

    def fade(self, number: int) -> None:
        kept = _STARTS_KEPT ** (number - self.at)
        self.requests *= kept
        self.tokens *= kept
        self.known_tokens *= kept
        self.at = number


class ServedShares:
    """Counts what has started, by tier and domain (usually one tenant); later starts count more.

    Invariant: the fractions of all tiers and domains sum to 1.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[ServiceTier, IsolationDomain], _Count] = {}
        self._number = 0

    def record_start(self, state: RequestState) -> None:
        """Records that a request starts, with the prompt tokens that it must compute."""
        self._number += 1
        count = self._counts.setdefault((state.request.tier, state.domain), _Count(at=self._number))
        count.fade(self._number)
        count.requests += 1
        count.tokens += max(state.num_uncomputed, 1)
        count.known_tokens += len(state.token_ids)
        if self._number % 128 == 0:
            self._forget_idle()

    def of(self) -> dict[tuple[ServiceTier, IsolationDomain], Shares]:
        """Returns the present shares of all tiers and domains."""
        self._fade()
        requests = sum(one.requests for one in self._counts.values())
        tokens = sum(one.tokens for one in self._counts.values())
        return {
            key: Shares(one.requests / requests, one.tokens / tokens, one.tokens / one.known_tokens)
            for key, one in self._counts.items()
        }

    def _fade(self) -> None:
        for one in self._counts.values():
            one.fade(self._number)

    def _forget_idle(self) -> None:
        self._fade()
        self._counts = {key: one for key, one in self._counts.items() if one.requests >= _NEGLIGIBLE}


class Correction:
    """Learns how much longer first tokens take than estimated, for example because answers become longer.

    A factor is a high percentile of the times divided by their estimates: so many times are shorter than the estimate
    times the factor. It rises after a longer time much more than it falls after a shorter one. An estimate of few steps
    is off by a step or two, which is a large part of it, and one of many steps only by a small part. So there is a factor
    for each length, in powers of two of the mean step. Long estimates can be held to a higher percentile, because it
    refuses few more; in an overload, those that are admitted are mostly those that just meet their deadlines.
    Source: stochastic approximation of a quantile (Robbins and Monro 1951).
    """

    def __init__(self) -> None:
        self.factors = (1.0,) * NUM_LENGTHS
        """By the length of the estimate."""

    def record(self, estimated_s: float, took_s: float, mean_step_s: float) -> None:
        """Records a time and its estimate, in seconds."""
        length = length_of(estimated_s, mean_step_s)
        factor = self.factors[length]
        quantile = _SHORT_QUANTILE if length < _LONG else _LONG_QUANTILE
        change = quantile if took_s > estimated_s * factor else quantile - 1
        changed = min(max(factor * (1 + _LEARNING_RATE * change), _LEAST_FACTOR), _LARGEST_FACTOR)
        self.factors = (*self.factors[:length], changed, *self.factors[length + 1 :])


@dataclass(frozen=True, slots=True)
class Received:
    """What the thread that received a request has found, before the engine loop gets it."""

    at: float
    """When the request was received, on the engine's monotonic clock."""
    number: int = 0
    """How many requests had been received by then, with this one."""
    expected: FirstTokenEstimate | None = None
    """When its first token is expected; None if the engine loop has to decide whether the deadline can be met."""
    uncached_tokens: int = 0
    """How many tokens of its prompt were taken to be uncached."""


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

    def check(self, state: RequestState, received: Received | None = None) -> None:
        """Raises CapacityContended or Unavailable if the new request cannot have its first token by its deadline (see
        `check_arrival`), unless the thread that received it has found that it can.

        Does nothing for a request without a deadline. Must be called before the request is queued. `expired` watches a
        request that is not refused.
        """
        deadline_s, due_at = state.request.deadline_s, state.due_at
        if deadline_s is None or due_at is None:
            return
        uncached = self._uncached(state)
        if received is not None and received.expected is not None and uncached <= received.uncached_tokens:
            state.expected = received.expected
        else:
            arrival = Arrival.of(state.request, uncached)
            state.expected = check_arrival(self.snapshot(), arrival, due_at - self._clock.monotonic())
        own_s = 0.0 if state.expected is None else state.expected.own_s
        heapq.heappush(self._due, (due_at - own_s, next(self._numbers), state))

    def backlog(self, state: RequestState) -> Backlog:
        """Returns what would be ahead of a new request, if it were queued now."""
        return backlog_of(self.snapshot(), Arrival.of(state.request, self._uncached(state)))

    def snapshot(self, num_received: int = 0) -> QueueSnapshot:
        """Returns what the engine has to do now. `num_received` is how many requests the engine loop has received."""
        running = list(self._running.values())
        shares = BatchShares(self._limits.max_running, running, self._waiting.domains())
        queue, in_order = self._waiting.lines(self._uncached)
        pool, rows = self._kv_cache.page_store.device, sum(one.num_uncomputed <= 1 for one in running)
        frames_of_page = self._kv_cache.page_store.sizes.frames_of_page
        return QueueSnapshot(
            num_received=num_received,
            pace=self._times.pace(),
            ends_per_second=self._ends.per_second,
            factors=self.correction.factors,
            queue=queue,
            totals=tuple(accumulate(map(self._total_of, in_order), _sum, initial=QueueTotal())),
            prompts=PromptTurns.of(running, self._waiting, shares, self._times.prompt_tokens_beside(rows)),
            excess=shares.excess_by_domain(),
            with_few_places=shares.with_few_places(),
            new_excess=shares.excess_of_new(1.0),
            worst_priority=max((one.priority for one in running), default=0),
            max_running=self._limits.max_running,
            running=len(running),
            decoding=rows,
            free_pages=(pool.free_pages + pool.idle_pages) // frames_of_page - len(running),
            most_steps=tuple(sorted(map(_most_steps, running))),
            served=self._served.of(),
            weights={one.domain: one.request.weight for one in (*self._waiting, *running)},
        )

    def _total_of(self, state: RequestState) -> QueueTotal:
        tokens = self._uncached(state)
        work = PromptWork.of(len(state.token_ids) - tokens, tokens, state.rolling_window)
        rolling = self._kv_cache.page_store.sizes.rolling_pages(state.rolling_window)
        pages = pages_for(tokens, self._limits.page_tokens) if rolling is None else rolling.most_pages(tokens)
        return QueueTotal(work, pages)

    def queued_tokens(self) -> int:
        """Returns how many prompt tokens of waiting and running requests must still be computed."""
        return sum(self._uncached(one) for one in self._requests.by_id.values() if one.num_uncomputed > 1)

    @property
    def prefill_token_s(self) -> float | None:
        """The seconds for each prompt token of the largest step, as the latest steps suggest; None before any was measured."""
        if not self._times.costs.is_known:
            return None
        most = self._limits.max_batch_tokens
        return self._times.pace().seconds_of_prompts(PromptWork.of(0, most), 0) / most

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

    def deadline_passed(self) -> DeadlineExceeded:
        """Returns the error for a request that has waited so long that it can no longer meet its deadline."""
        return DeadlineExceeded(
            "The request has waited in the queue until its first token could no longer come by its deadline. Send it again "
            "later, or with a longer x-deadline-ms.",
            retry_after_s=self.retry_after_s(),
        )


def _sum(left: QueueTotal, right: QueueTotal) -> QueueTotal:
    return QueueTotal(left.work + right.work, left.pages + right.pages)


def _most_steps(state: RequestState) -> int:
    """Returns after how many steps at most a running request ends, if each of its prompt chunks takes one step."""
    return max(state.max_total_tokens - state.num_tokens, 0) + 1
