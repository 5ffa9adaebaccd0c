"""Tracks the loads of KV that running requests use.

A request can be computed once all its pending loads have ended. Pages that a load could not read are computed again.

Owns nothing: a request's state has its loads. Never starts a load, which the KV cache does at admission.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from graftwork.engine.core.step import StepPlan
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.kv.transfer.plan import TransferDone, TransferPlan
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.platform.errors import InternalFailure
from graftwork.platform.ids import RequestId


@dataclass(slots=True)
class LoadOutcome:
    """Which requests can start and which have failed, now that one load of KV has ended."""

    ready: list[RequestState] = field(default_factory=list)
    """Requests that can be computed now, because they wait for no other load."""
    failed: list[RequestId] = field(default_factory=list)
    """Requests that steps have computed with KV that the load then failed to copy. Their last tokens are invalid."""

    @property
    def error(self) -> InternalFailure:
        """The error with which the failed requests end."""
        return InternalFailure(
            "KV could not be copied from the host to the device while this request was computed; the engine's log says "
            "why."
        )


class PendingLoads:
    """Tracks which running requests wait for which loads of KV to the device."""

    def __init__(self, kv_cache: KvCacheManager, running: Mapping[RequestId, RequestState], page_tokens: int) -> None:
        self._kv_cache = kv_cache
        self._running = running
        self._page_tokens = page_tokens

    def overlap(self, plan: TransferPlan) -> list[RequestState]:
        """Records that steps may compute requests while the load `plan` still runs: each layer waits only for its own
        KV.

        Returns the requests that can be computed now, because they wait for no other load.
        """
        waiting = [state for state in self._running.values() if plan in state.pending_loads]
        for state in waiting:
            state.pending_loads.discard(plan)
            state.overlapped_loads.add(plan)
        return [state for state in waiting if not state.pending_loads]

    def read_by(self, plan: StepPlan) -> set[TransferPlan]:
        """Returns the loads that still run and that write pages which the step `plan` reads."""
        return {load for piece in plan.slices for load in self._running[piece.request_id].overlapped_loads}

    def finish(self, done: TransferDone) -> LoadOutcome:
        """Processes the end of a load. Pages that the load could not read are released, and their tokens will be
        computed.

        Returns the requests that can start now, and those that have failed.
        """
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
