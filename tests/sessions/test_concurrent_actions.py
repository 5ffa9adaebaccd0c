"""Tests of many actions on sessions at the same time. The database decides their order, so the tests check only the
state afterwards."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graftwork.platform.database import Database
from graftwork.platform.errors import GraftworkError
from graftwork.platform.pagination import Order, PageRequest
from graftwork.sessions.core.items import ItemType
from graftwork.sessions.core.session import AgentSession, SessionStatus, TurnStatus
from graftwork.sessions.core.transcript import join_chain
from graftwork.sessions.store import turn_rows as history_rows
from graftwork.sessions.turns.running import TurnHandle
from tests.hypothesis_profiles import examples
from tests.sessions.responses_driver import ResponsesDriver
from tests.sessions.session_process import WEATHER, SessionProcess, call, new_principal

ONE_CALL = "Let me look. " + call("get_weather", city="Oslo")
ANSWERS = ("All  is well", ONE_CALL, ONE_CALL, call("get_weather", city="Rome") + call("get_weather", city="Lima"))
MODELS = ("tiny", "graft@1", "graft@2")

pick = st.integers(0, 5)
actions = st.one_of(
    st.tuples(st.just("turn"), pick, pick),
    st.tuples(st.just("turn"), pick, pick),
    st.tuples(st.just("outputs"), pick, st.sampled_from("ab")),
    st.tuples(st.just("outputs"), pick, st.sampled_from("ab")),
    st.tuples(st.just("partial"), pick, pick),
    st.tuples(st.just("response"), pick, pick),
    st.tuples(st.just("read"), pick, pick),
    st.tuples(st.just("cancel"), pick, pick),
    st.tuples(st.just("change"), pick, pick),
    st.tuples(st.just("fork"), pick, pick),
    st.tuples(st.just("rewind"), pick, pick),
    st.tuples(st.just("suspend"), pick, pick),
    st.tuples(st.just("sweep"), pick, pick),
)
action_groups = st.lists(st.lists(actions, min_size=2, max_size=6), min_size=4, max_size=8)


class ActionRunner:
    """One process with a few sessions, and many actions at once."""

    def __init__(self, process: SessionProcess) -> None:
        self.process = process
        self.me = new_principal()
        self.sessions: list[str] = []
        self.checkpoints: list[str] = []
        self.responses: list[str] = []

    async def begin(self) -> None:
        for _ in range(2):
            self.sessions.append((await self.process.session(self.me, tools=(WEATHER,))).session_id)

    def at(self, index: int) -> str:
        return self.sessions[index % len(self.sessions)]

    async def run_at_once(self, steps: Sequence[tuple[str, int, int]]) -> None:
        """Run all steps at once. Typed refusals are fine. Then wait for the turns that run."""
        await asyncio.gather(*(self.step(*step) for step in steps))
        for session_id in self.sessions:
            await self.process.events(self.me, session_id)

    async def step(self, action: str, index: int, choice: int) -> None:
        with suppress(GraftworkError):
            await getattr(self, action)(self.at(index), choice)

    async def turn(self, session_id: str, choice: int) -> None:
        self.process.will_say(ANSWERS[choice % len(ANSWERS)])
        await self.see(await self.process.service.start_turn(self.me, session_id, f"Hi {choice}"))

    async def outputs(self, session_id: str, said: str) -> None:
        awaited = (await self.process.load(self.me, session_id)).ledger
        await self.send(session_id, [line.call_id for line in awaited], said)

    async def partial(self, session_id: str, choice: int) -> None:
        awaited = (await self.process.load(self.me, session_id)).ledger
        await self.send(session_id, [awaited[choice % len(awaited)].call_id] if awaited else [], "a")

    async def send(self, session_id: str, call_ids: Sequence[str], said: str) -> None:
        given = [{"call_id": call_id, "output": said} for call_id in call_ids or ["call_unknown"]]
        answer = await self.process.service.tool_outputs.send(self.me, session_id, given)
        if answer.turn is not None:
            await self.see(answer.turn)

    async def response(self, session_id: str, choice: int) -> None:
        previous = self.responses[choice % len(self.responses)] if self.responses and choice else None
        body = await ResponsesDriver(self.process).ask(self.me, "Hi", previous_response_id=previous)
        self.responses.append(body["id"])

    async def read(self, session_id: str, choice: int) -> None:
        """Read a few events, then leave."""
        async with aclosing(await self.process.service.events(self.me, session_id, choice)) as events:
            for _ in range(choice):
                await anext(events, None)

    async def cancel(self, session_id: str, choice: int) -> None:
        await self.process.service.cancel(self.me, session_id)

    async def change(self, session_id: str, choice: int) -> None:
        await self.process.service.change(self.me, session_id, model=MODELS[choice % len(MODELS)])

    async def fork(self, session_id: str, choice: int) -> None:
        if len(self.sessions) < 5:
            self.sessions += [fork.session_id for fork in await self.process.service.fork(self.me, session_id)]

    async def rewind(self, session_id: str, choice: int) -> None:
        if self.checkpoints:
            await self.process.service.rewind(self.me, session_id, self.checkpoints[choice % len(self.checkpoints)])

    async def suspend(self, session_id: str, choice: int) -> None:
        await self.process.service.suspend(self.me, session_id)

    async def sweep(self, session_id: str, choice: int) -> None:
        await self.process.service.sweep()

    async def see(self, running: TurnHandle) -> None:
        """A turn that has begun ends without a failure."""
        turn = await running.result()
        assert turn.status in (TurnStatus.COMPLETED, TurnStatus.AWAITING_TOOL, TurnStatus.CANCELLED), turn.error
        self.checkpoints += [] if turn.checkpoint_id is None else [turn.checkpoint_id]

    async def check(self) -> None:
        for session_id in self.sessions:
            session = await self.process.load(self.me, session_id)
            assert session.status is not SessionStatus.RUNNING
            await self.check_tokens(session)
            await self.check_items(session)
            await self.check_events(session)
        for response_id in self.responses:
            body = await ResponsesDriver(self.process).service.get(self.me, response_id)
            assert body["status"] in ("completed", "incomplete", "failed", "cancelled")

    async def check_tokens(self, session: AgentSession) -> None:
        """The stored tokens of each checkpoint are the engine's prompt and answer."""
        if session.head_id is None:
            return
        async with self.process.database.read() as database:
            chain = await history_rows.find_chain(database, self.me.scope(), session.head_id)
        sent = {str(request.request_id): request for request in self.process.engine.requests}
        for length, checkpoint in enumerate(chain, 1):
            prompt = sent[str(checkpoint.turn_id)].prompt_token_ids
            said = self.process.engine.said[str(checkpoint.turn_id)]
            assert join_chain(chain[:length]) == (*prompt, *said)

    async def check_items(self, session: AgentSession) -> None:
        """Each call has one output; only the head's calls may have none."""
        page = PageRequest(limit=1000, order=Order.ASCENDING)
        items = (await self.process.service.items(self.me, session.session_id, page)).items
        calls = [item.call_id for item in items if item.type is ItemType.FUNCTION_CALL]
        answered = [item.call_id for item in items if item.type is ItemType.FUNCTION_CALL_OUTPUT]
        assert len({item.item_id for item in items}) == len(items)
        assert len(set(answered)) == len(answered)
        assert calls == answered + [line.call_id for line in session.ledger]

    async def check_events(self, session: AgentSession) -> None:
        """Events have no gap, and each turn has one terminal event, with the stored status and checkpoint."""
        events = await self.process.events(self.me, session.session_id)
        assert [event.seq for event in events] == list(range(1, session.last_seq + 1))
        ends = [event for event in events if event.is_terminal]
        assert [event.turn_id for event in ends] == list(dict.fromkeys(event.turn_id for event in events))
        for event in ends:
            turn = await (await self.process.service.find_turn(self.me, event.turn_id)).stored()
            assert turn.status is TurnStatus(event.type.removeprefix("turn."))
            assert turn.checkpoint_id == event.fields.get("checkpoint_id")


async def run_and_check(database: Database, groups: Sequence[Sequence[tuple[str, int, int]]]) -> None:
    runner = ActionRunner(SessionProcess(database))
    await runner.begin()
    for steps in groups:
        await runner.run_at_once(steps)
    await runner.check()
    assert all(
        reservation.settled is not None or reservation.is_refunded for reservation in runner.process.quotas.reservations
    )


@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(groups=action_groups)
async def test_concurrent_actions(database: Database, groups: list[list[tuple[str, int, int]]]) -> None:
    """After any actions at the same time nothing is lost or doubled, and each refusal is typed."""
    await run_and_check(database, groups)
