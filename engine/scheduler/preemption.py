"""Allocates pages for the next tokens of running requests, and chooses which request to preempt for them.

Owns the set of starved requests: running requests that lack a page. Never frees a page itself: the scheduler preempts.
A request needs another page whenever it has filled its last. Without a free page, the lowest-priority request is
preempted, which may be the request itself. While copies run, the request waits for the pages that they free.
"""

from collections.abc import Callable, Iterable, Mapping

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.scheduler.request_state import RequestState
from graftwork.platform.ids import RequestId


class PageGrower:
    """Extends the page lists of running requests."""

    def __init__(
        self,
        kv_cache: KvCacheManager,
        running: Mapping[RequestId, RequestState],
        page_tokens: int,
        preempt: Callable[[RequestState], None],
    ) -> None:
        """`preempt` offloads a running request and removes it from `running` before it returns."""
        self._kv_cache = kv_cache
        self._running = running
        self._page_tokens = page_tokens
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
        """Returns the request to preempt first: the one with the lowest priority, and at a tie the last to arrive."""
        spared = set(excluded)
        candidates = [one for one in self._running.values() if one.request_id not in spared and not one.pending_loads]
        return max(candidates, key=lambda one: (one.priority, one.arrived_at), default=None)
