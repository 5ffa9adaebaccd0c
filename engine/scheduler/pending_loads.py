"""Tracks the KV loads that running requests wait for or overlap with.

Owns `pending_loads` and `overlapped_loads` of each request. Never starts a load: the KV cache does at admission.
A request can be computed once all its pending loads have ended. It computes pages again that a load could not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from graftwork.engine.core.step import StepPlan
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.kv.transfer.plan import TransferDone, TransferPlan
from graftwork.engine.scheduler.request_state import RequestState
from graftwork.platform.ids import RequestId


@dataclass(slots=True)
class LoadOutcome:
    """What the end of one load means for the requests that use it."""

    ready: list[RequestState] = field(default_factory=list)
    """Requests that no longer wait for a load."""
    failed: list[RequestId] = field(default_factory=list)
    """Requests that were computed with pages that could not be read. Their tokens since then are invalid."""


class PendingLoads:
    """Tracks every load from its plan to its end."""

    def __init__(self, kv_cache: KvCacheManager, running: Mapping[RequestId, RequestState], page_tokens: int) -> None:
        self._kv_cache = kv_cache
        self._running = running
        self._page_tokens = page_tokens

    def overlap(self, plan: TransferPlan) -> list[RequestState]:
        """Lets steps use a load that still runs: each layer waits for its own KV.

        Returns the requests that no longer wait.
        """
        waiting = [state for state in self._running.values() if plan in state.pending_loads]
        for state in waiting:
            state.pending_loads.discard(plan)
            state.overlapped_loads.add(plan)
        return [state for state in waiting if not state.pending_loads]

    def read_by(self, plan: StepPlan) -> set[TransferPlan]:
        """Returns the running loads into pages that a step reads."""
        return {load for piece in plan.slices for load in self._running[piece.request_id].overlapped_loads}

    def finish(self, done: TransferDone) -> LoadOutcome:
        """Ends a transfer. Pages that it could not read are released and will be computed again."""
        failed_from = self._kv_cache.finish_transfer(done)
        outcome = LoadOutcome()
        for state in self._running.values():
            if done.plan in state.overlapped_loads:
                state.overlapped_loads.discard(done.plan)
                outcome.failed += [] if failed_from is None else [state.request_id]
            elif done.plan in state.pending_loads:
                if failed_from is not None:
                    self._kv_cache.release(state.truncate_pages(failed_from, self._page_tokens))
                state.pending_loads.discard(done.plan)
                outcome.ready += [] if state.pending_loads else [state]
        return outcome
