"""Defines what the scheduler asks of an order of waiting requests, and what all orders have in common.

    WaitingOrder           the protocol: every policy that the scheduler can run with
    WaitingSizes           counts the waiting requests and their prompt tokens by domain
    FirstComeFirstServed   the order of arrival, as a baseline for the fair orders

Owns no request. Never changes a request, and never checks whether there is room for it.
Invariant: an order yields each waiting request once, and forgets it when it is removed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.request_state import RequestState
from graftwork.engine.scheduler.service_cost import ServiceUse
from graftwork.platform.ids import IsolationDomain, RequestId

TIER_PRIORITY = {ServiceTier.PRIORITY: 0, ServiceTier.DEFAULT: 1, ServiceTier.FLEX: 2}
"""The priority of each service tier; 0 is the highest."""


@dataclass(frozen=True, slots=True)
class QueueSize:
    """A number of waiting requests, and of the tokens in their prompts."""

    requests: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.requests} requests with {self.tokens} prompt tokens"

    def plus(self, state: RequestState) -> "QueueSize":
        return QueueSize(self.requests + 1, self.tokens + state.num_prompt)

    def minus(self, state: RequestState) -> "QueueSize":
        return QueueSize(self.requests - 1, self.tokens - state.num_prompt)

    def fits(self, room: "QueueSize") -> bool:
        """Returns whether neither number is above the number in `room`."""
        return self.requests <= room.requests and self.tokens <= room.tokens

    def measure(self, *, by_tokens: bool) -> int:
        return self.tokens if by_tokens else self.requests


class WaitingOrder(Protocol):
    """Holds the waiting requests, and says in which order they should be admitted.

    `for state in order` yields all waiting requests, in no useful order. `candidates` yields them in order.
    """

    @property
    def shares_places(self) -> bool:
        """Whether a running request may be preempted for a waiting one, because of its tier or its domain's share."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RequestState]: ...

    def size_of(self, domain: IsolationDomain) -> QueueSize:
        """Returns how many requests of one domain (usually one tenant) wait."""
        ...

    def total_size(self) -> QueueSize:
        """Returns how many requests of all domains wait."""
        ...

    def enqueue(self, state: RequestState) -> None:
        """Adds a request that arrives, or that was preempted: then it keeps its place by its time of arrival."""
        ...

    def remove(self, state: RequestState) -> None:
        """Removes a waiting request, because it ends. Raises KeyError if it does not wait."""
        ...

    def start(self, state: RequestState) -> None:
        """Removes a waiting request, because it is admitted. Raises KeyError if it does not wait."""
        ...

    def candidates(self) -> Iterator[RequestState]:
        """Yields the waiting requests in the order in which they should be admitted, if each is admitted in turn.

        The order must not be changed (enqueue, remove, charge) until the iterator is exhausted or closed.
        """
        ...

    def priority(self, state: RequestState) -> int:
        """Returns the current priority of a request: 0 is the highest, larger numbers are lower."""
        ...

    def charge(self, state: RequestState, use: ServiceUse) -> None:
        """Charges the domain of a request, which may run or have ended, for what the request has used."""
        ...


def first_candidates(order: WaitingOrder, number: int) -> list[RequestState]:
    """Returns all waiting requests: the first `number` in the order in which they should be admitted, then the others as
    they came. So a step costs no more than it can admit.
    """
    first = list(islice(order.candidates(), number))
    if len(first) == len(order):
        return first
    chosen = {state.request_id for state in first}
    return first + [state for state in order if state.request_id not in chosen]


class WaitingSizes:
    """Counts the waiting requests and their prompt tokens: of each domain (usually one tenant), and of all."""

    def __init__(self) -> None:
        self._by_domain: dict[IsolationDomain, QueueSize] = {}
        self.total = QueueSize()

    def of(self, domain: IsolationDomain) -> QueueSize:
        return self._by_domain.get(domain, QueueSize())

    def add(self, state: RequestState) -> None:
        self._by_domain[state.domain] = self.of(state.domain).plus(state)
        self.total = self.total.plus(state)

    def remove(self, state: RequestState) -> None:
        left = self._by_domain.pop(state.domain).minus(state)
        if left.requests:
            self._by_domain[state.domain] = left
        self.total = self.total.minus(state)


class FirstComeFirstServed:
    """Serves requests in the order of their arrival, whatever their tier and domain. Implements WaitingOrder.

    A flood of one tenant delays all others: this order is for comparison, not for serving several tenants.
    """

    shares_places = False

    def __init__(self) -> None:
        self._waiting: dict[RequestId, RequestState] = {}
        self._sizes = WaitingSizes()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._waiting.values())

    def size_of(self, domain: IsolationDomain) -> QueueSize:
        return self._sizes.of(domain)

    def total_size(self) -> QueueSize:
        return self._sizes.total

    def enqueue(self, state: RequestState) -> None:
        self._waiting[state.request_id] = state
        self._sizes.add(state)

    def remove(self, state: RequestState) -> None:
        del self._waiting[state.request_id]
        self._sizes.remove(state)

    start = remove

    def candidates(self) -> Iterator[RequestState]:
        return iter(sorted(self._waiting.values(), key=lambda state: state.arrived_at))

    def priority(self, state: RequestState) -> int:
        """Returns the same priority for each request."""
        return TIER_PRIORITY[ServiceTier.DEFAULT]

    def charge(self, state: RequestState, use: ServiceUse) -> None:
        """Does nothing: nobody's past counts."""
