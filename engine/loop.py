"""The engine's own loop: receive, admit, plan, run, absorb, deliver.

It runs on one thread and owns the scheduler, the LoRA pool and the runner; everybody else talks to it by messages.
Nothing blocks it but the forward pass itself, and having nothing to do.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from graftwork.engine.batch import StepPlan, StepResult
from graftwork.engine.grammar.compiler import GrammarCompiled
from graftwork.engine.grammar.desk import GrammarDesk
from graftwork.engine.kv_memory import KvMemory
from graftwork.engine.layer_gates import LayerGates
from graftwork.engine.lora_pool import AdapterLoaded, LoraPool
from graftwork.engine.outputs import Output
from graftwork.engine.request import EngineRequest, EngineStats, SessionMemory, SessionTending
from graftwork.engine.scheduler import Scheduler
from graftwork.engine.transfers import CopyEngine, LoadReadable, TransferDone
from graftwork.platform.errors import GraftworkError, InternalFailure
from graftwork.platform.ids import IsolationDomain, RequestId

_log = logging.getLogger(__name__)

Sink = Callable[[list[Output]], None]
"""Takes one gateway's outputs of one step; called on the loop's thread, so it must only hand them over."""


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    request: EngineRequest
    sink: Sink


@dataclass(frozen=True, slots=True)
class CancelRequest:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class CancelSink:
    """A gateway is gone: cancel everything that it submitted."""

    sink: Sink


@dataclass(frozen=True, slots=True)
class ForgetAdapter:
    digest: str


@dataclass(frozen=True, slots=True)
class ForgetDomain:
    """A party is gone: give up its KV."""

    isolation: IsolationDomain


@dataclass(frozen=True, slots=True)
class ProbeAdapter:
    """Load an adapter and prove that it is applied exactly; `answer` is called on the loading thread."""

    digest: str
    answer: Callable[[GraftworkError | None], None]


@dataclass(frozen=True, slots=True)
class TendSession:
    """Look after a session's KV between its turns; `answer` is called on the loop's thread."""

    tending: SessionTending
    answer: Callable[[SessionMemory], None]


@dataclass(frozen=True, slots=True)
class ReadStats:
    answer: Callable[[EngineStats], None]


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Message = (
    SubmitRequest
    | CancelRequest
    | CancelSink
    | ForgetAdapter
    | ForgetDomain
    | ProbeAdapter
    | TendSession
    | ReadStats
    | AdapterLoaded
    | GrammarCompiled
    | LoadReadable
    | TransferDone
    | Stop
)


class Runner(Protocol):
    """Carries a step out."""

    def run(self, plan: StepPlan) -> StepResult: ...


class EngineLoop:
    """`inbox` is the only way in; sinks are the only way out."""

    def __init__(
        self,
        inbox: SimpleQueue[Message],
        scheduler: Scheduler,
        adapters: LoraPool,
        grammars: GrammarDesk,
        memory: KvMemory,
        copies: CopyEngine,
        gates: LayerGates,
        runner: Runner,
    ) -> None:
        self.inbox = inbox
        self._scheduler = scheduler
        self._adapters = adapters
        self._grammars = grammars
        self._memory = memory
        self._copies = copies
        self._gates = gates
        self.runner = runner
        """Carries steps out. May be replaced between two steps, by one that watches it."""
        self._sinks: dict[RequestId, Sink] = {}
        self._stopping = False

    def run(self) -> None:
        """Serve until a Stop message."""
        worked = False
        while True:
            self._receive(wait=not worked)
            if self._stopping:
                break
            worked = self.step()
        self._adapters.close()
        self._grammars.close_all()
        self._copies.close()

    def step(self) -> bool:
        """One step of everything that can be admitted; False if there was nothing to do.

        After a False, only a message can bring work: what still waits, waits for a load or a compile.
        """
        self._deliver(self._scheduler.admit())
        plan = self._scheduler.plan()
        if plan is None:
            return False
        self._deliver(self._carry_out(plan))
        return True

    def _carry_out(self, plan: StepPlan) -> list[Output]:
        self._gates.heed(self._scheduler.landings.read_by(plan))
        try:
            return self._scheduler.absorb(plan, self.runner.run(plan))
        except Exception:  # noqa: BLE001 - the outermost loop: one failed step must not end the engine
            _log.exception("step_failed", extra={"request_ids": [piece.request_id for piece in plan.slices]})
            failure = InternalFailure("The engine failed while it computed this request; the engine's log says why.")
            return self._scheduler.fail([piece.request_id for piece in plan.slices], failure)

    # ---- in ---------------------------------------------------------------------------------------------------

    def _receive(self, *, wait: bool) -> None:
        """Take every message in; where there is nothing else to do, wait for the next one."""
        if wait:
            self.take(self.inbox.get())
        while not self._stopping:
            try:
                self.take(self.inbox.get_nowait())
            except Empty:
                return

    def take(self, message: Message) -> None:
        """Act on one message."""
        match message:
            case SubmitRequest(request, sink):
                self._submit(request, sink)
            case CancelRequest(request_id):
                self._cancel(request_id)
            case CancelSink(sink):
                for request_id in [request_id for request_id, other in self._sinks.items() if other == sink]:
                    self._cancel(request_id)
            case AdapterLoaded():
                error = self._adapters.absorb(message)
                if error is not None:
                    self._deliver(self._scheduler.fail_waiting_for(message.digest, error))
            case GrammarCompiled():
                self._grammars.absorb(message)
            case ForgetAdapter(digest):
                self._adapters.forget(digest)
                self._scheduler.speculator.forget_adapter(digest)
            case ForgetDomain(isolation):
                self._memory.forget_owner(isolation)
            case ProbeAdapter(digest, answer_probe):
                self._adapters.probe(digest, answer_probe)
            case LoadReadable(plan, gate):
                self._gates.add(plan, gate)
                self._deliver(self._scheduler.absorb_readable(plan))
            case TransferDone():
                self._gates.remove(message.plan)
                self._deliver(self._scheduler.absorb_transfer(message))
            case TendSession(tending, answer_tending):
                answer_tending(self._scheduler.tend(tending))
            case ReadStats(answer):
                answer(self.stats())
            case Stop():
                self._stopping = True

    def _submit(self, request: EngineRequest, sink: Sink) -> None:
        try:
            self._scheduler.submit(request)
        except GraftworkError as error:
            sink([Output(request.request_id, error)])
        else:
            self._sinks[request.request_id] = sink

    def _cancel(self, request_id: RequestId) -> None:
        self._sinks.pop(request_id, None)
        self._scheduler.cancel(request_id)

    # ---- out --------------------------------------------------------------------------------------------------

    def _deliver(self, outputs: list[Output]) -> None:
        """Hand each gateway its outputs of this step, in one piece."""
        by_sink: dict[Sink, list[Output]] = {}
        for output in outputs:
            by_sink.setdefault(self._sinks[output.request_id], []).append(output)
        for sink, own in by_sink.items():
            sink(own)
        for output in outputs:
            if output.is_last:
                self._sinks.pop(output.request_id, None)

    def stats(self) -> EngineStats:
        """A reading of everything that is counted."""
        counters, drafts = self._scheduler.counters, self._scheduler.speculator.counts
        disk = self._memory.disk_counters
        device, host = self._memory.residency.device, self._memory.residency.host
        return EngineStats(
            running_requests=self._scheduler.num_running,
            waiting_requests=self._scheduler.num_waiting,
            free_pages=device.free_pages,
            cached_pages=device.idle_pages,
            active_pages=device.active_pages,
            in_flight_pages=device.in_flight_pages,
            host_free_pages=host.free_pages,
            host_cached_pages=host.idle_pages,
            host_in_flight_pages=host.in_flight_pages,
            disk_pages=self._memory.num_disk_pages,
            disk_bytes=self._memory.disk_bytes,
            disk_corrupt_files=disk.corrupt,
            disk_foreign_files=disk.foreign,
            disk_failures=disk.failed,
            resident_adapters=self._adapters.resident_digests,
            lora_pool_bytes=self._adapters.num_bytes,
            running_adapters=tuple(sorted(self._scheduler.running_adapters())),
            waiting_adapters=tuple(sorted(self._scheduler.waiting_adapters())),
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            host_tokens=counters.host_tokens,
            disk_tokens=counters.disk_tokens,
            preemptions=counters.preemptions,
            generated_tokens=counters.generated_tokens,
            drafted_tokens=drafts.drafted,
            accepted_tokens=drafts.accepted,
            forced_tokens=drafts.forced,
            adapter_loads=self._adapters.num_loads,
            max_adapters_in_a_step=counters.max_adapters_in_a_step,
        )

    def check_integrity(self) -> None:
        """Check every part between two steps; nobody is served whom no part knows."""
        self._scheduler.check_integrity()
        self._adapters.check_integrity()
        self._grammars.check_integrity(self._scheduler.running_ids)
