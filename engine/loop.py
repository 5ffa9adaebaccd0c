"""Runs the engine's loop: receive messages, admit requests, plan a step, run it, store its tokens, deliver outputs.

Owns the scheduler, the adapter pool, the grammars and the step pipeline, which runs the steps. Only the loop's thread
uses them; other threads send it messages. While requests run, the loop waits only for the forward pass. Otherwise it
waits for a message.
"""

from dataclasses import asdict
from queue import Empty, SimpleQueue

from graftwork.engine.arrivals import Arrivals
from graftwork.engine.core.events import RequestOutput
from graftwork.engine.core.load import EngineLoad
from graftwork.engine.core.progress import LoopProgress
from graftwork.engine.core.stats import EngineStats
from graftwork.engine.grammar.compile.compiler import GrammarCompiled
from graftwork.engine.grammar.manager import GrammarManager
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.kv.transfer.plan import CopyEngine, LayerGates, LoadReadable, TransferDone
from graftwork.engine.lora.adapter_copies import AdapterCopied
from graftwork.engine.lora.loader import AdapterLoaded
from graftwork.engine.lora.pool import LoraPool
from graftwork.engine.messages import (
    CancelRequest,
    CancelSink,
    DeviceFailed,
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
from graftwork.engine.scheduler.forecast import forecast_first_tokens
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.engine.step_pipeline import DeviceLost, StepPipeline
from graftwork.engine.step_recorder import NO_RECORDER, StepRecorder
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId


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
        steps: StepPipeline,
        progress: LoopProgress,
        arrivals: Arrivals,
        recorder: StepRecorder = NO_RECORDER,
    ) -> None:
        """`recorder` must be that of the scheduler and of `steps`."""
        self.inbox = inbox
        self._scheduler = scheduler
        self._adapters = adapters
        self._grammars = grammars
        self._kv_cache = kv_cache
        self._copies = copies
        self._gates = gates
        self.steps = steps
        self.progress = progress
        """Shows other threads whether the loop advances."""
        self.arrivals = arrivals
        """Decides about requests on the thread that receives them."""
        self._recorder = recorder
        self._num_received = 0
        self._sinks: dict[RequestId, Sink] = {}
        self._stopping = False

    def run(self) -> None:
        """Handles messages and runs steps until a Stop message arrives. Then ends the threads of the engine's parts.

        Raises DeviceLost if the device can compute nothing any more.
        """
        worked = False
        while True:
            self._receive(wait=not worked)
            if self._stopping:
                break
            worked = self.step()
        self._deliver(self.steps.land())
        self._adapters.close()
        self._grammars.close_all()
        self._copies.close()

    def step(self) -> bool:
        """Admits requests, launches one step, and lands one: the same step, or with overlap the one before.

        Returns False if no step was launched or landed. In that case only a new message can change something, so the
        caller waits for one.
        """
        self.progress.advance()
        if self._scheduler.must_land():
            self._deliver(self.steps.land())
        self._deliver(self._scheduler.admit())
        plan = self._scheduler.plan()
        if plan is None and not self.steps.is_busy:
            return False
        self._deliver(self.steps.advance(plan))
        self._publish_snapshot()
        if self.progress.wants_load:
            self.progress.publish(self.load())
        return True

    # ---- in ---------------------------------------------------------------------------------------------------

    def _receive(self, *, wait: bool) -> None:
        """Handles all messages in the inbox. If `wait` is true and the inbox is empty, first waits for a message, or until
        a waiting request can no longer meet its deadline.
        """
        if wait:
            self._publish_snapshot(rests=True)
            self.progress.publish(self.load())
            self.progress.rest()
            try:
                self.take(self.inbox.get(timeout=self._scheduler.deadlines.seconds_to_next()))
            except Empty:
                return
        while not self._stopping:
            try:
                self.take(self.inbox.get_nowait())
            except Empty:
                return

    def take(self, message: Message) -> None:
        """Handles one message from the inbox."""
        self.progress.advance()
        match message:
            case SubmitRequest():
                self._submit(message)
            case CancelRequest(request_id):
                self._cancel(request_id)
            case CancelSink(sink):
                for request_id in [request_id for request_id, other in self._sinks.items() if other == sink]:
                    self._cancel(request_id)
            case AdapterLoaded():
                error = self._adapters.absorb(message)
                if error is not None:
                    self._deliver(self._scheduler.fail_waiting_for(message.digest, error))
            case AdapterCopied():
                error = self._adapters.absorb_copy(message)
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
            case DeviceFailed(cause):
                raise DeviceLost(cause)
            case Stop():
                self._stopping = True

    def _submit(self, message: SubmitRequest) -> None:
        if message.received is not None:
            self._num_received = message.received.number
        try:
            displaced = self._scheduler.submit(message.request, message.received)
        except GraftworkError as error:
            message.sink([RequestOutput(message.request.request_id, error)])
        else:
            self._sinks[message.request.request_id] = message.sink
            self._recorder.arrived(message.request, None if message.received is None else message.received.at)
            self._deliver(displaced)

    def _cancel(self, request_id: RequestId) -> None:
        self._sinks.pop(request_id, None)
        self._recorder.forget(request_id)
        self._scheduler.cancel(request_id)

    # ---- out --------------------------------------------------------------------------------------------------

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Passes each gateway its outputs of this step, in one call."""
        outputs = self._recorder.attach(outputs)
        by_sink: dict[Sink, list[RequestOutput]] = {}
        for output in outputs:
            by_sink.setdefault(self._sinks[output.request_id], []).append(output)
        for sink, own in by_sink.items():
            sink(own)
        for output in outputs:
            if output.is_last:
                self._sinks.pop(output.request_id, None)

    def _publish_snapshot(self, *, rests: bool = False) -> None:
        """Publishes what the engine has to do, if requests with deadlines come. `rests`: no step will follow this one."""
        if not self.arrivals.wants_snapshot:
            self.arrivals.publish(None)
        elif rests or self.arrivals.is_old:
            self.arrivals.publish(self._scheduler.deadlines.snapshot(self._num_received))

    def load(self) -> EngineLoad:
        """Returns the figures by which gateways place requests."""
        scheduler, page_store, snapshot = self._scheduler, self._kv_cache.page_store, self.arrivals.snapshot
        free_frames = page_store.device.free_pages + page_store.device.idle_pages
        return EngineLoad(
            running_requests=scheduler.num_running,
            waiting_requests=scheduler.num_waiting,
            queued_tokens=scheduler.deadlines.queued_tokens(),
            free_pages=free_frames // page_store.sizes.frames_of_page,
            steps=scheduler.counters.steps,
            prefill_token_s=scheduler.deadlines.prefill_token_s,
            adapter_load_s=self._adapters.load_s,
            resident_adapters=self._adapters.resident_digests,
            adapter_loads=self._adapters.num_loads,
            forecasts=() if snapshot is None else forecast_first_tokens(snapshot, scheduler.requests.waiting),
            rooms=scheduler.queue_bounds.rooms(len(scheduler.free_places), scheduler.deadlines.retry_after_s()),
        )

    def stats(self) -> EngineStats:
        """Returns all counters and gauges of the engine."""
        scheduler, drafts, page_store = self._scheduler, self._scheduler.speculator.counts, self._kv_cache.page_store
        device, host, disk = page_store.device, page_store.host, page_store.disk
        disk_counters, lora_rows = disk.counters, self._adapters.rows
        pages = device.free_pages + device.idle_pages + device.active_pages + device.in_flight_pages
        return EngineStats(
            **asdict(scheduler.counters),
            **asdict(self.steps.paths),
            running_requests=scheduler.num_running,
            waiting_requests=scheduler.num_waiting,
            queued_tokens=scheduler.deadlines.queued_tokens(),
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
            object_pages=disk.objects.num_pages,
            object_bytes=disk.objects.num_bytes,
            object_pages_written=disk_counters.object_written,
            object_pages_read=disk_counters.object_read,
            object_failures=disk_counters.object_failed,
            object_dropped_pages=disk_counters.object_dropped,
            lora_pool_bytes=self._adapters.num_bytes,
            adapter_loads=self._adapters.num_loads,
            lora_kernel_rows=lora_rows.kernels,
            lora_torch_rows=lora_rows.torch,
            lora_vocabulary_rows=lora_rows.vocabulary,
            forced_drafts=drafts.forced,
            accepted_drafts=drafts.accepted - drafts.forced - drafts.model_accepted,
            rejected_drafts=drafts.drafted - drafts.accepted - drafts.model_rejected,
            model_accepted_drafts=drafts.model_accepted,
            model_rejected_drafts=drafts.model_rejected,
            adapter_copy_bytes=self._adapters.copied_bytes,
            memory_adapters=self._adapters.host_bytes,
            memory_grammars=self._grammars.num_bytes,
            memory_drafts=scheduler.speculator.cache_bytes,
            resident_adapters=self._adapters.resident_digests,
            host_adapters=self._adapters.host_digests,
            running_adapters=tuple(sorted(scheduler.requests.running_adapters())),
            waiting_adapters=tuple(sorted(scheduler.requests.waiting_adapters())),
        )

    def check_integrity(self) -> None:
        """Checks the scheduler, the adapter pool and the grammars. Must be called between two steps.

        Raises AssertionError if one of them is inconsistent.
        """
        self._scheduler.check_integrity()
        self._adapters.check_integrity()
        self._grammars.check_integrity(self._scheduler.running_ids)
