"""Decides whether a request may wait, and which waiting requests make room for it.

Owns only the rule. Never queues or fails a request: the scheduler does. A decision takes time for each domain that waits,
and not for each request: under a flood it is made for every request that comes.
"""

from dataclasses import dataclass

from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import WaitingOrder
from graftwork.engine.scheduler.order.waiting_sizes import QueueSize
from graftwork.platform.errors import CapacityContended
from graftwork.platform.ids import IsolationDomain


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
        found: list[tuple[int, int, float, RequestState]] = []
        for domain in self._waiting.all_domains:
            size = self._left(domain, gone).measure(by_tokens=by_tokens)
            if found and size < found[-1][0]:
                continue
            last = next((one for one in self._waiting.last_of(domain) if one not in gone), None)
            if last is not None:
                found.append((size, self._waiting.priority(last), last.arrived_at, last))
        return max(found, key=lambda entry: entry[:3], default=(0, 0, 0.0, None))[-1]

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
