"""Prepares what a step does for one request: allocates the request's pages, and describes the tokens to compute.

Owns the set of starved requests: running requests that lack a page. Never frees a page itself: the scheduler preempts.

A request needs another page whenever its last page is full. If no page is free, a running request is preempted, which
may be the request itself: first one of an isolation domain (usually one tenant) with more than its fair number of
places in the batch, else the one with the lowest priority. While copies to the host run, the request waits for the
pages that they will free.

A slice is the part of a step that belongs to one request: the request's next known tokens, then its draft tokens, and
how to sample the tokens after them. Invariant: a slice samples only if it contains the last known token.
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
    """Makes the slice of a request: the part of a step that belongs to this request."""

    def __init__(self, page_tokens: int, grammars: GrammarProvider) -> None:
        self._page_tokens = page_tokens
        self._grammars = grammars

    def slice(self, state: RequestState, num_tokens: int, drafted: tuple[int, ...]) -> RequestSlice:
        """Returns the slice of a request, which is the request's part of a step.

        It contains the next `num_tokens` known tokens, then the draft tokens `drafted`. The request must have pages for
        all.
        """
        start, known_end = state.num_computed, state.num_computed + num_tokens
        is_last = known_end == len(state.token_ids)
        return RequestSlice(
            request_id=state.request_id,
            token_ids=(*state.token_ids[start:known_end], *drafted),
            start=start,
            pages=tuple(state.pages[: pages_for(known_end + len(drafted), self._page_tokens)]),
            adapters=state.request.adapters,
            samples=self._sample_specs(state, drafted) if is_last and state.generates else (),
            scores=state.scores(known_end),
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
    """Allocates further pages to running requests, so that the next step can store the KV of their tokens."""

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
        """Running requests that lack a page for their next token."""

    def grow(self, state: RequestState, num_tokens: int, planned: set[RequestId]) -> bool:
        """Allocates the pages that a request lacks for its next `num_tokens` tokens. If needed, preempts other
        requests.

        Requests in `planned` are part of the next step already and are not preempted. Returns False if the request gets
        no pages: it must wait, or it was preempted itself.
        """
        if state.pending_loads:
            return False
        missing = pages_for(state.num_computed + num_tokens, self._page_tokens) - len(state.pages)
        if missing <= 0:
            return True
        pages = self._kv_cache.allocate_pages(missing, state.domain)
        while pages is None and not self._kv_cache.page_store.device.in_flight_pages:
            victim = self.next_victim(planned)
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
        """Allocates the pages that a request lacks for the draft tokens `drafted`. Preempts no request.

        Returns the first draft tokens, as many as there are pages for.
        """
        known = len(state.token_ids)
        missing = pages_for(known + len(drafted), self._page_tokens) - len(state.pages)
        if not drafted or missing <= 0:
            return drafted
        pages = self._kv_cache.allocate_pages(missing, state.domain)
        if pages is None:
            return drafted[: len(state.pages) * self._page_tokens - known]
        state.pages += pages
        return drafted

    def next_victim(self, excluded: Iterable[RequestId] = ()) -> RequestState | None:
        """Returns the running request to preempt first, in the order of `BatchShares.preemption_order`.

        Leaves out the requests in `excluded` and requests that wait for a load. Returns None if no request is left.
        """
        spared, shares = set(excluded), BatchShares(self._max_running, self._running.values(), ())
        candidates = [one for one in self._running.values() if one.request_id not in spared and not one.pending_loads]
        return max(candidates, key=shares.preemption_order, default=None)
