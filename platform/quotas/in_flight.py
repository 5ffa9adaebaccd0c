"""Bounds the answers that one gateway has in flight, so that a request that the engine must refuse is refused at once.

Counts are those of this gateway alone, and exact for it: an answer counts from before its prompt is read until the
engine is done with it. The engine remains the authority, because it also serves other gateways.

    take ──► keep ──► release     a job was started; it releases the places at its end
         └─► release              the request failed before
"""

from collections import Counter
from types import TracebackType
from typing import Self

from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended, InvalidRequest
from graftwork.platform.ids import TenantId

_SMOOTHING = 0.2
_SHORTEST_S = 0.05
_LONGEST_S = 60.0


class ThroughputEstimate:
    """The average time between two finished requests. From it a refused client learns when to try again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_finished_at: float | None = None
        self._seconds_between = 1.0

    def record_finished(self) -> None:
        """Records that a request has finished now."""
        now = self._clock.monotonic()
        if self._last_finished_at is not None:
            gap = now - self._last_finished_at
            self._seconds_between += _SMOOTHING * (gap - self._seconds_between)
        self._last_finished_at = now

    def retry_after_s(self) -> float:
        """Returns the seconds until a full queue is likely to have room for one more request."""
        return min(max(self._seconds_between, _SHORTEST_S), _LONGEST_S)


class HeldPlaces:
    """The places of one request. Leaving the `with` block releases them, unless a job has kept them."""

    def __init__(self, bound: "InFlightBound", tenant_id: TenantId, answers: int) -> None:
        self._bound = bound
        self._tenant_id = tenant_id
        self._answers = answers
        self._is_kept = False

    def keep(self) -> None:
        """Keeps the places until `release`. The caller has started a job that calls it."""
        self._is_kept = True

    def release(self) -> None:
        """Frees the places. Later calls change nothing."""
        answers, self._answers = self._answers, 0
        if answers:
            self._bound.give_back(self._tenant_id, answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_kept:
            self.release()


class InFlightBound:
    """Counts the answers in flight of each tenant. Use it from one event loop."""

    def __init__(self, clock: Clock, max_total: int | None, max_tenant: int | None) -> None:
        """The limits are what the engine takes at one time, over all tenants and of one. None sets no limit."""
        self._max_total = max_total
        self._max_tenant = max_tenant
        self._held: Counter[TenantId] = Counter()
        self._throughput = ThroughputEstimate(clock)

    def take(self, tenant_id: TenantId, answers: int) -> HeldPlaces:
        """Takes a place for each answer of a request, or none.

        Raises InvalidRequest if one tenant can never have as many answers at a time. Raises CapacityContended if the
        tenant has too many in flight, or if all places are taken and no tenant has taken more of them.
        """
        held = self._held[tenant_id]
        if self._max_tenant is not None and answers > self._max_tenant:
            raise InvalidRequest(
                f"The request asks for {answers} answers (prompts times n); this server takes at most "
                f"{self._max_tenant} of one tenant at a time. Split the request.",
                param="n",
            )
        if self._max_tenant is not None and held + answers > self._max_tenant:
            raise self._full(f"{held} of your answers run or wait, and at most {self._max_tenant} may")
        if self._is_full(answers) and held and held == max(self._held.values()):
            raise self._full(f"the queue is full, and {held} answers in it are yours")
        self._held[tenant_id] += answers
        return HeldPlaces(self, tenant_id, answers)

    def give_back(self, tenant_id: TenantId, answers: int) -> None:
        """Frees places. Only HeldPlaces calls it."""
        self._held[tenant_id] -= answers
        if not self._held[tenant_id]:
            del self._held[tenant_id]
        self._throughput.record_finished()

    def _is_full(self, answers: int) -> bool:
        return self._max_total is not None and self._held.total() + answers > self._max_total

    def _full(self, reason: str) -> CapacityContended:
        return CapacityContended(
            f"This request cannot wait: {reason}. Send fewer requests at a time, and try again later.",
            retry_after_s=self._throughput.retry_after_s(),
        )
