"""Finds the waiting requests that may start in the next step: those that lack neither adapter nor grammar.

    1  of domains (usually, one domain is one tenant) with at most half their fair number of places, if they are due
    2  in the order of all waiting requests, as many as there are places and prompt tokens
    3  of domains for which a running request would give up its place, or whose prompts are shorter than those ahead

Reads no more of the queue than may start, and of each domain its tier and its service: so a step costs no more if a flood
waits. Owns nothing. Asks for adapters and grammars in time. Never admits or ends a request. Charges each copy of an adapter
to the device to the domain of a request that waited for it.
"""

from collections.abc import Iterable, Iterator

from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.scheduler.order.batch_shares import BatchShares
from graftwork.engine.scheduler.order.prompt_turns import RunningPrompts
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import ServiceUse, WaitingDomain, WaitingOrder
from graftwork.engine.scheduler.resources import AdapterProvider, GrammarProvider
from graftwork.engine.step_recorder import StepRecorder
from graftwork.platform.errors import GraftworkError

_LOOKAHEAD = 16
"""At most so many requests that lack an adapter or a grammar are passed over. After these, free places go to the others as
they came, so that no place stays empty.
"""


class Candidates:
    """Asks for what the waiting requests need, and chooses those that may start."""

    def __init__(
        self, waiting: WaitingOrder, adapters: AdapterProvider, grammars: GrammarProvider, recorder: StepRecorder
    ) -> None:
        self._waiting = waiting
        self._adapters = adapters
        self._grammars = grammars
        self._recorder = recorder
        self.refused: list[tuple[RequestState, GraftworkError]] = []
        """The requests that `choose` found to be impossible, with their errors. The caller must end them."""

    def want(self, domains: Iterable[WaitingDomain], *, may_place: bool) -> bool:
        """Asks for the adapters and grammars of all waiting requests, those of each domain's oldest request first.

        `may_place` is False while a step uses the device. Returns whether all steps should land soon (see
        AdapterProvider.want).
        """
        needs = self._waiting.needs
        oldest = [one.oldest.request.adapter_digests for one in domains] if needs.groups else []
        groups = list(dict.fromkeys(group for group in (*oldest, *needs.groups) if group))
        should_land = self._adapters.want(groups, may_place=may_place)
        for digest, num_bytes in self._adapters.take_placed():
            self._charge_copy(digest, num_bytes)
        self._grammars.want([one.request for one in needs.with_grammar])
        return should_land

    def _charge_copy(self, digest: str, num_bytes: int) -> None:
        users = (one for one in self._waiting if digest in one.request.adapter_digests)
        first = min(users, key=lambda one: one.arrived_at, default=None)
        if first is not None:
            self._waiting.charge(first, ServiceUse(adapter_bytes=num_bytes))

    def choose(
        self, domains: list[WaitingDomain], shares: BatchShares, places: int, prompts: RunningPrompts
    ) -> Iterable[RequestState]:
        """Returns the requests that may start, in the order in which they should. `domains` are those with waiting requests,
        and `places` is the number of free places. Sets `refused`.
        """
        self.refused = []
        chosen: dict[RequestState, None] = {}
        for domain in domains:
            num_lacking = shares.num_below_half(domain)
            if num_lacking and domain.is_due and domain.tier is domains[0].tier:
                self._add(chosen, self._waiting.best_of(domain), num_lacking)
        if places > 0:
            self._add(chosen, self._waiting.candidates(), places, prompts.room)
            if len(chosen) == len(self._waiting):
                return chosen
            left = prompts.room - sum(map(self._waiting.uncached_tokens, chosen))
            others = (state for state in self._waiting if state not in chosen)
            self._add(chosen, others, places - len(chosen), left, lookahead=len(self._waiting))
        for domain in domains:
            is_free = len(chosen) < places and shares.num_lacking(domain) > 0
            if is_free or shares.victims_for(domain.oldest, self._waiting.priority(domain.oldest)):
                self._add(chosen, self._waiting.best_of(domain), max(shares.num_lacking(domain), 1))
        return chosen

    def _add(
        self,
        chosen: dict[RequestState, None],
        candidates: Iterator[RequestState],
        most: int,
        tokens: float = float("inf"),
        *,
        lookahead: int = _LOOKAHEAD,
    ) -> None:
        """Adds requests that can start, until the chosen ones of `candidates` are `most` or have so many prompt `tokens`. Gives
        up after `lookahead` requests that cannot start.
        """
        if most <= 0 or tokens <= 0:
            return
        passed = 0
        for state in candidates:
            if state in chosen:
                most, tokens = most - 1, tokens - self._waiting.uncached_tokens(state)
            elif self._is_ready(state):
                chosen[state] = None
                most, tokens = most - 1, tokens - self._waiting.uncached_tokens(state)
            else:
                passed += 1
            if most <= 0 or tokens <= 0 or passed >= lookahead:
                return

    def _is_ready(self, state: RequestState) -> bool:
        request: EngineRequest = state.request
        refusal = self._adapters.refusal(request.adapters) or self._grammars.refusal(request)
        if refusal is not None:
            if all(state is not one for one, _ in self.refused):
                self.refused.append((state, refusal))
            return False
        is_ready = all(map(self._adapters.is_ready, request.adapter_digests)) and self._grammars.is_ready(request)
        self._recorder.considers(request, is_ready=is_ready)
        return is_ready
