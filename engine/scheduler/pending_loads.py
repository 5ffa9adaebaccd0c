"""Loads on their way to running sequences: who waits for which, and who reads one that has not ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from graftwork.engine.core.step import StepPlan
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.kv.transfer.plan import TransferDone, TransferPlan
from graftwork.engine.scheduler.request_state import Sequence
from graftwork.platform.ids import RequestId


@dataclass(slots=True)
class Landing:
    """What the end of one load means."""

    arrived: list[Sequence] = field(default_factory=list)
    """Those that have nothing more to wait for."""
    ruined: list[RequestId] = field(default_factory=list)
    """Those that have been computed with what did not arrive: their steps since are worth nothing."""


class Landings:
    """Changes what sequences wait for, and nothing else of them but the pages that could not be read."""

    def __init__(self, memory: KvCacheManager, running: Mapping[RequestId, Sequence], page_tokens: int) -> None:
        self._memory = memory
        self._running = running
        self._page_tokens = page_tokens

    def readable(self, plan: TransferPlan) -> list[Sequence]:
        """A load may be planned with before it has ended; returns those that have nothing more to wait for."""
        waiting = [sequence for sequence in self._running.values() if plan in sequence.arrivals]
        for sequence in waiting:
            sequence.arrivals.discard(plan)
            sequence.reading.add(plan)
        return [sequence for sequence in waiting if not sequence.arrivals]

    def read_by(self, plan: StepPlan) -> set[TransferPlan]:
        """Loads that have not ended, of pages that a step reads."""
        return {load for piece in plan.slices for load in self._running[piece.request_id].reading}

    def landed(self, done: TransferDone) -> Landing:
        """A transfer has ended: who waited for it goes on, without the pages that could not be read."""
        failed_from = self._memory.finish_transfer(done)
        landing = Landing()
        for sequence in self._running.values():
            if done.plan in sequence.reading:
                sequence.reading.discard(done.plan)
                landing.ruined += [] if failed_from is None else [sequence.request_id]
            elif done.plan in sequence.arrivals:
                if failed_from is not None:
                    self._memory.release(sequence.give_back(failed_from, self._page_tokens))
                sequence.arrivals.discard(done.plan)
                landing.arrived += [] if sequence.arrivals else [sequence]
        return landing
