"""Engines over the hash model, with or without overlap, that live through the same history of messages."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from random import Random
from typing import cast

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
    AdapterUse,
    EngineRequest,
    GrammarKind,
    GrammarSource,
    ServiceTier,
    SessionKey,
    SessionUse,
)
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.session_commands import SessionCommand, SessionVerb, ToolWait
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
    ForgetAdapter,
    ForgetDomain,
    Message,
    RunSessionCommand,
    SubmitRequest,
)
from graftwork.engine.runner.model_runner import PrefillMeter
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.engine.scheduler.speculator import DraftLimits, Speculator
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.engine.step_pipeline import StepPipeline
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import IsolationDomain, RequestId
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
    Tokens,
    answer_to,
)
from tests.engine.tagged_kv_cache import LOAD_ALL, FakeDisk, FixedLeases, TaggedKvCache, adapter_of

OWNERS = (b"x", b"y")
TIERS = (ServiceTier.DEFAULT, ServiceTier.DEFAULT, ServiceTier.FLEX, ServiceTier.PRIORITY)
GRAMMARS = ("2:1:5", "3:0:4", "2:3:3", "5:2:9", "3:9:2")
ADAPTERS = (0, 1, 2, 3, 4, 6, 7)


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
    target_itl_s: float | None = None
    """The longest step with decoding requests, by that clock."""
    min_run_steps: int = 0


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
    prompt_logprobs: list[float] = field(default_factory=list)
    end: FinishReason | str | None = None
    is_cancelled: bool = False


class HashEngine:
    """An engine loop over the hash model."""

    def __init__(self, setting: Setting, *, overlaps: bool) -> None:
        clock = TickingClock()
        self.cache = cache = TaggedKvCache(
            device=CONTEXT // PAGE + setting.spare_pages,
            host=setting.host_pages,
            page_tokens=PAGE,
            context=CONTEXT // PAGE,
            reserve_share=0.0,
            disk=FakeDisk(max_pages=20 if setting.spare_pages % 2 else 0),
            clock=clock,
        )
        self.loader = ManualLoader()
        self.adapters = LoraPool(
            cast(AdapterLoader, self.loader), LoraPoolLimits(6 * 64, patience_s=2.0), cache.adapters, clock
        )
        self.requests: dict[RequestId, EngineRequest] = {}
        self.courses: dict[RequestId, Course] = {}
        self.device = HashDevice(cache, self.adapters, self.requests, setting.moment)
        self.seen: Counter[str] = Counter()
        self.loop = self._loop(setting, overlaps, clock)
        clock.tick_s = setting.tick_s

    def _loop(self, setting: Setting, overlaps: bool, clock: ManualClock) -> EngineLoop:
        cache, gates, progress = self.cache, LayerGates(), LoopProgress(clock)
        grammars = GrammarManager(cast(GrammarCompiler, InstantCompiler()), (EOS,), CompileLimits(), clock)
        speculator = Speculator(
            DraftLimits(setting.max_draft_tokens, 10_000), clock, lambda state: grammars.constraint(state.request_id)
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
            seeds=Random(0),
            grammars=grammars,
            speculator=speculator,
        )
        cache.adapters.frame_allocator.on_pages_moved = self.scheduler.renumber_pages
        prefills = PrefillMeter(CostTracker(LOAD_ALL, smoothing=0.0), clock)
        steps = StepPipeline(self.device, self.scheduler, gates, prefills, progress, overlaps=overlaps)
        inbox: SimpleQueue[Message] = SimpleQueue()
        parts = (self.scheduler, self.adapters, grammars, cache.kv_cache, cache.copies, gates, steps, progress)
        return EngineLoop(inbox, *parts)

    # ---- what happens to it -----------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = request
        self.courses[request.request_id] = Course()
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
            self.loop.take(done)
            self.check()

    def finish_load(self, number: int) -> None:
        """Ends one of the loads of adapters that run."""
        if self.loader.loading:
            digest = sorted(self.loader.loading)[number % len(self.loader.loading)]
            self.loop.take(AdapterLoaded(digest, adapter_of(int(digest.removeprefix("adapter-")))))

    def check(self) -> None:
        self.loop.check_integrity()
        page_store = self.cache.kv_cache.page_store
        self.cache.check(num_held=page_store.device.num_holders - page_store.tree.num_copies(Tier.DEVICE))

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
            self.finish_copy(number, None)
            self.finish_load(number)
            self.cache.clock.advance(1)  # so that no adapter waits longer than the pool's patience
        while self.step():
            continue
        assert all(course.end or course.is_cancelled for course in self.courses.values()), "nobody gets anywhere"
        while self.cache.copies.under_way:
            self.finish_copy(0, None)
        pool = self.cache.kv_cache.page_store.device
        assert pool.free_pages + pool.idle_pages + pool.lent_pages == pool.num_pages, "a page is held for nobody"
        assert not any(map(self.cache.adapters.is_pinned, self.cache.adapters.digests)), "an adapter is pinned"

    def courses_differ_from(self, answers: dict[RequestId, Answer]) -> list[str]:
        """Returns what requests got that is not their answer, or the start of it for a cancelled request."""
        wrong: list[str] = []
        for name, course in self.courses.items():
            answer, got = answers[name], tuple(course.token_ids)
            if course.is_cancelled and course.end is None:
                right = got == answer.token_ids[: len(got)]
            else:
                right = (got, course.end) == answer
            if not right:
                wrong.append(f"{name} got {got} and {course.end}, not {answer}")
            prompt = self.requests[name].prompt_token_ids
            if self.requests[name].sampling.prompt_logprobs is not None and not course.is_cancelled:
                wrong += (
                    [] if course.prompt_logprobs == [-float(token) for token in prompt[1:]] else [f"{name}: scores"]
                )
        return wrong


class History:
    """One history of messages, for any number of engines."""

    def __init__(self, engines: list[HashEngine]) -> None:
        self.engines = engines
        self.answers: dict[RequestId, Answer] = {}
        self._turns: dict[tuple[bytes, str], Tokens] = {}
        self._waiting: list[RequestId] = []

    def _each(self, act: Callable[[HashEngine], object]) -> None:
        for engine in self.engines:
            act(engine)

    def submit(self, number: int) -> None:
        """Submits a request: the next turn of a session, or one without a session."""
        random, name = Random(number), RequestId(f"r{len(self.answers)}")
        owner = random.choice(OWNERS)
        session = f"s{random.randrange(3)}" if random.random() < 0.6 else None
        history = self._turns.get((owner, session or ""), ())
        prompt = (*history, *(random.randrange(3, 5) for _ in range(random.randint(1, 5))))
        prompt = prompt if len(prompt) < CONTEXT else prompt[: random.randint(1, 5)]
        adapters = tuple(
            AdapterUse(f"adapter-{one}") for one in sorted(random.sample(ADAPTERS, random.choice((0, 0, 1, 1, 2))))
        )
        request = EngineRequest(
            name,
            prompt,
            _sampling(random),
            IsolationDomain(owner),
            adapters,
            tier=random.choice(TIERS),
            session=None if session is None else SessionUse(SessionKey(session), len(history)),
            grammar=GrammarSource(GrammarKind.REGEX, random.choice(GRAMMARS)) if random.random() < 0.3 else None,
        )
        self.answers[name] = answer = answer_to(request)
        if random.random() < 0.3:
            expected = [token if random.random() < 0.9 else 7 for token in answer.token_ids]
            request = replace(request, prediction_token_ids=tuple(expected))
        if session is not None and answer.end in (FinishReason.STOP, FinishReason.LENGTH):
            self._turns[owner, session] = (*prompt, *answer.token_ids)
        self._each(lambda engine: engine.submit(request))

    def step(self, number: int) -> None:
        for _ in range(1 + number % 3):
            self._each(lambda engine: engine.step())

    def cancel(self, number: int) -> None:
        if number % 9 == 0:
            self._each(lambda engine: engine.cancel_all())
        elif self.answers:
            name = list(self.answers)[-1 - number % min(len(self.answers), 6)]
            self._each(lambda engine: engine.cancel(name))

    def finish_copy(self, number: int) -> None:
        self._each(lambda engine: engine.finish_copy(number // 4, number // 4 % 2 if number % 4 == 0 else None))

    def finish_load(self, number: int) -> None:
        self._each(lambda engine: engine.finish_load(number))

    def command(self, number: int) -> None:
        """Runs a command on a session's KV."""
        if self._turns:
            owner, session = sorted(self._turns)[number % len(self._turns)]
            verb = list(SessionVerb)[number // 7 % len(SessionVerb)]
            waits = (ToolWait("search"),) if verb is SessionVerb.HOLD else ()
            tokens = self._turns[owner, session]
            command = SessionCommand(verb, SessionKey(session), IsolationDomain(owner), (), tokens, waits=waits)
            self._each(lambda engine: engine.loop.take(RunSessionCommand(command, lambda memory: None)))

    def forget(self, number: int) -> None:
        """Forgets an adapter or a domain."""
        message: Message = ForgetAdapter(f"adapter-{ADAPTERS[number % len(ADAPTERS)]}")
        if number % 5 == 0:
            message = ForgetDomain(IsolationDomain(OWNERS[number // 5 % 2]))
        self._each(lambda engine: engine.loop.take(message))

    def wait(self, number: int) -> None:
        self._each(lambda engine: engine.cache.clock.advance(number % 80 / 10))

    def end(self) -> None:
        """Ends all requests. Asserts that each got the answer that the model gives it alone."""
        self._each(lambda engine: engine.drain())
        for engine in self.engines:
            wrong = engine.courses_differ_from(self.answers)
            assert not wrong, "\n".join(wrong)


def _sampling(random: Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=random.choice((0, 1, 2, 5, 9, 12)),
        seed=random.randrange(1000),
        min_tokens=random.choice((0, 0, 3)),
        stop_token_ids=random.choice(((), (), (2, 5))),
        ignore_eos=random.random() < 0.2,
        presence_penalty=random.choice((0.0, 0.0, 0.5)),
        repetition_penalty=random.choice((1.0, 1.0, 1.0, 1.5)),
        prompt_logprobs=random.choice((None,) * 6 + (0,)),
    )
