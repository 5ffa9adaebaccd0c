"""Decides whether a request may wait, and which waiting requests make room for it.

Owns only the rule. Never queues or fails a request: the scheduler does. A decision takes time for each domain that waits,
and not for each request: under a flood it is made for every request that comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest

from graftwork.engine.core.queue_room import QueueRoom, cannot_wait, too_many_of_yours
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import WaitingOrder
from graftwork.engine.scheduler.order.waiting_sizes import QueueSize
from graftwork.platform.errors import CapacityContended
from graftwork.platform.ids import IsolationDomain

_NEAR = 0.125
"""A domain is near a bound if at most this part of it is left."""
MAX_ROOMS = 16
"""The most domains whose room is told: those with the least left."""


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
            raise too_many_of_yours(own.requests, own.tokens, retry_after_s)
        total, room = self._waiting.total_size(), QueueSize(limits.requests + free_places, limits.tokens)
        displaced: list[RequestState] = []
        while total.requests and not total.plus(state).fits(room):
            by_tokens = total.requests < room.requests
            last = self._last_of_largest(displaced, by_tokens=by_tokens)
            if last is None or not self._has_more(last, state, displaced, by_tokens=by_tokens):
                raise cannot_wait(f"the queue is full: {self._waiting.total_size()} wait", retry_after_s)
            displaced.append(last)
            total = total.minus(last)
        return displaced

    def rooms(self, free_places: int, retry_after_s: float) -> tuple[QueueRoom, ...]:
        """Returns what is left of the bounds to the domains that are near them: `MAX_ROOMS` with the least left, at most.

        `displaced_by` refuses a new request that needs more than is left to its domain. `free_places` and `retry_after_s`
        are as there.
        """
        limits, sizes = self._limits, {domain: self._waiting.size_of(domain) for domain in self._waiting.all_domains}
        most_requests = nlargest(2, (size.requests for size in sizes.values()))
        most_tokens = nlargest(2, (size.tokens for size in sizes.values()))
        whole = self._left_to_all(free_places)
        found: list[tuple[float, QueueRoom]] = []
        for domain, own in sizes.items():
            requests, tokens = limits.domain_requests + free_places - own.requests, limits.domain_tokens - own.tokens
            if _displaces_none(own.requests, most_requests):
                requests = min(requests, whole.requests)
            if whole.requests > 0 and _displaces_none(own.tokens, most_tokens):
                tokens = min(tokens, whole.tokens)
            part = min(requests / limits.domain_requests, tokens / max(limits.domain_tokens, 1))
            if part <= _NEAR:
                found.append((part, QueueRoom(domain.hex(), own.requests, own.tokens, requests, tokens, retry_after_s)))
        return tuple(room for _, room in nsmallest(MAX_ROOMS, found))

    def _left_to_all(self, free_places: int) -> QueueSize:
        """Returns how many more requests and tokens may wait of all domains."""
        total = self._waiting.total_size()
        return QueueSize(self._limits.requests + free_places - total.requests, self._limits.tokens - total.tokens)

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
    return cannot_wait("the queue is full, and most of it are requests of yours", retry_after_s)


def _displaces_none(own: int, most: Sequence[int]) -> bool:
    """Returns whether a new request of a domain of size `own` displaces no request of another domain from a full queue.

    `most` are the two largest sizes of all domains, of which one may be its own.
    """
    others = most[1:] if most[0] == own else most
    return not others or others[0] <= own + 1
