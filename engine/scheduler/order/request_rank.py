"""Ranks the waiting requests of one service tier by what decides between them besides the counters of fair_share.py.

    DeficitSettings   how far an order may deviate from strict turns, and for how long
    RequestRanks      what is known between walks: locality, prices, running agent programs, and time
    WalkRanks         the ranks during one walk, in which each request that is taken counts as started

Owns the times of the last turns of sessions. Never changes a request. Invariant: during a walk, the rank of a request
never improves, so a heap of ranks needs to check only its first entry.

A request ranks lower while the first uncached page of its prompt is being computed for another request: a moment later
it finds this page in the cache. Source: in-batch prefix caching in SGLang's schedule_policy.py.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from graftwork.engine.core.requests import SessionKey
from graftwork.engine.scheduler.order.fair_group import Rank
from graftwork.engine.scheduler.order.locality import Locality
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import ServicePrices, ServiceUse
from graftwork.platform.clock import Clock
from graftwork.platform.ids import IsolationDomain

MAX_PROGRAMS = 4096
"""The most sessions whose last turn is remembered."""


@dataclass(frozen=True, slots=True)
class DeficitSettings:
    """How far the order may deviate from strict turns, and for how long."""

    quantum: float = 2048.0
    """The most by which two domains of weight 1 may differ for the sake of locality, in uncached prompt tokens; 0 means
    strict turns. A good value is a few steps of prompt tokens.
    """
    patience_s: float = 30.0
    """A request that has waited so many seconds is overdue."""
    adapter_tokens: int = 256
    """How many cached tokens an adapter on the device is worth: the tokens that are computed in the time of a load."""
    programs_first: bool = True
    """Whether turns of running agent programs go before new programs of the same domain."""
    program_idle_s: float = 300.0
    """A session whose last turn started longer ago is no running program any more."""
    window: int = 16
    """The most members of a group that are compared by locality in a round."""
    requests: int = 32
    """The most requests of a domain that are compared by locality at a time, divided evenly among its flows."""


class RequestRanks:
    """What decides between requests besides the counters: locality, costs, running programs, and time."""

    def __init__(self, clock: Clock, locality: Locality, prices: ServicePrices, settings: DeficitSettings) -> None:
        self._clock = clock
        self.locality = locality
        self.prices = prices
        self.settings = settings
        self.programs = _Programs(clock, settings.program_idle_s)

    def walk(self) -> "WalkRanks":
        """Returns the ranks for a new walk."""
        return WalkRanks(self)

    def is_overdue(self, state: RequestState) -> bool:
        return self._clock.monotonic() - state.arrived_at >= self.settings.patience_s


class WalkRanks:
    """Ranks requests during one walk."""

    def __init__(self, ranks: RequestRanks) -> None:
        self._ranks = ranks
        self.settings = ranks.settings
        self.is_overdue = ranks.is_overdue
        self._pages_taken: set[Hashable] = set()
        self.num_taken = 0
        """How many requests were taken so far. A rank can have changed only if this number has."""

    def take(self, state: RequestState) -> None:
        """Records that the walk has taken a request, which would compute the first uncached page of its prompt."""
        self.num_taken += 1
        page = self._ranks.locality.next_page(state)
        if page is not None:
            self._pages_taken.add(page)

    def rank_and_cost(self, state: RequestState) -> tuple[Rank, float]:
        """Returns the rank of a request among the flows of its domain, and what its admission will cost the domain."""
        locality, settings = self._ranks.locality, self.settings
        cached = locality.cached_tokens(state)
        saved = cached + (settings.adapter_tokens if locality.has_adapters(state) else 0)
        is_new = not (settings.programs_first and self._ranks.programs.is_running(state))
        uncached = 0 if state.is_admitted else max(state.num_prompt - cached, 1)
        cost = self._ranks.prices.cost(ServiceUse(input_tokens=uncached)) / state.request.weight
        return (not state.has_run, self._is_computed_by_another(state), is_new, -saved, state.arrived_at), cost

    def _is_computed_by_another(self, state: RequestState) -> bool:
        page = self._ranks.locality.next_page(state)
        return page is not None and (page in self._pages_taken or self._ranks.locality.is_being_computed(page))


class _Programs:
    """Remembers when each session last started a turn."""

    def __init__(self, clock: Clock, idle_s: float) -> None:
        self._clock = clock
        self._idle_s = idle_s
        self._turns: OrderedDict[tuple[IsolationDomain, SessionKey], float] = OrderedDict()

    def record_turn(self, state: RequestState) -> None:
        if state.request.session is None:
            return
        key = (state.domain, state.request.session.session)
        self._turns[key] = self._clock.monotonic()
        self._turns.move_to_end(key)
        if len(self._turns) > MAX_PROGRAMS:
            self._turns.popitem(last=False)

    def is_running(self, state: RequestState) -> bool:
        session = state.request.session
        last = None if session is None else self._turns.get((state.domain, session.session))
        return last is not None and self._clock.monotonic() - last <= self._idle_s
