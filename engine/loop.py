"""Runs the engine's loop: receive messages, admit requests, plan a step, run it, store its tokens, deliver outputs.

Owns the scheduler, the adapter pool, the grammars and the runner. Only the loop's thread uses them; other threads send
it messages. While requests run, the loop waits only for the forward pass. Otherwise it waits for a message.
"""

import logging
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import Protocol

from graftwork.engine.core.events import RequestOutput
from graftwork.engine.core.progress import LoopProgress
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.stats import EngineStats
from graftwork.engine.core.step import StepPlan, StepResult
from graftwork.engine.grammar.compile.compiler import GrammarCompiled
from graftwork.engine.grammar.manager import GrammarManager
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.kv.transfer.plan import CopyEngine, LayerGates, LoadReadable, TransferDone
from graftwork.engine.lora.loader import AdapterLoaded
from graftwork.engine.lora.pool import LoraPool
from graftwork.engine.messages import (
    CancelRequest,
    CancelSink,
    ForgetAdapter,
    ForgetDomain,
    Message,
    ProbeAdapter,
    ReadStats,
    RunSessionCommand,
    Sink,
    Stop,
    SubmitRequest,
)
from graftwork.engine.runner.model_runner import PrefillMeter
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.platform.errors import GraftworkError, InternalFailure
from graftwork.platform.ids import RequestId

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs the forward pass of a step and samples its tokens. ModelRunner implements it."""

    def run(self, plan: StepPlan) -> StepResult: ...


class EngineLoop:
    """Serves requests on one thread.

    Messages come in only through `inbox`. Outputs go out only through sinks: the callbacks that gateways pass with
    their requests.
    """

    def __init__(
        self,
        inbox: SimpleQueue[Message],
        scheduler: Scheduler,
        adapters: LoraPool,
        grammars: GrammarManager,
        kv_cache: KvCacheManager,
        copies: CopyEngine,
        gates: LayerGates,
        runner: Runner,
        prefills: PrefillMeter,
        progress: LoopProgress,
    ) -> None:
        self.inbox = inbox
        self._scheduler = scheduler
        self._adapters = adapters
        self._grammars = grammars
        self._kv_cache = kv_cache
        self._copies = copies
        self._gates = gates
        self.runner = runner
        """Runs the steps. It may be replaced between two steps, for example by a runner that records them."""
        self._prefills = prefills
        self.progress = progress
        """Shows other threads whether the loop advances."""
        self._sinks: dict[RequestId, Sink] = {}
        self._stopping = False

    def run(self) -> None:
        """Handles messages and runs steps until a Stop message arrives. Then ends the threads of the engine's parts."""
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
        """Admits requests and runs one step. Returns False if no request could run.

        In that case only a new message can change something, so the caller waits for one.
        """
        self.progress.advance()
        self._deliver(self._scheduler.admit())
        plan = self._scheduler.plan()
        if plan is None:
            return False
        self._deliver(self._carry_out(plan))
        return True

    def _carry_out(self, plan: StepPlan) -> list[RequestOutput]:
        loads = self._scheduler.pending_loads.read_by(plan)
        self._gates.select(loads)
        try:
            self.progress.advance()
            self._prefills.step_begins()
            result = self.runner.run(plan)
            self.progress.advance()
            self._prefills.step_ended(plan, waited=bool(loads))
            return self._scheduler.absorb(plan, result)
        except Exception:  # noqa: BLE001 - the outermost loop: one failed step must not end the engine
            _log.exception("step_failed", extra={"request_ids": [piece.request_id for piece in plan.slices]})
            failure = InternalFailure("The engine failed while it computed this request; the engine's log says why.")
            return self._scheduler.fail([piece.request_id for piece in plan.slices], failure)

    # ---- in ---------------------------------------------------------------------------------------------------

    def _receive(self, *, wait: bool) -> None:
        """Handles all messages in the inbox. If `wait` is true and the inbox is empty, first waits for a message."""
        if wait:
            self.progress.rest()
            self.take(self.inbox.get())
        while not self._stopping:
            try:
                self.take(self.inbox.get_nowait())
            except Empty:
                return

    def take(self, message: Message) -> None:
        """Handles one message from the inbox."""
        self.progress.advance()
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
            case ForgetDomain(domain):
                self._scheduler.session_cache.forget_domain(domain)
                self._scheduler.speculator.forget_domain(domain)
                self._grammars.forget_domain(domain)
            case ProbeAdapter(digest, answer_probe):
                self._adapters.probe(digest, answer_probe)
            case LoadReadable(plan, gate):
                self._gates.add(plan, gate)
                self._deliver(self._scheduler.overlap_load(plan))
            case TransferDone():
                self._gates.remove(message.plan)
                self._deliver(self._scheduler.finish_transfer(message))
            case RunSessionCommand(command, answer_command):
                answer_command(self._scheduler.session_cache.run(command))
            case ReadStats(answer):
                answer(self.stats())
            case Stop():
                self._stopping = True

    def _submit(self, request: EngineRequest, sink: Sink) -> None:
        try:
            displaced = self._scheduler.submit(request)
        except GraftworkError as error:
            sink([RequestOutput(request.request_id, error)])
        else:
            self._sinks[request.request_id] = sink
            self._deliver(displaced)

    def _cancel(self, request_id: RequestId) -> None:
        self._sinks.pop(request_id, None)
        self._scheduler.cancel(request_id)

    # ---- out --------------------------------------------------------------------------------------------------

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Passes each gateway its outputs of this step, in one call."""
        by_sink: dict[Sink, list[RequestOutput]] = {}
        for output in outputs:
            by_sink.setdefault(self._sinks[output.request_id], []).append(output)
        for sink, own in by_sink.items():
            sink(own)
        for output in outputs:
            if output.is_last:
                self._sinks.pop(output.request_id, None)

    def stats(self) -> EngineStats:
        """Returns all counters and gauges of the engine."""
        scheduler, drafts, page_store = self._scheduler, self._scheduler.speculator.counts, self._kv_cache.page_store
        device, host, disk = page_store.device, page_store.host, page_store.disk
        disk_counters = disk.counters
        pages = device.free_pages + device.idle_pages + device.active_pages + device.in_flight_pages
        return EngineStats(
            **asdict(scheduler.counters),
            running_requests=scheduler.num_running,
            waiting_requests=scheduler.num_waiting,
            kv_usage_ratio=device.active_pages / pages if pages else 0.0,
            free_pages=device.free_pages,
            cached_pages=device.idle_pages,
            active_pages=device.active_pages,
            in_flight_pages=device.in_flight_pages,
            host_free_pages=host.free_pages,
            host_cached_pages=host.idle_pages,
            host_in_flight_pages=host.in_flight_pages,
            disk_pages=disk.num_pages,
            disk_bytes=disk.bytes_used,
            disk_corrupt_files=disk_counters.corrupt,
            disk_foreign_files=disk_counters.foreign,
            disk_failures=disk_counters.failed,
            lora_pool_bytes=self._adapters.num_bytes,
            adapter_loads=self._adapters.num_loads,
            forced_drafts=drafts.forced,
            accepted_drafts=drafts.accepted - drafts.forced,
            rejected_drafts=drafts.drafted - drafts.accepted,
            adapter_copy_bytes=self._adapters.copied_bytes,
            memory_adapters=self._adapters.host_bytes,
            memory_grammars=self._grammars.num_bytes,
            memory_drafts=scheduler.speculator.cache_bytes,
            resident_adapters=self._adapters.resident_digests,
            running_adapters=tuple(sorted(scheduler.running_adapters())),
            waiting_adapters=tuple(sorted(scheduler.waiting_adapters())),
        )

    def check_integrity(self) -> None:
        """Checks the scheduler, the adapter pool and the grammars. Must be called between two steps.

        Raises AssertionError if one of them is inconsistent.
        """
        self._scheduler.check_integrity()
        self._adapters.check_integrity()
        self._grammars.check_integrity(self._scheduler.running_ids)
