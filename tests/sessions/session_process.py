"""A session service on a real database, with a scripted engine."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from graftwork.adapters.format.specs import AdapterVersion, ResolvedModel, unknown_model
from graftwork.engine.core.events import (
    CacheReport,
    EngineEvent,
    FinishReason,
    PromptAdmitted,
    RequestFinished,
    TokensGenerated,
)
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database, ReadSession, Value, WriteSession
from graftwork.platform.errors import GraftworkError, LimitExceeded, Unavailable
from graftwork.platform.ids import AdapterId, KeyId, SessionId, TenantId, new_id
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.quotas.budget import ReservedCost
from graftwork.platform.quotas.in_flight import InFlightBound
from graftwork.platform.quotas.limits import Limits
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.telemetry import Telemetry
from graftwork.platform.tenancy.principals import Principal, TenantScope
from graftwork.sessions.core.events import SessionEvent
from graftwork.sessions.core.lease import Pause
from graftwork.sessions.core.session import AgentSession, SessionSettings
from graftwork.sessions.generation.usage import Accounting
from graftwork.sessions.service import NewSession, SessionService
from graftwork.sessions.store.event_log import EventLog
from graftwork.sessions.store.turn_store import TurnStore
from graftwork.sessions.text.encoding import LocalEncoding, PromptEncoder, PromptEncoding
from graftwork.sessions.turns.kv import SessionKvClient
from graftwork.sessions.turns.runner import TurnDependencies
from graftwork.sessions.turns.running import TurnHandle
from tests.platform.throwaway_journal import throwaway_backlog
from tests.sessions.scripted_engine import BareEngine, generator_on
from tests.sessions.tokenizer_and_templates import prompt_encoder, text_tokenizer, token_id

END = token_id("<|im_end|>")
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": {"type": "object"}},
}
LEASE_S = 30.0


def principal(tenant: str = "ten_1") -> Principal:
    return Principal(TenantId(tenant), "acme", KeyId("key_1"), 1.0, "default", frozenset({"inference"}))


def new_principal() -> Principal:
    """A principal of a new tenant."""
    return principal(new_id("ten"))


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@dataclass
class Answer:
    """The script of one answer."""

    text: str = "ok"
    ends: bool = True
    """Whether it ends with the end-of-sequence token."""
    failure: GraftworkError | None = None
    """An error raised instead of the end."""
    refusal: GraftworkError | None = None
    """An error raised before the prompt is admitted."""
    bug: Exception | None = None
    waits: bool = False
    """Whether it stops in its middle until `AnsweringEngine.go_on`."""
    never_ends: bool = False
    """Whether nothing follows the first token of its second half."""


class AnsweringEngine(BareEngine):
    """Implements EngineClient: gives the queued answers in order, and "ok" when none is queued."""

    def __init__(self) -> None:
        self.answers: deque[Answer] = deque()
        self.requests: list[EngineRequest] = []
        self.session_commands: list[SessionCommand] = []
        self.said: dict[str, tuple[int, ...]] = {}
        """All tokens of an answer by request, including those that were not delivered."""
        self.cancelled: list[str] = []
        self.half_way = asyncio.Event()
        """Set while a request waits."""
        self._may_go_on = asyncio.Event()

    def go_on(self) -> None:
        """Let the waiting answer end."""
        self._may_go_on.set()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        answer = self.answers.popleft() if self.answers else Answer()
        self.requests.append(request)
        if answer.refusal is not None:
            raise answer.refusal
        has_ended = False
        try:
            async for event in self._play(request, answer):
                has_ended = isinstance(event, RequestFinished)
                yield event
        finally:
            if not has_ended:
                self.cancelled.append(request.request_id)

    async def _play(self, request: EngineRequest, answer: Answer) -> AsyncGenerator[EngineEvent, None]:
        yield PromptAdmitted(CacheReport(device_tokens=4, recomputed_tokens=len(request.prompt_token_ids) - 4))
        token_ids = text_tokenizer().encode(answer.text, allow_special=True) + ((END,) if answer.ends else ())
        self.said[request.request_id] = token_ids
        middle = len(token_ids) // 2
        yield TokensGenerated(token_ids[:middle])
        if answer.waits:
            self._may_go_on.clear()
            self.half_way.set()
            await self._may_go_on.wait()
            self.half_way.clear()
        if answer.bug is not None:
            raise answer.bug
        if answer.failure is not None:
            raise answer.failure
        for token in token_ids[middle:]:
            yield TokensGenerated((token,))
            if answer.never_ends:
                await asyncio.Event().wait()
        yield RequestFinished(FinishReason.STOP if answer.ends else FinishReason.LENGTH, len(token_ids))

    async def run_session_command(self, command: SessionCommand) -> SessionMemory:
        self.session_commands.append(command)
        return SessionMemory(missing_tokens=len(command.token_ids))


@dataclass
class CountingReservation:
    """Implements Reservation."""

    estimated_tokens: int
    settled: int | None = None
    is_refunded: bool = False

    def rate_limit_headers(self) -> dict[str, str]:
        return {"x-ratelimit-limit-requests": "60"}

    async def settle(self, actual_tokens: int) -> None:
        self.settled = actual_tokens

    async def refund(self) -> None:
        self.is_refunded = True


@dataclass
class CountingQuotas:
    """Implements QuotaKeeper: reserves unless `is_shut`, and remembers every reservation."""

    reservations: list[CountingReservation] = field(default_factory=list)
    is_shut: bool = False
    limit: int | None = None  # of open sessions

    async def limits_of(self, principal: Principal) -> Limits:
        return Limits.of_tenant(principal.tenant_id, Quota(max_sessions=self.limit))

    async def reserve(
        self, limits: Limits, estimated_tokens: int, answers: int = 1, cost: ReservedCost | None = None
    ) -> CountingReservation:
        if self.is_shut:
            raise LimitExceeded("Enough for now.", retry_after_s=1.0)
        self.reservations.append(CountingReservation(estimated_tokens))
        return self.reservations[-1]

    async def keep_alive(self) -> None:
        return None

    async def close(self) -> None:
        return None


class TwoVersionResolver:
    """Implements ModelResolver: the base model, and `graft` in the versions 1 and 2."""

    async def resolve(self, scope: TenantScope, model: str, base_name: str, *_: object, **__: object) -> ResolvedModel:
        if model == base_name:
            return ResolvedModel(model, None)
        number = {"graft": 2, "graft@1": 1, "graft@2": 2}.get(model)
        if number is None:
            raise unknown_model(model)
        version = AdapterVersion(AdapterId("adp_1"), "graft", number, f"sha256:{number}", 8, ("q_proj",), 10, 0.0)
        return ResolvedModel(model, version)


class ManualTime:
    """Time that a test moves: a clock, and a pause that ends when the clock reaches its end."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._pauses: list[tuple[float, asyncio.Event]] = []

    @property
    def num_pauses(self) -> int:
        """The number of pauses that have not ended."""
        return len(self._pauses)

    async def pause(self, seconds: float) -> None:
        ended = asyncio.Event()
        self._pauses.append((self.clock.now() + seconds, ended))
        await ended.wait()

    async def advance(self, seconds: float) -> None:
        """Move the clock, end each pause at its time, and let all ready tasks run."""
        end = self.clock.now() + seconds
        await _run_ready_tasks()
        while due := [entry for entry in self._pauses if entry[0] <= end]:
            entry = min(due, key=lambda entry: entry[0])
            self._pauses.remove(entry)
            self.clock.advance(max(0.0, entry[0] - self.clock.now()))
            entry[1].set()
            await _run_ready_tasks()
        self.clock.advance(max(0.0, end - self.clock.now()))


