"""Notes when the gateway did what for one request.

    RequestTrace      the request: who sent it, for which model, and when each stage ended
    GenerationTrace   one answer of it at the engine, with the engine's own spans if the request is traced

Times are of the gateway's monotonic clock. Stages follow each other: a stage begins where the one before ended, so their
durations sum to the whole. Never holds text or token ids, and bounds what it holds by what the engine reports.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

from graftwork.platform.clock import Clock, SystemClock
from graftwork.platform.ids import KeyId, SessionId, TenantId
from graftwork.platform.tracing.trace_ids import TraceIds

MAX_GENERATIONS = 16
"""So many answers of one request have a trace of their own."""
_MAX_SPANS = 512
"""So many spans of one answer are kept; more come only from an engine of another version."""


class Stage(IntEnum):
    """The stages of a request, in their order. `mark(stage)` says that a stage has ended."""

    AUTHENTICATE = 1
    """Found the key's tenant."""
    BODY = 2
    """Read and parsed the body."""
    PREPARE = 3
    """Resolved the model, planned the output, read a session's history."""
    ENCODE = 4
    """Rendered the prompt, and encoded it into tokens."""
    QUOTA = 5
    """Reserved the tenant's quota."""
    START = 6
    """Began the work, and sent it to the engine. Also stored a turn's beginning."""
    QUEUE = 7
    """Until the engine had admitted the prompt: waits, and loads of adapters and KV."""
    PREFILL = 8
    """Until the first token was here."""
    DECODE = 9
    """Until the last token was here."""
    FINISH = 10
    """Wrote the rest of the answer, stored usage and events."""

    @property
    def label(self) -> str:
        return self.name.lower()


class Span(NamedTuple):
    """A span of the engine. `start_s` counts from the request's arrival at the engine."""

    name: str
    start_s: float
    duration_s: float
    figures: Mapping[str, float]
    """Counts and times of what the span did, such as `steps` and `tokens`; only those that are not 0."""


@dataclass(slots=True)
class CallTimer:
    """Estimates how long many calls take, by some of them: to look at the clock costs as much as a short call.

    The caller says how many calls there were, and chooses those that are measured.
    """

    calls: int = 0
    measured: int = 0
    measured_s: float = 0.0

    def add(self, seconds: float, calls: int = 1) -> None:
        """Adds the time of measured calls."""
        self.measured += calls
        self.measured_s += seconds

    @property
    def seconds(self) -> float:
        """The estimated time of all calls."""
        return self.measured_s * self.calls / self.measured if self.measured else 0.0


@dataclass(slots=True)
class EngineRun:
    """The stay of one answer at one engine."""

    run: int
    """Tells the runs of one answer apart."""
    arrived_at: float
    """When the answer's request arrived at the engine, on the gateway's clock: not later than this."""
    spans: list[Span] = field(default_factory=list)


@dataclass(slots=True)
class GenerationTrace:
    """What is known of one answer. All times are None until they have come."""

    generation_id: str
    sent_at: float | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    prompt_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    miss_reason: str | None = None
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    detokenise: CallTimer = field(default_factory=CallTimer)
    """Turns tokens into text and calls. Measured only if the request is traced."""
    writes: CallTimer = field(default_factory=CallTimer)
    """Writes the events of the answer, if they are written as they are generated. Also only then."""
    runs: list[EngineRun] = field(default_factory=list)

    def add_spans(self, run: int, arrived_at: float, spans: list[Span]) -> None:
        """Adds spans of the engine. `arrived_at` is the latest time at which the run can have begun: when the report
        came, less the engine's time since then. The report that travelled fastest is right.
        """
        if not self.runs or self.runs[-1].run != run:
            self.runs.append(EngineRun(run, arrived_at))
        latest = self.runs[-1]
        latest.arrived_at = min(latest.arrived_at, arrived_at)
        latest.spans += spans[: _MAX_SPANS - len(latest.spans)]


class Keeper(Protocol):
    """Keeps traces. TraceBook implements it."""

    def keep(self, trace: "RequestTrace") -> None: ...

    def name_work(self, trace: "RequestTrace", work_id: str) -> None: ...

    def joined(self, trace: "RequestTrace", session_id: SessionId | None) -> None: ...


