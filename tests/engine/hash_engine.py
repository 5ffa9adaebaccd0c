"""An engine loop over the hash model, with or without overlap, and what its requests got."""

from collections import Counter
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import cast

from graftwork.engine.arrivals import Arrivals
from graftwork.engine.core.events import (
    FinishReason,
    PromptAdmitted,
    PromptScored,
    RequestFinished,
    RequestOutput,
    TokensGenerated,
)
from graftwork.engine.core.progress import LoopProgress
from graftwork.engine.core.requests import (
    EngineRequest,
)
from graftwork.engine.core.tiers import Tier
from graftwork.engine.grammar.compile.compiler import GrammarCompiler
from graftwork.engine.grammar.manager import GrammarManager
from graftwork.engine.grammar.schema.limits import CompileLimits
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.transfer.plan import LayerGates
from graftwork.engine.loop import EngineLoop
from graftwork.engine.lora.loader import AdapterLoaded, AdapterLoader
from graftwork.engine.lora.pool import LoraPool, LoraPoolLimits
from graftwork.engine.messages import (
    CancelRequest,
    CancelSink,
    Message,
    SubmitRequest,
)
from graftwork.engine.runner.model_runner import PrefillMeter
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.engine.scheduler.speculator import DraftLimits, Speculator
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.engine.step_pipeline import StepPipeline
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId
from tests.engine.hash_draft_model import HashDraftModel
from tests.engine.hash_model import (
    CONTEXT,
    EOS,
    PAGE,
    SCOPES,
    VOCABULARY,
    Answer,
    HashDevice,
    InstantCompiler,
    Moment,
)
from tests.engine.late_copies import LayeredCopyEngine, ManualAdapterCopies
from tests.engine.tagged_kv_cache import LOAD_ALL, FakeDisk, FixedLeases, TaggedKvCache, adapter_of

SMALL_ADAPTERS = (0, 1, 3, 4, 6, 7, 9, 12, 15, 18)
"""Adapters that fit on the device beside any other."""
ADAPTERS = (*SMALL_ADAPTERS, 2, 5, 8, 11, 14)
LARGE_ADAPTERS = (90, 91)
"""Adapters of more frames than a context, so that smaller ones must often move to make room for them."""


@dataclass(frozen=True)
class Setting:
    """The sizes and habits of an engine."""

    spare_pages: int
    """Device pages beside those of one whole context."""
    host_pages: int
    budget: int
    max_draft_tokens: int
    moment: Moment
    tick_s: float
    """How far the clock goes whenever somebody looks at it."""
    copies_adapters_late: bool = False
    """Whether adapters are copied to the device while steps run."""
    target_itl_s: float | None = None
    """The longest step with decoding requests, by that clock."""
    min_run_steps: int = 0
    has_draft_model: bool = False

    @property
    def adapters(self) -> tuple[int, ...]:
        """The adapters that fit on the device."""
        return (*ADAPTERS, *LARGE_ADAPTERS * 3) if self.spare_pages >= 14 else ADAPTERS


class TickingClock(ManualClock):
    """A clock that goes a bit further whenever somebody looks at it."""

    tick_s = 0.0

    def monotonic(self) -> float:
        self.advance(self.tick_s)
        return super().monotonic()


class ManualLoader:
    """Stands for the AdapterLoader, which reads files on threads: its loads end when the test says so."""

    def __init__(self) -> None:
        self.loading: set[str] = set()

    def start(self, digest: str) -> None:
        self.loading.add(digest)

    def close(self) -> None:
        """Nothing runs."""


@dataclass
class Course:
    """What a request got."""

    token_ids: list[int] = field(default_factory=list)
    """The tokens of an earlier run, then those that this engine has reported."""
    prompt_logprobs: list[float] = field(default_factory=list)
    end: FinishReason | str | None = None
    is_cancelled: bool = False
    may_fail: bool = False
    """Whether the request was there when a load failed that steps may have read already."""