async def _run_ready_tasks() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def let_tasks_run(seconds: float) -> None:
    """A pause without a wait, which lets other tasks run."""
    await asyncio.sleep(0)


MAX_ANSWERS = 100  # the most answers that a tenant may have in flight in a SessionProcess


class SessionProcess:
    """All objects of one process. `restarted` makes the next process on the same database."""

    def __init__(
        self,
        database: Database,
        clock: ManualClock | None = None,
        owner: str = "first",
        heartbeat_s: float = 1000.0,
        encoder: PromptEncoder | None = None,
        engine: AnsweringEngine | None = None,
        pause: Pause = let_tasks_run,
    ) -> None:
        self.database = database
        self.clock = clock or ManualClock()
        self.owner = owner
        self.engine = engine or AnsweringEngine()
        self.quotas = CountingQuotas()
        self.telemetry = Telemetry()
        self.meter = UsageMeter(database)
        turns = TurnStore(database, self.clock, owner, LEASE_S, self.clock)
        generator = generator_on(self.engine, telemetry=self.telemetry, clock=self.clock)
        backlog, in_flight = throwaway_backlog(self.meter), InFlightBound(self.clock, None, MAX_ANSWERS)
        self.accounting = Accounting(self.quotas.limits_of, self.quotas, backlog, self.telemetry, self.clock, in_flight)
        dependencies = TurnDependencies(
            generator=generator,
            accounting=self.accounting,
            store=turns,
            log=EventLog(turns.append, self.clock, pause),
            kv=SessionKvClient(self.engine, b"pepper", generator.public_prefixes),
            encoder=encoder or prompt_encoder(),
            encoding=PromptEncoding(LocalEncoding(text_tokenizer(), encoder or prompt_encoder(), 2048), self.clock),
            clock=self.clock,
            pepper=b"pepper",
            heartbeat_s=heartbeat_s,
            pause=pause,
        )
        self.service = SessionService(database, TwoVersionResolver(), dependencies)

    def restarted(self, owner: str | None = None) -> "SessionProcess":
        return SessionProcess(self.database, self.clock, owner or self.owner)

    async def session(self, by: Principal, **settings: object) -> AgentSession:
        """Create a session on the base model."""
        return await self.service.create(by, NewSession("tiny", SessionSettings(**settings)))  # type: ignore[arg-type]

    async def load(self, by: Principal, session_id: str) -> AgentSession:
        """Load a session by its id."""
        return await self.service.loader.load(by.scope(), session_id)

    async def events(self, by: Principal, session_id: str, after: int = 0) -> list[SessionEvent]:
        """Read all events until no turn runs."""
        return [event async for event in await self.service.events(by, session_id, after)]

    async def until_delivered(self, by: Principal, session_id: SessionId) -> None:
        """Return once a part of the running answer is stored."""
        store = self.service.reader.store
        while not any("delta" in event.fields for event in await store.list_events(by.scope(), session_id, 0, 100)):
            pass

    def will_say(self, *answers: Answer | str) -> None:
        self.engine.answers.extend(Answer(answer) if isinstance(answer, str) else answer for answer in answers)


