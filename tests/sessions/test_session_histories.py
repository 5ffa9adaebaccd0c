"""Tests of random sequences of actions on sessions."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graftwork.platform.database import Database
from graftwork.platform.errors import CapacityContended, Conflict, NotFound, Unavailable
from graftwork.platform.pagination import Order, PageRequest
from graftwork.sessions.core.items import ItemType
from graftwork.sessions.core.session import AgentSession, SessionStatus, Turn, TurnStatus
from graftwork.sessions.store import turn_rows as history_rows
from graftwork.sessions.turns.launcher import ToolOutputsResult
from graftwork.sessions.turns.running import TurnHandle
from tests.hypothesis_profiles import examples
from tests.sessions.session_process import WEATHER, Answer, SessionProcess, call, crash, new_principal

ANSWERS = {
    "text": Answer("All  is well"),
    "silence": Answer(""),
    "one call": Answer("Let me look. " + call("get_weather", city="Oslo")),
    "two calls": Answer(call("get_weather", city="Oslo") + "\n" + call("get_weather", city="Rome")),
    "cut off": Answer("Once upon a", ends=False),
    "cut off in a call": Answer('<tool_call>\n{"name": "get_weather", "arguments": {"ci', ends=False),
    "failure": Answer(failure=Unavailable("gone")),
    "refusal": Answer(refusal=CapacityContended("full")),
    "bug": Answer(bug=ZeroDivisionError("bug")),
    "cancel": Answer("A long story", waits=True),
    "crash": Answer("A long story", waits=True),
    "shutdown": Answer("A long story", waits=True),
}
GOOD = ("text", "silence", "one call", "two calls", "cut off", "cut off in a call")

pick = st.integers(0, 5)
endings = st.sampled_from(["one call"] * 4 + ["two calls"] * 2 + [*GOOD, *ANSWERS])
operations = st.one_of(
    st.tuples(st.just("turn"), pick, endings),
    st.tuples(
        st.just("outputs"), pick, st.lists(st.tuples(pick, st.sampled_from("ab")), min_size=1, max_size=3), endings
    ),
    st.tuples(st.just("answer"), pick, endings),
    st.tuples(st.just("late outputs"), pick, pick, st.sampled_from("ab")),
    st.tuples(st.just("unknown call"), pick),
    st.tuples(st.just("fork"), pick, st.none() | pick, st.integers(1, 2)),
    st.tuples(st.just("rewind"), pick, pick),
    st.tuples(st.just("suspend"), pick),
)


@dataclass
class ExpectedCheckpoint:
    """The expected state of a checkpoint."""

    tokens: tuple[int, ...]
    call_ids: tuple[str, ...]
    outputs: dict[str, str]
    """Every tool output of the history up to this checkpoint."""


@dataclass
class ExpectedSession:
    """The expected state of a session."""

    session_id: str
    head: str | None = None
    reachable: list[str] = field(default_factory=list)
    """The checkpoints that it may be rewound to."""
    ledger: dict[str, str | None] = field(default_factory=dict)
    """Outputs by call, for every checkpoint that was the session's head."""
    inherited: dict[str, str] = field(default_factory=dict)
    """Outputs from before the fork."""
    is_suspended: bool = False


