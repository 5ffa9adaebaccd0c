"""The engine's own scheduler, KV cache manager and session cache, run step by step in simulated time.

Nothing is computed: a step takes the seconds of a StepCost, and a token's id is a function of its request and position.
Owns the order of events: admit, plan, let the time of the step pass, land, absorb, deliver.
Invariant: while a request waits or runs, a step, a copy or a look at the queue is planned.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random

from benchmarks.simulation.copies import SimulatedCopies, SimulatedDisk
from benchmarks.simulation.hardware import scaled
from benchmarks.simulation.step_cost import Machine
from benchmarks.simulation.timeline import Timeline

from graftwork.engine.core.events import RequestOutput
from graftwork.engine.core.requests import AdapterUse, EngineRequest
from graftwork.engine.core.step import StepPlan, StepResult
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.manager import KvCacheManager, LowerTiers
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.tool_latency import ToolLatencyModel
from graftwork.engine.kv.transfer.plan import TransferDone
from graftwork.engine.scheduler.order.waiting_order import WaitingOrder
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId

VOCABULARY = 1 << 32
_LOOK_AGAIN_S = 0.02
"""After which an engine that can run nothing looks at its queue again."""
_STALL_S = 300.0
"""An engine that runs no step for so long, though requests wait, never will."""


class AdaptersAlwaysReady:
    """An AdapterProvider whose adapters are all on the device."""

    def want(self, groups: list[tuple[str, ...]], *, may_place: bool) -> bool:
        return False

    def take_placed(self) -> list[tuple[str, int]]:
        return []

    def is_ready(self, digest: str) -> bool:
        return True

    def refusal(self, uses: tuple[AdapterUse, ...]) -> GraftworkError | None:
        return None

    def pin(self, digest: str) -> None:
        """Does nothing: no adapter is ever evicted."""

    def unpin(self, digest: str) -> None:
        """Does nothing: no adapter is ever evicted."""

    def take_loaded_bytes(self, digest: str) -> int:
        return 0


MakeOrder = Callable[[Clock, KvCacheManager], WaitingOrder]
"""Makes the order of waiting requests of one policy."""
Listener = Callable[[RequestOutput], None]


@dataclass(slots=True)
class Work:
    """What the steps of a run were made of."""

    steps: int = 0
    busy_s: float = 0.0
    prefill_tokens: int = 0
    longest_step_s: float = 0.0

    def add(self, plan: StepPlan, seconds: float) -> None:
        self.steps += 1
        self.busy_s += seconds
        self.prefill_tokens += sum(piece.num_tokens for piece in plan.slices if piece.num_tokens > 1)
        self.longest_step_s = max(self.longest_step_s, seconds)


class SimulatedEngine:
    """One engine under one policy."""

    def __init__(self, timeline: Timeline, machine: Machine, make_order: MakeOrder) -> None:
        self.timeline = timeline
        self.machine = machine
        clock = timeline.clock
        hardware = scaled(machine.hardware, 1.0, machine.page_tokens)
        disk = SimulatedDisk(hardware.disk_pages, hardware.sizes.page_bytes)
        self.copies = SimulatedCopies(timeline, hardware, disk)
        self.copies.report = self._copied
        lower = LowerTiers(self.copies, CostTracker(hardware.costs), disk)
        self.kv_cache = KvCacheManager(hardware.sizes, lower, clock)
        scopes = CacheScopes("sha256:simulated", "bfloat16")
        self.session_cache = SessionCache(self.kv_cache, scopes, ToolLatencyModel(), clock)
        limits = SchedulerLimits(
            page_tokens=machine.page_tokens,
            max_batch_tokens=machine.max_batch_tokens,
            max_running=machine.max_running,
            max_waiting=machine.max_waiting,
            context_tokens=machine.hardware.context_tokens,
            vocab_size=VOCABULARY,
            eos_token_ids=frozenset(),
            max_waiting_tokens=1 << 40,
            target_itl_s=machine.target_itl_s,
        )
        self.order = make_order(clock, self.kv_cache)
        self.scheduler = Scheduler(
            limits,
            self.kv_cache,
            self.session_cache,
            AdaptersAlwaysReady(),
            scopes,
            clock=clock,
            order=self.order,
        )
        self.work = Work()
        self.after_admit: Callable[[], None] = _nothing
        """Called in each step, when requests have been admitted."""
        self._listeners: dict[RequestId, Listener] = {}
        self._bases: dict[RequestId, int] = {}
        self._numbers = count(1)
        self._noise = Random("simulated tokens")
        self._is_awake = False
        self._stalls_at = 0.0

    def new_id(self) -> RequestId:
        return RequestId(f"request-{next(self._numbers)}")

    def submit(self, request: EngineRequest, listener: Listener) -> None:
        """Queues a request. `listener` gets all its outputs. A refusal is an output too."""
        self._listeners[request.request_id] = listener
        self._bases[request.request_id] = self._noise.getrandbits(32)
        try:
            outputs = self.scheduler.submit(request)
        except GraftworkError as error:
            outputs = [RequestOutput(request.request_id, error)]
        self._deliver(outputs)
        self._wake()

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._stalls_at = self.timeline.now + _STALL_S
            self.timeline.after(0.0, self._step)

    def _step(self) -> None:
        """Admits and plans; the step ends when its time has passed."""
        self._deliver(self.scheduler.admit())
        self.after_admit()
        plan = self.scheduler.plan()
        if plan is not None:
            seconds = self.machine.cost.seconds(plan)
            self.work.add(plan, seconds)
            self._stalls_at = self.timeline.now + seconds + _STALL_S
            self.timeline.after(seconds, lambda: self._end(plan))
        elif self.scheduler.num_waiting + self.scheduler.num_running:
            assert self.timeline.now < self._stalls_at, f"no step for {_STALL_S} s, and requests wait"
            self.timeline.after(_LOOK_AGAIN_S, self._step)
        else:
            self._is_awake = False

    def _end(self, plan: StepPlan) -> None:
        bases = self._bases
        chosen = {
            piece.request_id: ((bases[piece.request_id] + piece.samples[0].position) % VOCABULARY,)
            for piece in plan.slices
            if piece.samples
        }
        self._deliver(self.scheduler.absorb(self.scheduler.land(plan), StepResult(chosen)))
        self._step()

    def _copied(self, done: TransferDone) -> None:
        self._deliver(self.scheduler.finish_transfer(done))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            listener = self._listeners[output.request_id]
            if output.is_last:
                del self._listeners[output.request_id], self._bases[output.request_id]
            listener(output)


def _nothing() -> None:
    """Nobody watches."""
