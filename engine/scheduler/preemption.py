"""Prepares the part of a step that belongs to one request: allocates its pages, and describes the rows to compute.

Owns the set of starved requests: running requests that lack a page. Never frees a page itself: the scheduler preempts.
A request needs another page whenever its last page is full. If no page is free, a request of a domain above its
fair number of places is preempted, or else the lowest-priority request; it may be the request itself. While copies to the host run, it waits for the pages that they will free.

A slice is the part of one request in a step: its next known tokens, then its draft tokens, and how to sample them.
Invariant: rows are sampled only where a slice reaches the last known token.
"""

from collections.abc import Callable, Iterable, Mapping

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.step import RequestSlice, SampleSpec
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.scheduler.request_state import RequestState
from graftwork.engine.scheduler.resources import GrammarProvider
from graftwork.engine.scheduler.tenant_bounds import BatchShares
from graftwork.platform.ids import RequestId


class StepBuilder:
    """Turns the state of a request into a slice of a step."""

    def __init__(self, page_tokens: int, grammars: GrammarProvider) -> None:
        self._page_tokens = page_tokens
        self._grammars = grammars

    def slice(self, state: RequestState, num_tokens: int, drafted: tuple[int, ...]) -> RequestSlice:
        """Returns a slice of the next `num_tokens` known tokens, then `drafted`. The request must have pages for both."""
        start, known_end = state.num_computed, state.num_computed + num_tokens
        is_last = known_end == len(state.token_ids)
        return RequestSlice(
            request_id=state.request_id,
            token_ids=(*state.token_ids[start:known_end], *drafted),
            start=start,
            pages=tuple(state.pages[: pages_for(known_end + len(drafted), self._page_tokens)]),
            adapters=state.request.adapters,
            samples=self._sample_specs(state, drafted) if is_last else (),
        )

    def _sample_specs(self, state: RequestState, drafted: tuple[int, ...]) -> tuple[SampleSpec, ...]:
        """Returns how to sample the token after the last known token, and the token after each draft token."""
        return tuple(self._sample_spec(state, drafted[:count]) for count in range(len(drafted) + 1))

    def _sample_spec(self, state: RequestState, drafted: tuple[int, ...]) -> SampleSpec:
        banned = state.banned_token_ids(len(drafted))
        return SampleSpec(
            params=state.request.sampling,
            seed=state.seed,
            position=len(state.token_ids) + len(drafted),
            banned_token_ids=banned,
            history=state.updated_history(),
            draft_token_ids=drafted,
            mask=self._grammars.row(state.request_id, banned, drafted),
        )


class PageGrower:
    """Extends the page lists of running requests."""

    def __init__(
        self,
        kv_cache: KvCacheManager,
        running: Mapping[RequestId, RequestState],
        page_tokens: int,
        max_running: int,
        preempt: Callable[[RequestState], None],
    ) -> None:
        """`preempt` offloads a running request and removes it from `running` before it returns."""
        self._kv_cache = kv_cache
        self._running = running
        self._page_tokens = page_tokens
        self._max_running = max_running
        self._preempt = preempt
        self.starved: set[RequestId] = set()
        """Running requests without the page that their next token needs."""

    def grow(self, state: RequestState, num_tokens: int, planned: set[RequestId]) -> bool:
        """Allocates the pages of the next `num_tokens`. False if the request must wait, or was preempted itself.

        Requests in `planned` are part of the step already and are not preempted.
        """
        if state.pending_loads:
            return False
        missing = pages_for(state.num_computed + num_tokens, self._page_tokens) - len(state.pages)
        if missing <= 0:
            return True
        pages = self._kv_cache.allocate_pages(missing, state.domain)
        while pages is None and not self._kv_cache.page_store.device.in_flight_pages:
            victim = self.lowest_priority(planned)
            if victim is None:
                break
            self._preempt(victim)
            if victim is state:
                return False
            pages = self._kv_cache.allocate_pages(missing, state.domain)
        if pages is None:
            self.starved.add(state.request_id)
            return False
        self.starved.discard(state.request_id)
        state.pages += pages
        return True

    def fit_draft(self, state: RequestState, drafted: tuple[int, ...]) -> tuple[int, ...]:
        """Allocates the pages of a draft without preempting a request. Returns the part of the draft that has pages."""
        known = len(state.token_ids)
        missing = pages_for(known + len(drafted), self._page_tokens) - len(state.pages)
        if not drafted or missing <= 0:
            return drafted
        pages = self._kv_cache.allocate_pages(missing, state.domain)
        if pages is None:
            return drafted[: len(state.pages) * self._page_tokens - known]
        state.pages += pages
        return drafted

    def lowest_priority(self, excluded: Iterable[RequestId] = ()) -> RequestState | None:
        """Returns the request to preempt first, in the order of BatchShares; None if there is none."""
        spared, shares = set(excluded), BatchShares(self._max_running, self._running.values(), ())
        candidates = [one for one in self._running.values() if one.request_id not in spared and not one.pending_loads]
        return max(candidates, key=shares.preemption_order, default=None)
