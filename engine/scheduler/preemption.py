"""Pages for the next tokens of whoever runs, at the cost of whoever deserves them least.

A sequence takes one page more whenever it has filled its last. Where there is none, others are offloaded for it, or it
is itself; while copies are under way it waits for what they free instead, and is starved until then.
"""

from collections.abc import Callable, Iterable, Mapping

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.scheduler.request_state import Sequence
from graftwork.platform.ids import RequestId


class Growth:
    """Owns who is starved; what it takes from whom is the memory's and the scheduler's business."""

    def __init__(
        self,
        memory: KvCacheManager,
        running: Mapping[RequestId, Sequence],
        page_tokens: int,
        preempt: Callable[[Sequence], None],
    ) -> None:
        """`preempt` offloads a running sequence, which is not among `running` when it returns."""
        self._memory = memory
        self._running = running
        self._page_tokens = page_tokens
        self._preempt = preempt
        self.starved: set[RequestId] = set()
        """Running, and without the page that its next token needs."""

    def grow(self, sequence: Sequence, num_tokens: int, planned: set[RequestId]) -> bool:
        """Give a sequence the pages of its next tokens; False if it must wait, or was offloaded itself.

        Those that are `planned` already are not offloaded for it.
        """
        if sequence.arrivals:
            return False
        missing = pages_for(sequence.num_computed + num_tokens, self._page_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        pages = self._memory.allocate_pages(missing, sequence.domain)
        while pages is None and not self._memory.page_store.device.in_flight_pages:
            victim = self.worst(planned)
            if victim is None:
                break
            self._preempt(victim)
            if victim is sequence:
                return False
            pages = self._memory.allocate_pages(missing, sequence.domain)
        if pages is None:
            self.starved.add(sequence.request_id)
            return False
        self.starved.discard(sequence.request_id)
        sequence.pages += pages
        return True

    def fitting(self, sequence: Sequence, drafted: tuple[int, ...]) -> tuple[int, ...]:
        """Give a draft the pages that it needs, if they can be had without taking any from who runs; else cut it."""
        known = len(sequence.token_ids)
        missing = pages_for(known + len(drafted), self._page_tokens) - len(sequence.pages)
        if not drafted or missing <= 0:
            return drafted
        pages = self._memory.allocate_pages(missing, sequence.domain)
        if pages is None:
            return drafted[: len(sequence.pages) * self._page_tokens - known]
        sequence.pages += pages
        return drafted

    def worst(self, but: Iterable[RequestId] = ()) -> Sequence | None:
        """Who is offloaded first: the lowest class, and within it the latest to arrive."""
        spared = set(but)
        candidates = [one for one in self._running.values() if one.request_id not in spared and not one.arrivals]
        return max(candidates, key=lambda one: (one.rank, one.arrived_at), default=None)
