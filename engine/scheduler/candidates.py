"""Finds the waiting requests that could start now: those that lack neither adapter nor grammar.

Owns nothing. Asks for adapters and grammars in the order of the requests that need them. Never admits or ends a request.
Charges each copy of an adapter to the device to the domain (usually one tenant) of the first request that asked for it.
"""

from collections.abc import Sequence

from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import ServiceUse, WaitingOrder, first_candidates
from graftwork.engine.scheduler.resources import AdapterProvider, GrammarProvider
from graftwork.platform.errors import GraftworkError

_LOOKAHEAD = 16
"""So many waiting requests beyond those that fit are put in order: they may preempt, or replace some that cannot start."""


class Candidates:
    """Asks for what the waiting requests need, and tells which of them have it."""

    def __init__(self, waiting: WaitingOrder, adapters: AdapterProvider, grammars: GrammarProvider) -> None:
        self._waiting = waiting
        self._adapters = adapters
        self._grammars = grammars
        self.refused: list[tuple[RequestState, GraftworkError]] = []
        """The requests that `ready` found to be impossible, with their errors. The caller must end them."""

    def want(self, places: int, tokens: int, *, may_place: bool) -> tuple[list[RequestState], bool]:
        """Asks for the adapters and grammars of waiting requests. Returns the requests in the order in which they should be
        admitted, at least those that fit into `places` and prompt `tokens`, and whether all steps should land soon.

        `may_place` is False while a step uses the device (see AdapterProvider.want).
        """
        candidates = first_candidates(self._waiting, places, tokens, _LOOKAHEAD)
        groups = [digests for one in candidates if (digests := one.request.adapter_digests)]
        should_land = self._adapters.want(groups, may_place=may_place)
        self._charge_copies(candidates)
        self._grammars.want([one.request for one in candidates if one.request.grammar is not None])
        return candidates, should_land

    def ready(self, candidates: Sequence[RequestState]) -> list[RequestState]:
        """Returns those of `candidates` that can start now. Sets `refused`."""
        self.refused = []
        ready: list[RequestState] = []
        for state in candidates:
            refusal = self._adapters.refusal(state.request.adapters) or self._grammars.refusal(state.request)
            if refusal is not None:
                self.refused.append((state, refusal))
            elif self._is_ready(state.request):
                ready.append(state)
        return ready

    def _is_ready(self, request: EngineRequest) -> bool:
        return all(map(self._adapters.is_ready, request.adapter_digests)) and self._grammars.is_ready(request)

    def _charge_copies(self, candidates: Sequence[RequestState]) -> None:
        for digest, num_bytes in self._adapters.take_placed():
            cause = next((one for one in candidates if digest in one.request.adapter_digests), None)
            if cause is not None:
                self._waiting.charge(cause, ServiceUse(adapter_bytes=num_bytes))
