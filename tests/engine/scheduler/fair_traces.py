"""A server of a few places that runs random arrivals under a WaitingOrder, without a model and without pages."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import islice

from graftwork.engine.core.prefix_keys import CacheScope, PrefixScope
from graftwork.engine.core.requests import EngineRequest, ServiceTier, SessionKey, SessionUse
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import ServiceUse, WaitingOrder
from graftwork.platform.clock import ManualClock
from graftwork.platform.ids import IsolationDomain, RequestId

INPUT, OUTPUT = 1.0, 2.0


def waiting_request(
    name: str,
    domain: str,
    prompt: int,
    *,
    at: float = 0.0,
    weight: float = 1.0,
    tier: ServiceTier = ServiceTier.DEFAULT,
    session: str | None = None,
) -> RequestState:
    """A request that has arrived and not started."""
    request = EngineRequest(
        RequestId(name),
        tuple(range(prompt)),
        SamplingParams(max_tokens=1),
        IsolationDomain(domain.encode()),
        weight=weight,
        tier=tier,
        session=None if session is None else SessionUse(SessionKey(session)),
    )
    return RequestState(
        request, PrefixScope(CacheScope(b"scope")), 0, at, frozenset(), 10**9, token_ids=list(request.prompt_token_ids)
    )


class GivenLocality:
    """A Locality that a test fills: the cached tokens of each request by its name."""

    def __init__(self) -> None:
        self.cached: dict[str, int] = {}
        self.num_reads = 0

    def cached_tokens(self, state: RequestState) -> int:
        self.num_reads += 1
        return self.cached.get(state.request_id, 0)

    def has_adapters(self, state: RequestState) -> bool:
        return True

    def next_page(self, state: RequestState) -> Hashable | None:
        return None

    def is_being_computed(self, page: Hashable) -> bool:
        return False

    def start(self, state: RequestState) -> None:
        """Does nothing: the test tracks."""

    def forget(self, state: RequestState) -> None:
        """Does nothing: the test tracks."""


@dataclass
class Job:
    """One request that arrives, the tokens that it computes, and those that it finds cached."""

    state: RequestState
    outputs: int
    cached: int = 0

    @property
    def cost(self) -> float:
        return INPUT * (self.state.num_prompt - self.cached) + OUTPUT * self.outputs


@dataclass
class Server:
    """Runs at most `places` jobs at a time; each gets one token a step. A step takes one second."""

    order: WaitingOrder
    locality: GivenLocality
    clock: ManualClock
    places: int
    jobs: dict[str, Job] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    """The cost of the service of each domain, divided by its weight; counted without the order's own counters."""
    started: list[str] = field(default_factory=list)

    def arrive(self, job: Job) -> None:
        name = job.state.request_id
        self.jobs[name] = job
        self.locality.cached[name] = job.cached
        job.state.arrived_at = self.clock.monotonic()
        self.order.enqueue(job.state)

    def step(self) -> None:
        room = self.places - len(self.running)
        for state in list(islice(self.order.candidates(), room)):
            self._start(self.jobs[state.request_id])
        for name in list(self.running):
            job = self.jobs[name]
            self._charge(job, ServiceUse(output_tokens=1), OUTPUT)
            self.running[name] -= 1
            if not self.running[name]:
                del self.running[name]
        self.clock.advance(1)

    def _start(self, job: Job) -> None:
        name = job.state.request_id
        self.order.start(job.state)
        uncached = job.state.num_prompt - job.cached
        self._charge(job, ServiceUse(input_tokens=uncached), INPUT * uncached)
        self.running[name] = job.outputs
        self.started.append(name)

    def _charge(self, job: Job, use: ServiceUse, cost: float) -> None:
        domain = job.state.domain.decode()
        self.served[domain] = self.served.get(domain, 0.0) + cost / job.state.request.weight
        self.order.charge(job.state, use)

    def backlogged(self) -> set[str]:
        """The domains with a waiting request."""
        return {state.domain.decode() for state in self.order}
