"""Two actions on one session at the same time."""

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy import text

from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.ledger.usage import UsageGroup
from graftwork.sessions.core.events import EventType
from graftwork.sessions.core.session import SessionStatus, TurnStatus
from graftwork.sessions.text.encoding import SHORT_CHARACTERS, PromptEncoder
from tests.sessions.session_process import (
    Answer,
    SessionProcess,
    UnreliableDatabase,
    new_principal,
    principal,
    run_half_a_turn,
)
from tests.sessions.tokenizer_and_templates import prompt_encoder


async def until_running(process: SessionProcess, session_id: str) -> None:
    """Return once the session's row says that a turn runs."""
    while (await process.load(principal(), session_id)).status is not SessionStatus.RUNNING:
        pass


class LongEncoder(PromptEncoder):
    """Encodes a prompt only when the test allows it."""

    def __init__(self) -> None:
        ready = prompt_encoder()
        super().__init__(ready.template, ready.tokenizer)
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def encode_messages(self, *arguments: Any, **options: Any) -> tuple[int, ...]:
        self.has_begun.set()
        assert self.may_end.wait(timeout=60)
        return super().encode_messages(*arguments, **options)


async def test_a_long_prompt_delays_no_other_request(sqlite_database: Database) -> None:
    """Other requests are answered while a long prompt is encoded."""
    encoder = LongEncoder()
    process, me = SessionProcess(sqlite_database, encoder=encoder), principal()
    session = await process.session(me)
    starting = asyncio.create_task(
        process.service.start_turn(me, session.session_id, "long " * (SHORT_CHARACTERS // 4))
    )
    assert await asyncio.to_thread(encoder.has_begun.wait, 20)

    meanwhile = await process.load(me, session.session_id)
    encoder.may_end.set()
    turn = await (await starting).result()

    assert (meanwhile.status, turn.status) == (SessionStatus.IDLE, TurnStatus.COMPLETED)


async def test_turn_outlives_a_database_that_is_away(unreliable: UnreliableDatabase) -> None:
    """Every event, the answer and the usage are stored once the database is back."""
    process, me = SessionProcess(unreliable), principal()
    session = await process.session(me)
    process.will_say(Answer("A long story", waits=True))
    running = await process.service.start_turn(me, session.session_id, "Tell")
    unreliable.refusals = 7
    await process.engine.half_way.wait()
    process.engine.go_on()

    turn = await running.result()

    assert (turn.status, turn.output[0].text) == (TurnStatus.COMPLETED, "A long story")
    events = await process.events(me, session.session_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert "".join(event.fields.get("delta", "") for event in events) == "A long story"
    assert unreliable.refusals == 0


async def test_result_outlives_a_database_that_is_away(unreliable: UnreliableDatabase) -> None:
    """A turn that was stored is given to the request that started it once the database is back, as an answer."""
    process, me = SessionProcess(unreliable), principal()
    running = await run_half_a_turn(process, me)
    unreliable.read_refusals = 7
    process.engine.go_on()

    turn = await running.result()

    assert turn.status is TurnStatus.COMPLETED
    assert unreliable.read_refusals == 0


async def test_turn_that_another_process_has_ended_is_metered_once(database: Database) -> None:
    """A turn that lost its lease stores no outcome, but what it delivered is in the ledger, once."""
    first, me = SessionProcess(database), new_principal()
    running = await run_half_a_turn(first, me)
    await first.until_delivered(me, running.session_id)

    num_ended = await first.restarted().service.recover()
    first.engine.go_on()

    assert (num_ended, (await running.result()).status) == (1, TurnStatus.FAILED)
    (row,) = await first.meter.summarise(me.tenant_id, 0.0, 1e12, UsageGroup.SESSION)
    assert (row.group, row.requests) == (running.session_id, 1)
    assert row.completion_tokens > 0
    assert 'graftwork_requests_total{outcome="interrupted"' in first.telemetry.render()[0].decode()


async def test_events_of_a_turn_are_read_to_their_end_from_its_feed(unreliable: UnreliableDatabase) -> None:
    """A reader gets the last events of a turn that runs here without reading the database."""
    world, me = SessionProcess(unreliable), principal()
    running = await run_half_a_turn(world, me)
    unreliable.hold_read = never = asyncio.Event()
    world.engine.go_on()

    read = [event async for event in running.events()]

    assert [event.seq for event in read] == list(range(1, len(read) + 1))
    assert read[-1].type is EventType.TURN_COMPLETED
    assert unreliable.hold_read is never


async def until_cancel_is_asked_for(process: SessionProcess, session_id: str) -> None:
    """Return once the session's row has a cancel request."""
    while not (await process.load(principal(), session_id)).cancel_requested:
        pass


async def test_turn_that_begins_during_a_recovery_lives(unreliable: UnreliableDatabase) -> None:
    """A recovery does not fail a turn that began during its search."""
    process, me = SessionProcess(unreliable), principal()
    session = await process.session(me)
    process.will_say(Answer("A long story", waits=True))
    unreliable.hold_read = may_look = asyncio.Event()
    recovery = asyncio.create_task(process.service.recover())
    await asyncio.sleep(0)
    running = await process.service.start_turn(me, session.session_id, "Tell")

    may_look.set()
    recovered = await recovery
    await process.engine.half_way.wait()
    process.engine.go_on()

    assert recovered == 0
    assert (await running.result()).status is TurnStatus.COMPLETED


@pytest.mark.parametrize("action", ["cancel", "close_session"])
@pytest.mark.parametrize("is_speaking", [True, False])
async def test_cancel_of_a_turn_in_another_process(database: Database, action: str, is_speaking: bool) -> None:
    """A cancel through another process ends the turn, at its next commit or heartbeat, before the cancel returns."""
    first = SessionProcess(database, heartbeat_s=1000.0 if is_speaking else 0.01)
    other, me = SessionProcess(database, first.clock, "second"), principal()
    session = await first.session(me)
    first.will_say(Answer("A long story", waits=True, never_ends=True))
    running = await first.service.start_turn(me, session.session_id, "Tell")
    await first.engine.half_way.wait()

    ending = asyncio.create_task(getattr(other.service, action)(me, session.session_id))
    if is_speaking:
        await until_cancel_is_asked_for(first, session.session_id)
        first.engine.go_on()
    async with asyncio.timeout(60):
        ended = await ending

    assert ended.status is (SessionStatus.IDLE if action == "cancel" else SessionStatus.CLOSED)
    assert (await running.result()).status is TurnStatus.CANCELLED


@pytest.mark.parametrize("action", ["cancel", "close_session"])
async def test_cancel_of_a_turn_that_is_being_launched(unreliable: UnreliableDatabase, action: str) -> None:
    """A turn whose row is stored but whose task has not started is cancelled too."""
    process, me = SessionProcess(unreliable), principal()
    session = await process.session(me)
    process.will_say(Answer("A long story", waits=True))
    unreliable.hold_written = may_start = asyncio.Event()
    starting = asyncio.create_task(process.service.start_turn(me, session.session_id, "Tell"))
    await until_running(process, session.session_id)

    ending = asyncio.create_task(getattr(process.service, action)(me, session.session_id))
    for _ in range(10):
        await process.service.loader.load(
            me.scope(), session.session_id
        )  # meanwhile it looks, and finds no task to end
    assert not ending.done()
    may_start.set()
    async with asyncio.timeout(60):
        ended = await ending
        turn = await (await starting).result()

    assert turn.status is TurnStatus.CANCELLED
    assert ended.status is (SessionStatus.IDLE if action == "cancel" else SessionStatus.CLOSED)


@pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_turn_outlives_connections_that_are_cut(database: Database) -> None:
    """Connections that PostgreSQL ends in the middle of a turn cost it nothing: each event is stored once, in order."""
    process, me = SessionProcess(database, pause=asyncio.sleep), new_principal()
    session = await process.session(me)
    process.will_say(Answer(" ".join(["word"] * 200), waits=True))
    running = await process.service.start_turn(me, session.session_id, "Tell")
    await process.engine.half_way.wait()
    process.engine.go_on()
    ended = asyncio.create_task(running.result())

    num_cut = 0
    while not ended.done() and num_cut < 20:
        num_cut += await cut_all_connections(database)

    turn = await ended
    events = await process.events(me, session.session_id)
    (row,) = await process.meter.summarise(me.tenant_id, 0.0, 1e12, UsageGroup.SESSION)
    assert turn.status is TurnStatus.COMPLETED
    assert turn.output[0].text == " ".join(["word"] * 200)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert row.requests == 1
    assert num_cut


async def cut_all_connections(database: Database) -> int:
    """Ends all other connections to the database. Returns how many there were."""
    try:
        async with database.read() as session:
            found = await session.scalars(
                text(
                    "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            )
            return len(found.all())
    except Unavailable:
        return 0
