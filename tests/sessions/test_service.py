"""Tests of the session service: sessions themselves, their settings, limits and lists."""

import asyncio

import pytest
from sqlalchemy import text

from graftwork.platform.database import Database
from graftwork.platform.errors import (
    Conflict,
    LimitExceeded,
    NotFound,
    ValidationFailed,
)
from graftwork.platform.pagination import Order, PageRequest
from graftwork.sessions.core.session import AgentSession, SessionSettings, SessionStatus, TurnStatus
from graftwork.sessions.core.views import session_answer
from graftwork.sessions.service import NewSession
from tests.sessions.session_process import (
    WEATHER,
    Answer,
    SessionProcess,
    call,
    new_principal,
    principal,
    session_with_open_call,
)

ALL_ITEMS = PageRequest(limit=100, order=Order.ASCENDING)


async def test_adapter_version_is_pinned(process: SessionProcess) -> None:
    """A session keeps its adapter version; a PATCH changes it and tells how much KV is lost."""
    me = principal()
    session = await process.service.create(me, NewSession("graft@1"))
    turn = await (await process.service.start_turn(me, session.session_id, "Hi")).result()

    changed = await process.service.change(me, session.session_id, model="graft", metadata={"a": "b"})
    unchanged = await process.service.change(me, session.session_id, model="graft@2")
    await (await process.service.start_turn(me, session.session_id, "Hi")).result()

    assert session_answer(session, "tiny").model.body() == {"name": "graft", "version": 1, "digest": "sha256:1"}
    assert [request.adapter_digests for request in process.engine.requests] == [("sha256:1",), ("sha256:2",)]
    assert turn.usage is not None
    assert changed.given_up_tokens == turn.usage["total_tokens"]
    assert changed.session.metadata == {"a": "b"}
    assert unchanged.given_up_tokens == 0
    with pytest.raises(NotFound):
        await process.service.create(me, NewSession("grfat"))


async def test_suspended_session_wakes(process: SessionProcess) -> None:
    """A suspended session takes its next turn or tool output as usual."""
    me, session_id, call_id = await session_with_open_call(process)

    suspended = await process.service.suspend(me, session_id)
    answer = await process.service.tool_outputs.send(me, session_id, [{"call_id": call_id, "output": "cold"}])

    assert suspended.status is SessionStatus.SUSPENDED
    assert answer.turn is not None
    assert (await answer.turn.result()).status is TurnStatus.COMPLETED
    await process.service.suspend(me, session_id)
    assert (await (await process.service.start_turn(me, session_id, "Hi")).result()).status is TurnStatus.COMPLETED


async def test_closed_session_is_read_only_until_its_time_is_up(process: SessionProcess) -> None:
    """Closing cancels the turn and forbids changes; items and events are readable until the time to live ends."""
    me = principal()
    session = await process.service.create(me, NewSession("tiny", retention_s=60.0))
    await (await process.service.start_turn(me, session.session_id, "Hi")).result()
    process.will_say(Answer(waits=True))
    running = await process.service.start_turn(me, session.session_id, "Hi")
    await process.engine.half_way.wait()

    closed = await process.service.close_session(me, session.session_id)

    assert closed.status is SessionStatus.CLOSED
    assert (await process.service.close_session(me, session.session_id)).closed_at == closed.closed_at
    assert (await running.result()).status is TurnStatus.CANCELLED
    with pytest.raises(Conflict):
        await process.service.start_turn(me, session.session_id, "Hi")
    with pytest.raises(Conflict):
        await process.service.fork(me, session.session_id)
    assert len((await process.service.items(me, session.session_id, ALL_ITEMS)).items) == 2
    process.clock.advance(60)
    with pytest.raises(NotFound):
        await process.load(me, session.session_id)


async def test_other_tenants_see_nothing(process_on_either: SessionProcess) -> None:
    """Another tenant's sessions and checkpoints are a NotFound, like unknown ids."""
    process = process_on_either
    me, stranger = principal(), principal("ten_2")
    session = await process.session(me)
    turn = await (await process.service.start_turn(me, session.session_id, "Hi")).result()
    theirs = await process.session(stranger)
    assert turn.checkpoint_id

    for action in (
        process.load(stranger, session.session_id),
        process.service.start_turn(stranger, session.session_id, "Hi"),
        process.service.events(stranger, session.session_id),
        process.service.cancel(stranger, session.session_id),
        process.service.rewind(stranger, theirs.session_id, turn.checkpoint_id),
        process.load(stranger, "ses_\x00"),
    ):
        with pytest.raises(NotFound):
            await action
    listed = await process.service.list_sessions(stranger, PageRequest())
    assert [other.session_id for other in listed.items] == [theirs.session_id]


