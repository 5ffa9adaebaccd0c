"""Defines what the scheduler asks of an order of waiting requests, and what all orders have in common.

    ServiceUse, -Prices    what a request takes of the engine, and what it costs
    QueueLine, QueueLines  where a new request would stand, as numbers
    WaitingOrder           the protocol: every policy that the scheduler can run with
    FirstComeFirstServed   the order of arrival, as a baseline for the fair orders
    RequestTables          which requests wait, which run, and all of them by id: written by the scheduler, read by its parts

Owns no request. Never changes a request, and never checks whether there is room for it.
Invariant: an order yields each waiting request once, and forgets it when it is removed.

The unit of cost is the computation of one uncached prompt token. A step that generates a token reads all weights for few
tokens, so a generated token costs more.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_sizes import QueueSize, WaitingNeeds, WaitingSizes
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import IsolationDomain, RequestId

TIER_PRIORITY = {ServiceTier.PRIORITY: 0, ServiceTier.DEFAULT: 1, ServiceTier.FLEX: 2}
"""The priority of each service tier; 0 is the highest."""


@dataclass(frozen=True, slots=True)
class ServiceUse:
    """What a request has taken of the engine since it was charged last."""

    input_tokens: int = 0
    """Prompt tokens that were not cached, and had to be computed."""
    output_tokens: int = 0
    """Generated tokens."""
    rejected_drafts: int = 0
    """Draft tokens that a step verified and rejected."""
    page_seconds: float = 0.0
    """Device pages of KV, multiplied by the seconds for which the request held them."""
    adapter_bytes: int = 0
    """Bytes of adapter weights that were copied to the device for the request."""


@dataclass(frozen=True, slots=True)
class ServicePrices:
    """The price of each resource, in prompt tokens. None is negative."""

    input_token: float = 1.0
    output_token: float = 2.0
    """Twice a prompt token, as in the evaluation of VTC."""
    rejected_draft: float = 1.0
    """A rejected draft token is a row of a step that is computed anyway, as a prompt token is."""
    page_second: float = 0.0
    """0 by default: how much memory is worth depends on the model and the device. With a device of P pages that
    computes R prompt tokens a second, a price of R / P makes holding all memory as dear as using all computation.
    """
    adapter_megabyte: float = 0.0
    """For 10**6 bytes of adapter weights that are copied to the device."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest if a price is negative or not finite, or if prompt or output tokens are free."""
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidRequest(f"The price {name} must be a number of at least 0.", param=name)
        if not (self.input_token and self.output_token):
            raise InvalidRequest("The prices input_token and output_token must be above 0.", param="input_token")

    def cost(self, use: ServiceUse) -> float:
        """Returns the cost of `use`, in uncached prompt tokens."""
        return (
            self.input_token * use.input_tokens
            + self.output_token * use.output_tokens
            + self.rejected_draft * use.rejected_drafts
            + self.page_second * use.page_seconds
            + self.adapter_megabyte * use.adapter_bytes / 1e6
        )


@dataclass(frozen=True, slots=True)
class QueueLine:
    """Where a new request of one domain (usually one tenant) in one tier would stand. Any thread may read it."""

    counter: float = 0.0
    """The service of the domain so far, divided by its weight: where its first waiting request starts."""
    flow_ends: Mapping[Hashable, float] = field(default_factory=dict)
    """The counter at which a new request of each flow of the domain would start, behind those that wait."""
    flow_floor: float = 0.0
    """The same for a new flow."""
    flow_starts: tuple[float, ...] = ()
    """The counters of their flows at which the waiting requests start, smallest first."""
    costs: tuple[float, ...] = (0.0,)
    """The cost, divided by the weight, of what starts before each of them, and of all at the end."""

    def start_of(self, flow: Hashable) -> float:
        """Returns the counter of the domain at which a new request of a flow would start."""
        return self.counter + self.costs[bisect_right(self.flow_starts, self.flow_ends.get(flow, self.flow_floor))]


@dataclass(frozen=True, slots=True)
class QueueLines:
    """The waiting requests in the order in which they are expected to start, as numbers. Any thread may read it.

    The sort key of a request is its tier's priority, and the counter of its domain at which it starts. It leaves out what
    orders do besides, within their bounds: locality, running programs, and the turns of overdue requests.
    """

    starts: tuple[tuple[int, float], ...] = ()
    """The sort keys of all waiting requests, smallest first."""
    lines: Mapping[tuple[ServiceTier, IsolationDomain], QueueLine] = field(default_factory=dict)
    floors: Mapping[ServiceTier, float] = field(default_factory=dict)
    """The counter at which a new domain would start."""
    token_price: float = 1.0

    def start_of(
        self, tier: ServiceTier, domain: IsolationDomain, flow: Hashable, more: float = 0.0
    ) -> tuple[int, float]:
        """Returns the sort key of a new request. Others with the same key start before it.

        `more` is the cost, divided by the weight, of requests of the domain that are not in the lines and come first.
        """
        line = self.lines.get((tier, domain))
        counter = self.floors.get(tier, 0.0) if line is None else line.start_of(flow)
        return TIER_PRIORITY[tier], counter + more