class RequestTrace:
    """What is known of one request. Whoever works for it holds it; it ends when nobody does."""

    def __init__(self, ids: TraceIds, method: str, path: str, clock: Clock) -> None:
        """The HTTP answer holds the trace; `answered` releases it."""
        self.ids = ids
        self.method = method
        self.path = path
        self.now = clock.monotonic
        self.created_at = clock.now()
        self.began_at = clock.monotonic()
        self.ended_at: float | None = None
        self.is_traced = False
        """Whether the engine reports its steps, and the gateway times each token."""
        self.logs_token_ids = False
        """Whether the operator has asked for the token ids of the request's prompt and answers."""
        self.tenant_id: TenantId | None = None
        self.key_id: KeyId | None = None
        self.model: str | None = None
        self.adapter: str | None = None
        self.session_id: SessionId | None = None
        self.work_id: str | None = None
        """The id under which the work is billed, if it is not the request's: that of a turn."""
        self.outcome: str | None = None
        """How the work ended: a UsageOutcome; None if no work was begun, or while it runs."""
        self.status: int | None = None
        """The HTTP status; None if the client left before there was one."""
        self.generations: list[GenerationTrace] = []
        self.writes = CallTimer()
        """The writes of a stream whose generations do not time them. Measured only if the request is traced."""
        self.is_written_as_generated = False
        """Whether whoever reads the events of a generation writes each to the client: then the generation times that."""
        self.keeper: Keeper | None = None
        """Keeps the trace for those who ask later."""
        self._marks: list[tuple[Stage, float]] = []
        self._holders = 1
        self._at_end: list[Callable[[RequestTrace], None]] = []

    def mark(self, stage: Stage) -> None:
        """Notes that a stage has ended now. A second mark of it extends it; one of an earlier stage changes nothing."""
        last = self._marks[-1][0] if self._marks else 0
        if stage == last:
            self._marks[-1] = (stage, self.now())
        elif stage > last:
            self._marks.append((stage, self.now()))

    def generation(self, generation_id: str) -> GenerationTrace:
        """Returns the trace of an answer that begins. Beyond MAX_GENERATIONS, it is not kept."""
        made = GenerationTrace(generation_id, sent_at=self.now())
        if len(self.generations) < MAX_GENERATIONS:
            self.generations.append(made)
        return made

    def keep(self) -> None:
        """Lets the request be found later, since it begins work of its tenant."""
        if self.keeper is not None:
            self.keeper.keep(self)

    def describe(self, model: str, adapter: str | None, session_id: SessionId | None, work_id: str) -> None:
        """Notes what the request's work is, before it begins. `work_id` is the id under which it is billed."""
        self.model, self.adapter, self.session_id = model, adapter, session_id
        if self.keeper is not None:
            self.keeper.name_work(self, work_id)
            self.keeper.joined(self, session_id)

    def settle(self, outcome: str) -> None:
        """Notes how the work has ended."""
        self.outcome = outcome

    def hold(self) -> None:
        """Keeps the trace open until one more call of `release`."""
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self.ended_at = self.now()
            for act in self._at_end:
                act(self)
            self._at_end.clear()

    def answered(self, status: int | None) -> None:
        """Notes that the HTTP answer has ended, with this status."""
        self.status = status
        self.release()

    def at_end(self, act: Callable[["RequestTrace"], None]) -> None:
        """Calls `act` once, when nobody holds the trace any more."""
        self._at_end.append(act)

    def stages(self) -> list[tuple[Stage, float, float]]:
        """Returns each stage with its start and its end in seconds since the request came. The last one ends with the
        request, or now: the stage that was under way.
        """
        marks = [(stage, at - self.began_at) for stage, at in self._marks]
        under_way = Stage(min(marks[-1][0] + 1, Stage.FINISH)) if marks else Stage.AUTHENTICATE
        starts = [0.0, *(end_s for _, end_s in marks)]
        ends = [*marks, (under_way, self.total_s)]
        return [(stage, start_s, end_s) for start_s, (stage, end_s) in zip(starts, ends, strict=True)]

    def written(self) -> tuple[int, float]:
        """Returns the number of writes of a traced stream, and the estimate of their seconds."""
        timers = [self.writes, *(generation.writes for generation in self.generations)]
        return sum(timer.calls for timer in timers), sum(timer.seconds for timer in timers)

    @property
    def total_s(self) -> float:
        """Seconds from the request's arrival to its end, or to now."""
        return (self.now() if self.ended_at is None else self.ended_at) - self.began_at


class _NoTrace(RequestTrace):
    """Notes nothing, for work that belongs to no request."""

    def mark(self, stage: Stage) -> None:
        return

    def generation(self, generation_id: str) -> GenerationTrace:
        return GenerationTrace(generation_id)

    def describe(self, model: str, adapter: str | None, session_id: SessionId | None, work_id: str) -> None:
        return

    def settle(self, outcome: str) -> None:
        return

    def keep(self) -> None:
        return

    def hold(self) -> None:
        return

    def release(self) -> None:
        return


NO_TRACE: RequestTrace = _NoTrace(TraceIds("", ""), "", "", SystemClock())