class PredictedSessions:
    """Calls the service and predicts its results."""

    def __init__(self, process: SessionProcess) -> None:
        self.process = process
        self.me = new_principal()
        self.branches: list[ExpectedSession] = []
        self.points: dict[str, ExpectedCheckpoint] = {}
        self.live: dict[str, list[object]] = {}
        """Events by turn, as a live reader saw them."""

    async def begin(self) -> None:
        session = await self.process.session(self.me, tools=(WEATHER,), instructions="Be brief.")
        self.branches.append(ExpectedSession(session.session_id))

    def branch(self, index: int) -> ExpectedSession:
        return self.branches[index % len(self.branches)]

    def awaited(self, branch: ExpectedSession) -> tuple[str, ...]:
        return () if branch.head is None else self.points[branch.head].call_ids

    async def turn(self, index: int, ending: str) -> None:
        branch = self.branch(index)
        if self.awaited(branch):
            with pytest.raises(Conflict):
                await self.process.service.start_turn(self.me, branch.session_id, "Hi")
            return
        self.process.will_say(ANSWERS[ending])
        running = await self.process.service.start_turn(self.me, branch.session_id, "Hi", if_head=branch.head)
        await self.run(branch, running, ending, {})

    async def outputs(self, index: int, choices: Sequence[tuple[int, str]], ending: str) -> None:
        branch = self.branch(index)
        awaited = self.awaited(branch)
        if not awaited:
            return
        sent = [(awaited[choice % len(awaited)], text) for choice, text in choices]
        stored: dict[str, str | None] = {call_id: branch.ledger[call_id] for call_id in awaited}
        for call_id, text in sent:
            if stored[call_id] not in (None, text):
                with pytest.raises(Conflict):
                    await self.send(branch, sent)
                return
            stored[call_id] = text
        branch.ledger |= stored
        if None in stored.values():
            answer = await self.send(branch, sent)
            assert answer.turn is None
            assert list(answer.missing) == [call_id for call_id in awaited if stored[call_id] is None]
            branch.is_suspended &= False
            return
        self.process.will_say(ANSWERS[ending])
        answer = await self.send(branch, sent)
        assert answer.turn is not None
        await self.run(branch, answer.turn, ending, {call_id: text for call_id, text in stored.items() if text})

    async def answer(self, index: int, ending: str) -> None:
        """Send all missing outputs in one request."""
        branch = self.branch(index)
        choices = [(position, branch.ledger[call_id] or "a") for position, call_id in enumerate(self.awaited(branch))]
        await self.outputs(index, choices, ending)

    async def late_outputs(self, index: int, choice: int, text: str) -> None:
        branch = self.branch(index)
        known = branch.inherited | branch.ledger
        late = [call_id for call_id in known if call_id not in self.awaited(branch)]
        if not late:
            return
        call_id = late[choice % len(late)]
        if known[call_id] == text:
            answer = await self.send(branch, [(call_id, text)])
            assert [(output.call_id, output.output) for output in answer.outputs] == [(call_id, text)]
            return
        with pytest.raises(Conflict):
            await self.send(branch, [(call_id, text)])

    async def unknown_call(self, index: int) -> None:
        branch = self.branch(index)
        with pytest.raises(NotFound if self.awaited(branch) else Conflict):
            await self.send(branch, [("call_unknown", "a")])

    async def fork(self, index: int, at: int | None, count: int) -> None:
        branch = self.branch(index)
        point = branch.head if at is None or not branch.reachable else branch.reachable[at % len(branch.reachable)]
        children = await self.process.service.fork(self.me, branch.session_id, None if at is None else point, count)
        for child in children:
            made = ExpectedSession(child.session_id, point, await self.ancestors(point))
            if point is not None:
                made.ledger = dict.fromkeys(self.points[point].call_ids)
                made.inherited = dict(self.points[point].outputs)
            self.branches.append(made)

    async def rewind(self, index: int, to: int) -> None:
        branch = self.branch(index)
        strangers = [point for point in self.points if point not in branch.reachable]
        if strangers:
            with pytest.raises(NotFound):
                await self.process.service.rewind(self.me, branch.session_id, strangers[to % len(strangers)])
        if branch.reachable:
            branch.head = branch.reachable[to % len(branch.reachable)]
            await self.process.service.rewind(self.me, branch.session_id, branch.head)
            branch.ledger |= dict.fromkeys(self.points[branch.head].call_ids)
            branch.is_suspended = False

    async def suspend(self, index: int) -> None:
        branch = self.branch(index)
        await self.process.service.suspend(self.me, branch.session_id)
        branch.is_suspended = True

    async def send(self, branch: ExpectedSession, sent: Sequence[tuple[str, str]]) -> ToolOutputsResult:
        outputs = [{"call_id": call_id, "output": text} for call_id, text in sent]
        return await self.process.service.tool_outputs.send(self.me, branch.session_id, outputs)

    async def run(self, branch: ExpectedSession, running: TurnHandle, ending: str, outputs: dict[str, str]) -> None:
        """Wait for a turn, and check that it ends as expected."""
        branch.is_suspended = False
        if ending in ("cancel", "crash", "shutdown"):
            await self.process.engine.half_way.wait()
        if ending == "cancel":
            await self.process.service.cancel(self.me, branch.session_id)
        elif ending == "crash":
            await crash()
            self.restart()
            assert await self.process.service.recover() == 1
        elif ending == "shutdown":
            await self.process.service.close()
            self.restart()
        else:
            self.live[running.turn_id] = [event async for event in running.events()]
            self.committed(branch, await running.result(), ending, outputs)

    def restart(self) -> None:
        said, requests = self.process.engine.said, self.process.engine.requests
        self.process = self.process.restarted()
        self.process.engine.said, self.process.engine.requests = said, requests

    def committed(self, branch: ExpectedSession, turn: Turn, ending: str, outputs: dict[str, str]) -> None:
        assert (turn.checkpoint_id is not None) == (ending in GOOD)
        if turn.checkpoint_id is None:
            assert turn.status is TurnStatus.FAILED
            return
        calls = tuple(str(item.call_id) for item in turn.output if item.type is ItemType.FUNCTION_CALL)
        awaits = calls if turn.status is TurnStatus.AWAITING_TOOL else ()
        before = self.points[branch.head] if branch.head else ExpectedCheckpoint((), (), {})
        prompt = self.process.engine.requests[-1].prompt_token_ids
        assert prompt[: len(before.tokens)] == before.tokens
        said = self.process.engine.said[turn.turn_id]
        self.points[turn.checkpoint_id] = ExpectedCheckpoint((*prompt, *said), awaits, before.outputs | outputs)
        branch.head = turn.checkpoint_id
        branch.reachable.append(turn.checkpoint_id)
        branch.ledger |= dict.fromkeys(awaits)

    async def ancestors(self, point: str | None) -> list[str]:
        if point is None:
            return []
        async with self.process.database.read() as database:
            chain = await history_rows.find_chain(database, self.me.scope(), point)
        return [str(checkpoint.checkpoint_id) for checkpoint in chain]

    async def check(self) -> None:
        for branch in self.branches:
            session = await self.process.load(self.me, branch.session_id)
            assert session.head_id == branch.head
            assert session.status is self.status(branch)
            await self.check_tokens(session)
            await self.check_outputs(session)
            await self.check_events(session)

    def status(self, branch: ExpectedSession) -> SessionStatus:
        if branch.is_suspended:
            return SessionStatus.SUSPENDED
        return SessionStatus.AWAITING_TOOL if self.awaited(branch) else SessionStatus.IDLE

    async def check_tokens(self, session: AgentSession) -> None:
        """The stored tokens, joined, are the engine's prompts and answers."""
        if session.head_id is None:
            return
        async with self.process.database.read() as database:
            chain = await history_rows.find_chain(database, self.me.scope(), session.head_id)
        replayed = tuple(token for checkpoint in chain for token in checkpoint.token_ids)
        assert replayed == self.points[session.head_id].tokens
        assert [checkpoint.num_tokens for checkpoint in chain][-1] == len(replayed)

    async def check_outputs(self, session: AgentSession) -> None:
        """Every answered call of the history has exactly one output in it."""
        page = PageRequest(limit=1000, order=Order.ASCENDING)
        items = (await self.process.service.items(self.me, session.session_id, page)).items
        applied = [(item.call_id, item.body["output"]) for item in items if item.type is ItemType.FUNCTION_CALL_OUTPUT]
        expected = self.points[session.head_id].outputs if session.head_id else {}
        assert len(applied) == len(expected)
        assert dict(applied) == expected

    async def check_events(self, session: AgentSession) -> None:
        """Events are numbered without a gap, turns are complete, and live readers saw what is stored."""
        events = await self.process.events(self.me, session.session_id)
        assert [event.seq for event in events] == list(range(1, session.last_seq + 1))
        by_turn: dict[str, list[object]] = {}
        for earlier, event in zip([None, *events], events, strict=False):
            starts = earlier is None or earlier.is_terminal
            assert starts == (event.turn_id not in by_turn) == (event.type == "turn.created")
            by_turn.setdefault(event.turn_id, []).append(event)
        assert not events or events[-1].is_terminal
        for turn_id, seen in by_turn.items():
            assert self.live.get(turn_id, seen) == seen
        middle = len(events) // 2
        assert await self.process.events(self.me, session.session_id, after=middle) == events[middle:]


async def run_random_actions(database: Database, steps: Sequence[tuple[object, ...]]) -> None:
    histories = PredictedSessions(SessionProcess(database))
    await histories.begin()
    for action, *arguments in steps:
        await getattr(histories, str(action).replace(" ", "_"))(*arguments)
    await histories.check()


@pytest.fixture
async def postgres_database(postgres_url: str) -> AsyncIterator[Database]:
    database = Database(postgres_url)
    await database.upgrade_to_head()
    yield database
    await database.close()


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=st.lists(operations, min_size=8, max_size=24))
async def test_any_history(sqlite_database: Database, steps: list[tuple[object, ...]]) -> None:
    """After any turns, tool outputs, forks, rewinds, cancels, failures and crashes, stored tokens equal the prompts
    and events have no gap."""
    await run_random_actions(sqlite_database, steps)


@pytest.mark.postgres
@settings(max_examples=examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=st.lists(operations, min_size=12, max_size=24))
async def test_any_history_on_postgres(postgres_database: Database, steps: list[tuple[object, ...]]) -> None:
    """After any actions on PostgreSQL, stored tokens equal the prompts and events have no gap."""
    await run_random_actions(postgres_database, steps)