async def session_with_open_call(process: SessionProcess, *next_answers: Answer | str) -> tuple[Principal, str, str]:
    """Create a session whose first turn called one tool. Returns its principal, its id and the call's id."""
    me = principal()
    session = await process.session(me, tools=(WEATHER,))
    process.will_say(call("get_weather", city="Oslo"), *next_answers)
    turn = await (await process.service.start_turn(me, session.session_id, "Weather?")).result()
    return me, session.session_id, turn.output[0].call_id


async def crash() -> None:
    """Cancel every other task of the loop, like a killed process."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)


async def run_half_a_turn(process: SessionProcess, me: Principal) -> TurnHandle:
    """Starts a turn in a new session, and returns once the model has written half of the answer."""
    session = await process.session(me)
    process.will_say(Answer("A long story", waits=True))
    running = await process.service.start_turn(me, session.session_id, "Tell")
    await process.engine.half_way.wait()
    return running


def types(events: Sequence[SessionEvent]) -> list[str]:
    return [event.type.value for event in events]


class UnreliableDatabase(Database):
    """A database whose next reads and writes a test can delay or refuse."""

    refusals: int = 0
    """How many of the next writes are refused."""
    read_refusals: int = 0
    """How many of the next reads are refused."""
    fails_at: int | None = None
    """The next write with this number is refused, counted from 1."""

    hold_read: asyncio.Event | None = None
    """An event that the next read waits for before it starts."""
    hold_written: asyncio.Event | None = None
    """An event that the next write waits for after its commit."""

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[ReadSession]:
        if self.read_refusals:
            self.read_refusals -= 1
            raise Unavailable("The database is away.")
        hold, self.hold_read = self.hold_read, None
        if hold is not None:
            await hold.wait()
        async with super().read() as session:
            yield session

    async def read_whole(self, work: Callable[[ReadSession], Awaitable[Value]]) -> Value:
        async with self.read() as session:
            return await work(session)

    @asynccontextmanager
    async def write(self) -> AsyncGenerator[WriteSession]:
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("The database is away.")
        self.fails_at = None if self.fails_at is None else self.fails_at - 1
        if self.fails_at == 0:
            self.fails_at = None
            raise Unavailable("The database is away.")
        hold, self.hold_written = self.hold_written, None
        async with super().write() as session:
            yield session
        if hold is not None:
            await hold.wait()

    async def write_whole(self, work: Callable[[WriteSession], Awaitable[Value]]) -> Value:
        async with self.write() as session:
            return await work(session)