@dataclass(frozen=True, slots=True)
class WaitingDomain:
    """A domain (usually one tenant) with waiting requests in a tier."""

    tier: ServiceTier
    oldest: RequestState
    is_due: bool
    """Whether its next request may go before those of all other domains in the tier, by the service that each has had."""

    @property
    def domain(self) -> IsolationDomain:
        return self.oldest.domain

    @property
    def weight(self) -> float:
        return self.oldest.request.weight


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

    @property
    def all_domains(self) -> Collection[IsolationDomain]:
        """The domains with waiting requests, in no useful order."""
        ...

    def last_of(self, domain: IsolationDomain) -> Iterator[RequestState]:
        """Yields the waiting requests of a domain that have never run: those of the lowest priority first, and among these
        the last that came.
        """
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

    def domains(self) -> Iterator[WaitingDomain]:
        """Yields the domains with waiting requests: the highest tier first, and in a tier the domain with the least service.

        Nothing if the order knows no domains.
        """
        ...

    def best_of(self, waiting: WaitingDomain) -> Iterator[RequestState]:
        """Yields the waiting requests of a domain in one tier in the order in which they should be admitted, as `candidates`
        does.
        """
        ...

    def service(self, state: RequestState) -> float:
        """Returns the service that the request's domain has had in its tier, divided by its weight."""
        ...

    @property
    def needs(self) -> WaitingNeeds:
        """What the waiting requests need besides places and pages."""
        ...

    def uncached_tokens(self, state: RequestState) -> int:
        """Returns how many tokens of a waiting request must be computed, as far as this order knows the cache, at least 1."""
        ...

    def lines(self, tokens_of: Callable[[RequestState], int]) -> tuple[QueueLines, list[RequestState]]:
        """Returns where new requests would stand, and the waiting requests in the order of `QueueLines.starts`.

        `tokens_of` returns how many tokens of a waiting request must be computed. Takes time for each waiting request and
        for each domain that is remembered, but reads no locality.
        """
        ...

    def priority(self, state: RequestState) -> int:
        """Returns the current priority of a request: 0 is the highest, larger numbers are lower."""
        ...

    def charge(self, state: RequestState, use: ServiceUse) -> None:
        """Charges the domain of a request, which may run or have ended, for what the request has used."""
        ...


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

    @property
    def all_domains(self) -> Collection[IsolationDomain]:
        return self._sizes.domains

    def last_of(self, domain: IsolationDomain) -> Iterator[RequestState]:
        return self._sizes.last_of(domain, self.priority)

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

    def domains(self) -> Iterator[WaitingDomain]:
        return iter(())

    def best_of(self, waiting: WaitingDomain) -> Iterator[RequestState]:
        return iter(())

    def service(self, state: RequestState) -> float:
        return 0.0

    @property
    def needs(self) -> WaitingNeeds:
        return self._sizes.needs

    def uncached_tokens(self, state: RequestState) -> int:
        return len(state.token_ids)

    def lines(self, tokens_of: Callable[[RequestState], int]) -> tuple[QueueLines, list[RequestState]]:
        ahead_of_all = [(-1, float(number)) for number in range(len(self._waiting))]
        return QueueLines(starts=tuple(ahead_of_all)), list(self.candidates())

    def priority(self, state: RequestState) -> int:
        """Returns the same priority for each request."""
        return TIER_PRIORITY[ServiceTier.DEFAULT]

    def charge(self, state: RequestState, use: ServiceUse) -> None:
        """Does nothing: nobody's past counts."""


@dataclass(frozen=True, slots=True)
class RequestTables:
    """The requests of one scheduler."""

    waiting: WaitingOrder
    running: dict[RequestId, RequestState] = field(default_factory=dict)
    """The requests with a place in the batch and pages, by the time at which they got them."""
    by_id: dict[RequestId, RequestState] = field(default_factory=dict)

    def running_adapters(self) -> set[str]:
        """Returns the digests of the adapters of running requests."""
        return {digest for state in self.running.values() for digest in state.request.adapter_digests}

    def waiting_adapters(self) -> set[str]:
        """Returns the digests of the adapters of waiting requests."""
        return {digest for state in self.waiting for digest in state.request.adapter_digests}

    def check_integrity(self) -> None:
        """Checks that each request waits or runs, and not both."""
        assert len(self.by_id) == len(self.running) + len(self.waiting)
        assert self.by_id.keys() >= self.running.keys()
