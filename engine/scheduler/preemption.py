"""Allocates pages to requests that start or run, and has requests preempted if pages are short.

Owns the set of starved requests: running requests that lack a page. Never frees a page itself: the scheduler preempts.

A request needs another page whenever its last page is full. If no page is free, a running request is preempted, which
may be the request itself. While copies to the host run, the request waits for the pages that they will free.

The victim is the request of the lowest priority; then of the isolation domain (usually one tenant) with the most places
above its fair number; then with the most pages of its own, in powers of two; then with the fewest tokens to compute again;
then with the fewest pages to bring back; then the latest. A page that another request uses is not its own, and a page in the prefix tree need not be brought back.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.index.rolling_pages import RollingPages
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.scheduler.order.batch_shares import BatchShares
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.ids import RequestId


class PageGrower:
    """Allocates pages to requests, so that the next step can store the KV of their tokens."""

    def __init__(
        self,
        kv_cache: KvCacheManager,
        running: Mapping[RequestId, RequestState],
        limits: SchedulerLimits,
        preempt: Callable[[RequestState], bool],
    ) -> None:
        """`preempt` offloads a running request and removes it from `running` before it returns. It returns False, and
        does nothing, if that is impossible now because a step is in flight.
        """
        self._kv_cache = kv_cache
        self._running = running
        self._page_tokens = limits.page_tokens
        self._max_running = limits.max_running
        self._drafts_fill_pages = limits.drafts_fill_pages
        self._preempt = preempt
        self.starved: set[RequestId] = set()
        """Running requests that lack a page for their next token."""

    def allocate(self, state: RequestState) -> bool:
        """Allocates pages for all known tokens of a request that starts, with one page to spare for each running request.

        Returns False if there is no room.
        """
        path = state.path(state.num_reusable)
        match, known, more = self._kv_cache.match(path), len(state.token_ids), 0
        if state.eviction is not None:
            known, more = state.num_prompt, state.eviction.num_pages
        spare = len(self._running) + more
        if self._running and not self._kv_cache.has_room(match, known, spare, state.rolling_window):
            return False
        session = state.request.session
        reason = self._kv_cache.miss_reason(state.path(min(state.num_reusable, state.num_prompt - 1)), match, session)
        allocation = self._kv_cache.allocate_path(path, match, known, session)
        if allocation is None:
            return False
        state.hold(allocation, self._page_tokens, reason)
        return True

    def grow(self, state: RequestState, num_tokens: int, planned: set[RequestId]) -> bool:
        """Allocates the pages that a request lacks for its next `num_tokens` tokens. If needed, preempts other
        requests.

        A token in flight needs its page like any other.

        Requests in `planned` are part of the next step already and are not preempted. Returns False if the request gets
        no pages: it must wait, or it was preempted itself.
        """
        if state.pending_loads:
            return False
        missing = self._lacking(state, state.num_scheduled + num_tokens)
        if missing is None:
            return True
        pages = self._kv_cache.allocate_pages(missing.frames, state.domain)
        while pages is None and not self._kv_cache.page_store.device.in_flight_pages:
            victim = self.next_victim(planned)
            if victim is None or not self._preempt(victim):
                break
            if victim is state:
                return False
            pages = self._kv_cache.allocate_pages(missing.frames, state.domain)
        if pages is None:
            self.starved.add(state.request_id)
            return False
        self.starved.discard(state.request_id)
        missing.give(state, pages)
        return True

    def drop_unseen(self, state: RequestState) -> list[PageId]:
        """Takes from a request the pages that no later query sees: of windowed layer groups, and of a request with a rolling
        window. The caller releases them.
        """
        if state.targets:
            return state.compact()
        dropped, rolling = list[PageId](), self._rolling_pages(state)
        if state.windows is not None:
            dropped += state.windows.drop_before(self._first_seen(state))
        if rolling is not None:
            dropped += state.give_up(rolling.sink_pages, rolling.first_page(state.num_computed))
        return dropped

    def has_unseen(self, state: RequestState) -> bool:
        """Returns whether `drop_unseen` takes pages from a request."""
        if state.targets:
            return state.num_computed >= state.num_prompt
        if state.windows is not None and self._first_seen(state) > state.windows.first:
            return True
        rolling = self._rolling_pages(state)
        if rolling is None:
            return False
        return rolling.first_page(state.num_computed) > rolling.sink_pages + state.num_given_up

    def cache(self, state: RequestState) -> list[PageId]:
        """Inserts a request's computed pages into the prefix cache. The request then uses the shared copies.

        Returns the pages that it no longer uses, which the caller must release. What was computed from evicted KV is not
        inserted.
        """
        if state.is_compacted:
            return []
        dropped = [] if state.rolling_window is None else self.drop_unseen(state)  # what is given up is not cached
        path, session = state.computed_path, state.request.session
        nodes = self._kv_cache.insert(path, state.pages, session, state.windows, state.num_given_up)
        self._kv_cache.prompt_leases.lease(state.request, nodes)
        state.pages, replaced = self._kv_cache.deduplicate(nodes, state.pages, state.windows)
        return dropped + replaced

    def offload(self, state: RequestState) -> None:
        """Ends a running request's use of its pages, and copies them to the host. Drops what was computed from evicted KV: the
        request computes it again from the same prompt.
        """
        if state.is_compacted:
            self._kv_cache.release(state.frames)
            return
        path, session = state.computed_path, state.request.session
        self._kv_cache.release(state.targets)
        self._kv_cache.offload(path, state.pages, session, state.windows, state.num_given_up)

    def gives_up_branches(self, state: RequestState) -> bool:
        """Returns whether `drop_unseen` takes pages of windowed layer groups where other prompts may branch off."""
        return state.windows is not None and not state.forgets and self.has_unseen(state)

    def _first_seen(self, state: RequestState) -> int:
        """Returns the first page that the request's windowed layer groups keep."""
        windows = self._kv_cache.page_store.sizes.windows
        return 0 if windows is None else windows.first_page(state.num_computed)

    def _rolling_pages(self, state: RequestState) -> RollingPages | None:
        if state.rolling_window is None:
            return None
        return self._kv_cache.page_store.sizes.rolling_pages(state.rolling_window)

    def check_integrity(self) -> None:
        """Checks that starved requests run, and that each request has the pages that its next token sees, and no more than
        the sizes of the engine count.
        """
        assert self.starved <= self._running.keys()
        sizes = self._kv_cache.page_store.sizes
        for state in self._running.values():
            num_pages, windows = len(state.pages) + state.num_given_up, sizes.windows
            assert (state.windows is None) == (windows is None), "a request lacks the pages of windowed layer groups"
            if state.windows is not None and windows is not None:
                state.windows.check_integrity(windows, num_pages, state.num_computed)
            most = sizes.frames_for(num_pages * self._page_tokens, state.rolling_window)
            assert state.targets or len(state.frames) <= most, "a request holds pages that it does not need"
            if state.is_compacted:
                assert num_pages * self._page_tokens >= state.num_computed, "a computed token has no page"
            elif state.num_given_up:
                rolling, num_whole = self._rolling_pages(state), state.num_computed // self._page_tokens
                assert rolling is not None, "a request without a rolling window has given up pages"
                first = rolling.sink_pages + state.num_given_up
                assert first <= rolling.first_needed(num_whole), "a page was given up too early"
                assert num_pages >= num_whole, "a computed token has no page"

    def _lacking(self, state: RequestState, num_tokens: int) -> "_LackingPages | None":
        """Returns the pages that a request lacks for its first `num_tokens` tokens; None if it lacks none."""
        end = pages_for(num_tokens, self._page_tokens)
        lacking = max(end - state.num_given_up - len(state.pages), 0)
        windowed = 0 if state.windows is None else max(end - state.windows.end, 0)
        targets = 0
        if state.eviction is not None and not state.num_given_up and num_tokens >= state.num_prompt:
            targets = state.eviction.num_pages - len(state.targets)
        if not lacking and not windowed and not targets:
            return None
        return _LackingPages(lacking, windowed, self._kv_cache.page_store.sizes.frames_of_page - 1, targets)

    def fit_draft(self, state: RequestState, drafted: tuple[int, ...]) -> tuple[int, ...]:
        """Allocates the pages that a request lacks for the draft tokens `drafted`. Preempts no request.

        Returns the first draft tokens, as many as there are pages for, and as may stand in them.
        """
        known = len(state.token_ids)
        if not self._drafts_fill_pages:
            drafted = drafted[: self._page_tokens - 1 - known % self._page_tokens]
        missing = self._lacking(state, known + len(drafted)) if drafted else None
        if missing is None:
            return drafted
        pages = self._kv_cache.allocate_pages(missing.frames, state.domain)
        if pages is None:
            num_pages = len(state.pages) + state.num_given_up
            num_pages = num_pages if state.windows is None else min(num_pages, state.windows.end)
            return drafted[: num_pages * self._page_tokens - known]
        missing.give(state, pages)
        return drafted

    def next_victim(self, excluded: Iterable[RequestId] = ()) -> RequestState | None:
        """Returns the running request to preempt first if pages are short.

        Leaves out the requests in `excluded` and requests that wait for a load. Returns None if no request is left.
        """
        spared, shares = set(excluded), BatchShares(self._max_running, self._running.values())
        candidates = [one for one in self._running.values() if one.request_id not in spared and not one.pending_loads]
        return self.first_victim(candidates, shares)

    def first_victim(self, candidates: Iterable[RequestState], shares: BatchShares) -> RequestState | None:
        """Returns the request that is preempted first of running requests; None if there are none."""

        def order(state: RequestState) -> tuple[int, int, int, int, int, float]:
            own, uncached = self._pages_of(state)
            recomputed = state.num_computed % self._page_tokens  # only whole pages are kept
            return *shares.preemption_order(state), own.bit_length(), -recomputed, -uncached, state.arrived_at

        return max(candidates, key=order, default=None)

    def _pages_of(self, state: RequestState) -> tuple[int, int]:
        """Returns how many pages only this request uses, and how many of its pages the prefix tree lacks."""
        pool = self._kv_cache.page_store.device
        frames = state.frames
        own = sum(pool.holders(page) == 1 + pool.is_cached(page) for page in frames)
        return own, sum(not pool.is_cached(page) for page in frames)


@dataclass(frozen=True, slots=True)
class _LackingPages:
    """The pages that a request lacks."""

    pages: int
    """Pages of the first layer group."""
    windowed: int
    """Pages of tokens that lack those of the windowed layer groups."""
    num_groups: int
    """The number of windowed layer groups."""
    targets: int = 0
    """Pages for what is kept of the prompt."""

    @property
    def frames(self) -> int:
        """The number of pages over all groups."""
        return self.pages + self.windowed * self.num_groups + self.targets

    def give(self, state: RequestState, frames: list[PageId]) -> None:
        """Gives a request the pages that it lacks."""
        state.pages += frames[: self.pages]
        if self.targets:
            state.targets += frames[self.pages :]
        if state.windows is not None:
            state.windows.extend(frames[self.pages :], self.num_groups)