class HashEngine:
    """An engine loop over the hash model."""

    def __init__(self, setting: Setting, *, overlaps: bool) -> None:
        clock = TickingClock()
        self.adapter_copies = ManualAdapterCopies()
        self.cache = cache = TaggedKvCache(
            device=CONTEXT // PAGE + setting.spare_pages,
            host=setting.host_pages,
            page_tokens=PAGE,
            context=CONTEXT // PAGE,
            reserve_share=0.0,
            disk=FakeDisk(max_pages=20 if setting.spare_pages % 2 else 0),
            clock=clock,
            copies=LayeredCopyEngine,
            adapter_copies=self.adapter_copies if setting.copies_adapters_late else None,
        )
        self.loader = ManualLoader()
        self.adapters = LoraPool(
            cast(AdapterLoader, self.loader),
            LoraPoolLimits((14 if setting.spare_pages >= 14 else 6) * 64, patience_s=2.0),
            cache.adapters,
            clock,
        )
        self.requests: dict[RequestId, EngineRequest] = {}
        self.courses: dict[RequestId, Course] = {}
        self.gates = LayerGates()
        self.device = HashDevice(cache, self.gates, self.adapters, self.requests, setting.moment)
        self.seen: Counter[str] = Counter()
        self.loop = self._loop(setting, overlaps, clock)
        clock.tick_s = setting.tick_s

    def _loop(self, setting: Setting, overlaps: bool, clock: ManualClock) -> EngineLoop:
        cache, gates, progress = self.cache, self.gates, LoopProgress(clock)
        grammars = GrammarManager(cast(GrammarCompiler, InstantCompiler()), (EOS,), CompileLimits(), clock)
        self.draft_model = HashDraftModel(self.requests) if setting.has_draft_model else None
        speculator = Speculator(
            DraftLimits(setting.max_draft_tokens, 10_000),
            clock,
            lambda state: grammars.constraint(state.request_id),
            draft_model=self.draft_model,
        )
        limits = SchedulerLimits(
            PAGE,
            setting.budget,
            5,
            100,
            CONTEXT,
            VOCABULARY,
            frozenset({EOS}),
            target_itl_s=setting.target_itl_s,
            min_run_steps=setting.min_run_steps,
        )
        self.scheduler = Scheduler(
            limits,
            cache.kv_cache,
            SessionCache(cache.kv_cache, SCOPES, FixedLeases(), clock),
            self.adapters,
            SCOPES,
            clock=clock,
            grammars=grammars,
            speculator=speculator,
        )
        cache.adapters.frame_allocator.on_pages_moved = self.scheduler.renumber_pages
        prefills = PrefillMeter(CostTracker(LOAD_ALL, smoothing=0.0), clock)
        steps = StepPipeline(self.device, self.scheduler, gates, prefills, progress, overlaps=overlaps)
        inbox: SimpleQueue[Message] = SimpleQueue()
        threads = progress, Arrivals(clock)
        parts = (self.scheduler, self.adapters, grammars, cache.kv_cache, cache.copies, gates, steps, *threads)
        return EngineLoop(inbox, *parts)

    # ---- what happens to it -----------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = request
        self.courses[request.request_id] = Course(list(request.emitted_token_ids))
        self.loop.take(SubmitRequest(request, self.sink))

    def cancel(self, request_id: RequestId) -> None:
        self.courses[request_id].is_cancelled = True
        self.loop.take(CancelRequest(request_id))

    def cancel_all(self) -> None:
        for course in self.courses.values():
            course.is_cancelled = True
        self.loop.take(CancelSink(self.sink))

    def step(self) -> bool:
        worked = self.loop.step()
        self.check()
        return worked

    def finish_copy(self, number: int, num_good: int | None) -> None:
        """Ends one of the copies that run."""
        under_way = self.cache.copies.under_way
        if under_way:
            done = self.cache.copies.fire(number % len(under_way), num_good)
            self.seen[done.plan.kind] += done.num_good
            for course in self.courses.values() if done.num_good < len(done.plan.moves) else ():
                course.may_fail |= course.end is None
            self.loop.take(done)
            self.check()

    def announce(self, number: int) -> None:
        """Lets steps read one of the loads that run, layer by layer. One load in eight fails."""
        message = self.device.copies.announce(number, fails=number // 4 % 8 == 0)
        if message is not None:
            self.loop.take(message)
            if number % 2:
                self.device.copies.arrive(message.plan, 1)
            self.check()

    def finish_load(self, number: int) -> None:
        """Ends one of the loads of adapters that run, and one of their copies to the device."""
        self._finish_adapter_copy(number)
        if self.loader.loading:
            digest = sorted(self.loader.loading)[number % len(self.loader.loading)]
            self.loop.take(AdapterLoaded(digest, adapter_of(int(digest.removeprefix("adapter-")))))

    def _finish_adapter_copy(self, number: int) -> bool:
        message = self.adapter_copies.finish(number)
        if message is not None:
            self.loop.take(message)
            self.seen["adapter_copy"] += 1
        return message is not None

    def check(self) -> None:
        self.loop.check_integrity()  # also of the cache and the adapters
        if self.draft_model is not None:
            assert self.draft_model.texts.keys() <= set(self.scheduler.running_ids)
        page_store = self.cache.kv_cache.page_store
        self.cache.check_contents(num_held=page_store.device.num_holders - page_store.tree.num_copies(Tier.DEVICE))

    def sink(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            course = self.courses[output.request_id]
            assert course.end is None, "a request that has ended gets an output"
            assert not course.is_cancelled, "a cancelled request gets an output"
            match output.event:
                case PromptScored(logprobs):
                    course.prompt_logprobs += [one.logprob for one in logprobs]
                case TokensGenerated(token_ids):
                    course.token_ids += token_ids
                case RequestFinished(reason, num_tokens):
                    assert num_tokens == len(course.token_ids)
                    course.end = reason
                case GraftworkError() as error:
                    course.end = error.code
                case PromptAdmitted():
                    self.seen["admitted"] += 1

    def drain(self) -> None:
        """Ends all requests, and checks that nothing is held any more."""
        for number in range(3000):
            if all(course.end or course.is_cancelled for course in self.courses.values()):
                break
            self.step()
            self.announce(number)
            self.finish_copy(number, None)
            self.finish_load(number)
            self.cache.clock.advance(1)  # so that no adapter waits longer than the pool's patience
        while self.step():
            continue
        assert all(course.end or course.is_cancelled for course in self.courses.values()), "nobody gets anywhere"
        while self._finish_adapter_copy(0):
            self.step()
        while self.cache.copies.under_way:
            self.finish_copy(0, None)
        pool = self.cache.kv_cache.page_store.device
        assert pool.free_pages + pool.idle_pages + pool.lent_pages == pool.num_pages, "a page is held for nobody"
        assert not any(map(self.cache.adapters.is_pinned, self.cache.adapters.digests)), "an adapter is pinned"
        if self.draft_model is not None:
            assert not self.draft_model.texts, "the draft model keeps the text of a request that has ended"

    def courses_differ_from(self, answers: dict[RequestId, Answer]) -> list[str]:
        """Returns what requests got that is not their answer, or the start of it for a cancelled request."""
        wrong: list[str] = []
        for name, course in self.courses.items():
            answer, got = answers[name], tuple(course.token_ids)
            has_failed = course.end == "internal_error" and (course.may_fail or name in self.device.failed)
            if has_failed or (course.is_cancelled and course.end is None):
                right = got == answer.token_ids[: len(got)]
            else:
                right = (got, course.end) == answer
            if not right:
                wrong.append(f"{name} got {got} and {course.end}, not {answer}")
            request = self.requests[name]
            if request.sampling.prompt_logprobs is not None and not (course.is_cancelled or has_failed):
                unreported = () if request.emitted_token_ids else request.prompt_token_ids[1:]
                wrong += (
                    [] if course.prompt_logprobs == [-float(token) for token in unreported] else [f"{name}: scores"]
                )
        return wrong