async def test_lists_are_paged(process_on_either: SessionProcess) -> None:
    """Pages of sessions and items follow one another without a gap."""
    process = process_on_either
    me = principal()
    sessions = [(await process.session(me)).session_id for _ in range(3)]
    for words in ("One", "Two"):
        await (await process.service.start_turn(me, sessions[0], words)).result()

    pages = [await process.service.list_sessions(me, PageRequest(limit=2))]
    pages.append(await process.service.list_sessions(me, PageRequest(limit=2, after=pages[0].items[-1].session_id)))
    newest = await process.service.items(me, sessions[0], PageRequest(limit=1))
    older = await process.service.items(me, sessions[0], PageRequest(limit=9, after=newest.items[0].item_id))

    with pytest.raises(ValidationFailed):
        await process.service.list_sessions(me, PageRequest(after="\x00"))
    assert sorted(session.session_id for page in pages for session in page.items) == sorted(sessions)
    assert [page.has_more for page in pages] == [True, False]
    assert [item.text for item in (*newest.items, *older.items)] == ["ok", "Two", "ok", "One"]


async def test_session_limit(process: SessionProcess) -> None:
    """A tenant at its limit of sessions gets no new one until it closes one."""
    me = new_principal()
    process.quotas.limit = 2
    session = await process.session(me)

    with pytest.raises(LimitExceeded):
        await process.service.fork(me, session.session_id, count=2)
    await process.session(me)
    with pytest.raises(LimitExceeded):
        await process.session(me)
    await process.service.close_session(me, session.session_id)
    await process.session(me)


async def test_session_limit_holds_for_those_made_at_once(process_on_either: SessionProcess) -> None:
    """Of many sessions created at once, exactly as many succeed as the limit allows."""
    process, me = process_on_either, new_principal()
    async with process.database.write() as database:
        await database.execute(
            text(
                "INSERT INTO tenants (id, name, status, weight, service_tier_ceiling, created_at)"
                " VALUES (:id, 'acme', 'active', 1, 'default', 0)"
            ),
            {"id": me.tenant_id},
        )
    process.quotas.limit = 3

    made = await asyncio.gather(*(process.session(me) for _ in range(8)), return_exceptions=True)

    assert sum(isinstance(outcome, AgentSession) for outcome in made) == 3
    assert sum(isinstance(outcome, LimitExceeded) for outcome in made) == 5


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        (SessionSettings(tool_choice="required"), "tool_choice"),
        (SessionSettings(response_format={"type": "xml"}), "response_format.type"),
        (
            SessionSettings(response_format={"type": "json_schema", "json_schema": {}}),
            "response_format.json_schema.schema",
        ),
        (SessionSettings(tools=({"type": "function", "function": {"name": "no spaces"}},)), "tools[0].function.name"),
        (SessionSettings(sampling={"temperature": 3}), "sampling.temperature"),
        (SessionSettings(sampling={"presence_penalty": 3}), "sampling.presence_penalty"),
        (SessionSettings(sampling={"n": 2}), "sampling.n"),
        (SessionSettings(sampling={"tempreature": 1}), "sampling.tempreature"),  # codespell:ignore
        (SessionSettings(tools=(WEATHER, WEATHER)), "tools[1].function.name"),
        (SessionSettings(instructions="\ud800"), "instructions"),
    ],
)
async def test_settings_that_are_not_served(sqlite_database: Database, settings: SessionSettings, param: str) -> None:
    """Settings that cannot be served are refused at creation with the field's name."""
    with pytest.raises(ValidationFailed) as caught:
        await SessionProcess(sqlite_database).service.create(principal(), NewSession("tiny", settings))

    assert caught.value.param == param


async def test_text_that_databases_choke_on(process_on_either: SessionProcess) -> None:
    """A NUL character in a message, a tool's output or the instructions is kept."""
    process = process_on_either
    me = principal()
    session = await process.session(me, instructions="\x00", tools=(WEATHER,))
    process.will_say(call("get_weather"))
    turn = await (await process.service.start_turn(me, session.session_id, "a\x00b")).result()
    outputs = [{"call_id": turn.output[0].call_id, "output": {"a": "\x00"}}]

    answer = await process.service.tool_outputs.send(me, session.session_id, outputs)

    assert answer.turn is not None
    await answer.turn.result()
    items = (await process.service.items(me, session.session_id, ALL_ITEMS)).items
    assert items[0].text == "a\x00b"
    assert items[2].body["output"] == '{"a": "\\u0000"}'
