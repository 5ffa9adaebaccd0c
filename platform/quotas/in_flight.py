"""Limits the answers that a gateway has in flight, to refuse at once what the engine would refuse later.

Owns the counts of this gateway. Never counts the answers of other gateways; the engine counts all of them, and may
still refuse a request. An answer has a place here from before its prompt is read until the engine has ended it.

    take ──► keep ──► release     a job was started, and releases the places at its end
         └─► release              the request failed before

A request may take one place before its body is read, and resize it when it knows how many answers it has.
"""

from collections import Counter
from types import TracebackType
from typing import Self

from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended, InvalidRequest
from graftwork.platform.ids import TenantId

_OTHERS_SHARE = 4
"""The answers of others lower a tenant's limit by at most this part of it. Above that, the engine divides its places."""
_SMOOTHING = 0.2
_SHORTEST_S = 0.05
_LONGEST_S = 60.0


class ThroughputEstimate:
    """Estimates the average time from the end of one request to the end of the next.

    If the queue is full, a client is told to try again after this time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_finished_at: float | None = None
        self._seconds_between = 1.0

    def record_finished(self) -> None:
        """Records that a request finishes at the time of this call."""
        now = self._clock.monotonic()
        if self._last_finished_at is not None:
            gap = now - self._last_finished_at
            self._seconds_between += _SMOOTHING * (gap - self._seconds_between)
        self._last_finished_at = now

    def retry_after_s(self) -> float:
        """Returns how many seconds a client should wait before it tries again to send a request to a full queue."""
        return min(max(self._seconds_between, _SHORTEST_S), _LONGEST_S)


class HeldPlaces:
    """The places of one request: one for each of its answers in flight. The end of the `with` block releases them, unless
    `keep` was called before.
    """

    def __init__(self, bound: "InFlightBound", tenant_id: TenantId, answers: int) -> None:
        self._bound = bound
        self._tenant_id = tenant_id
        self._answers = answers
        self._is_kept = False
        self.is_resized = False
        """Whether the number of places is final: `resize` was called."""

    def resize(self, answers: int) -> None:
        """Makes this one place for each of `answers`. Raises the errors of `InFlightBound.take`, and then changes
        nothing.
        """
        self._bound.check(self._tenant_id, answers, already_held=self._answers)
        self._bound.add(self._tenant_id, answers - self._answers)
        self._answers, self.is_resized = answers, True

    def keep(self) -> None:
        """Keeps the places after the `with` block, until `release` is called."""
        self._is_kept = True

    def release(self) -> None:
        """Frees the places. Further calls do nothing."""
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
    """Counts the answers that each tenant has in flight. Use it in one event loop only."""

    def __init__(self, clock: Clock, max_total: int | None, max_tenant: int | None) -> None:
        """`max_total` and `max_tenant` are the most answers of all tenants and of one tenant. None sets no limit."""
        self._max_total = max_total
        self._max_tenant = max_tenant
        self._held: Counter[TenantId] = Counter()
        self._throughput = ThroughputEstimate(clock)

    def take(self, tenant_id: TenantId, answers: int) -> HeldPlaces:
        """Takes one place for each answer of a request.

        Raises InvalidRequest if one tenant can never have so many places. Raises CapacityContended, with the time to
        retry, if the tenant has too many answers in flight, or if all places are taken and no tenant has more than this
        one. After an error no place is taken.
        """
        self.check(tenant_id, answers)
        self.add(tenant_id, answers)
        return HeldPlaces(self, tenant_id, answers)

    def check(self, tenant_id: TenantId, answers: int, already_held: int = 0) -> None:
        """Raises what `take` would raise for a request with so many answers, of which `already_held` have places."""
        held = self._held.get(tenant_id, 0) - already_held
        if self._max_tenant is not None and answers > self._max_tenant:
            raise InvalidRequest(
                f"The request asks for {answers} answers (prompts times n); this server takes at most "
                f"{self._max_tenant} of one tenant at a time. Split the request.",
                param="n",
            )
        most = self._room_beside_others(tenant_id)
        if most is not None and held + answers > most:
            raise self._full(f"{held} of your answers run or wait, and at most {most} may")
        if self._is_full(answers - already_held) and held >= max(1, self._most_of_others(tenant_id)):
            raise self._full(f"the queue is full, and {held} answers in it are yours")

    def add(self, tenant_id: TenantId, answers: int) -> None:
        """Adds `answers` to the answers that the tenant has in flight. Only this module calls this method."""
        self._held[tenant_id] += answers

    def give_back(self, tenant_id: TenantId, answers: int) -> None:
        """Subtracts `answers` from the answers that the tenant has in flight. Only HeldPlaces calls this method."""
        self._held[tenant_id] -= answers
        if not self._held[tenant_id]:
            del self._held[tenant_id]
        self._throughput.record_finished()

    def _room_beside_others(self, tenant_id: TenantId) -> int | None:
        """Returns the most answers that the tenant may have in flight now. None if there is no limit.

        The engine takes a place in the batch for each answer of a tenant with few, so a tenant with many has one less.
        """
        if self._max_tenant is None:
            return None
        others = self._held.total() - self._held.get(tenant_id, 0)
        return self._max_tenant - min(others, self._max_tenant // _OTHERS_SHARE)

    def _is_full(self, answers: int) -> bool:
        return self._max_total is not None and self._held.total() + answers > self._max_total

    def _most_of_others(self, tenant_id: TenantId) -> int:
        return max((held for other, held in self._held.items() if other != tenant_id), default=0)

    def _full(self, reason: str) -> CapacityContended:
        return CapacityContended(
            f"This request cannot wait: {reason}. Send fewer requests at a time, and try again later.",
            retry_after_s=self._throughput.retry_after_s(),
        )
