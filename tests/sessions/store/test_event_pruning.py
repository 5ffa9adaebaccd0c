"""Tests that old events are deleted, and nothing that somebody can still ask for."""

from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from graftwork.platform.errors import NotFound
from graftwork.platform.pagination import Order, PageRequest
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.events import EventType
from graftwork.sessions.core.items import message
from graftwork.sessions.core.session import TurnStatus
from graftwork.sessions.responses.conversations import ConversationService
from graftwork.sessions.store.event_pruning import EventPruner
from tests.sessions.responses_driver import ResponsesDriver
from tests.sessions.session_process import Answer, SessionProcess, new_principal, types

DAY_S = 86_400.0
KEPT_S = 10 * DAY_S
ALL_ITEMS = PageRequest(limit=1000, after=None, order=Order.ASCENDING)


@pytest.fixture
async def process(process_on_either: SessionProcess) -> SessionProcess:
    return process_on_either


def pruner(process: SessionProcess) -> EventPruner:
    return EventPruner(process.database, process.clock, KEPT_S)


async def say(process: SessionProcess, me: Principal, session_id: str, words: str = "Hi") -> str:
    """Runs one turn. Returns its id."""
    return (await (await process.service.start_turn(me, session_id, words)).result()).turn_id


async def sequence(process: SessionProcess, me: Principal, session_id: str, after: int = 0) -> list[int]:
    return [event.seq for event in await process.events(me, session_id, after)]


async def count(process: SessionProcess, what: str) -> int:
    async with process.database.read() as database:
        return await database.scalar(text(f"SELECT count(*) FROM {what}")) or 0


async def test_only_old_events_are_deleted(process: SessionProcess) -> None:
    """The events of a turn stay for the set time after its end, and go after it; its items and its result stay."""
    me, other = new_principal(), new_principal()
    session_id, lasting = (await process.session(me)).session_id, (await process.session(other)).session_id
    old = await say(process, me, session_id)
    num_old = len(await sequence(process, me, session_id))
    process.clock.advance(KEPT_S)
    await say(process, me, session_id)
    await say(process, other, lasting)
    of_other, all_events = await sequence(process, other, lasting), await sequence(process, me, session_id)
    early = await pruner(process).prune()
    assert await sequence(process, me, session_id) == all_events

    process.clock.advance(1)
    late = await pruner(process).prune()

    assert (early, late) == (0, num_old)
    assert await sequence(process, me, session_id) == all_events[num_old:]
    assert await sequence(process, other, lasting) == of_other
    items = (await process.service.items(me, session_id, ALL_ITEMS)).items
    assert [item.body["content"][0]["text"] for item in items] == ["Hi", "ok", "Hi", "ok"]
    turn = await (await process.service.find_turn_of(me, session_id, old)).result()
    assert (turn.status, [item.body["content"][0]["text"] for item in turn.output]) == (TurnStatus.COMPLETED, ["ok"])


async def test_a_reader_is_told_what_is_missing(process: SessionProcess) -> None:
    """A stream that would leave out events is refused, and says from where on there are events; a new one begins there."""
    me = new_principal()
    session_id = (await process.session(me)).session_id
    await say(process, me, session_id)
    num_old = len(await sequence(process, me, session_id))
    process.clock.advance(KEPT_S + 1)
    await say(process, me, session_id)
    await pruner(process).prune()

    with pytest.raises(NotFound) as refusal:
        await process.events(me, session_id, 1)

    assert (refusal.value.code, refusal.value.param) == ("events_not_kept", "after")
    assert f"Events 2 to {num_old} " in refusal.value.message
    rest = await process.events(me, session_id, num_old)
    assert types(rest)[0] == EventType.TURN_CREATED
    assert await process.events(me, session_id) == rest


async def test_a_session_without_any_event_goes_on(process: SessionProcess) -> None:
    """When all events of a session are deleted, the next turn continues their numbers."""
    me = new_principal()
    session_id = (await process.session(me)).session_id
    await say(process, me, session_id)
    last = (await sequence(process, me, session_id))[-1]
    process.clock.advance(KEPT_S + 1)
    await pruner(process).prune()
    with pytest.raises(NotFound):
        await process.events(me, session_id, last - 1)
    assert await process.events(me, session_id) == []
    assert await process.events(me, session_id, last) == []

    await say(process, me, session_id)

    assert (await sequence(process, me, session_id, last))[0] == last + 1


async def test_a_running_turn_keeps_its_events(process: SessionProcess) -> None:
    """A turn that runs, for however long, keeps its events, and so do later ones; earlier turns do not."""
    me = new_principal()
    session_id = (await process.session(me)).session_id
    await say(process, me, session_id)
    num_old = len(await sequence(process, me, session_id))
    process.will_say(Answer("A long story", waits=True))
    running = await process.service.start_turn(me, session_id, "Tell")
    await process.engine.half_way.wait()
    process.clock.advance(2 * KEPT_S)

    num_deleted = await pruner(process).prune()
    process.engine.go_on()
    events = [event async for event in running.events()]

    assert num_deleted == num_old
    assert events[0].seq == num_old + 1
    assert events[-1].type is EventType.TURN_COMPLETED


async def test_a_stored_response_can_always_be_read(process: SessionProcess) -> None:
    """A response is read from its events, so they stay until the response is deleted."""
    me, responses = new_principal(), ResponsesDriver(process)
    conversation = await ConversationService(process.service).create(me, {}, ())
    process.will_say("First answer", "Second answer")
    first = await responses.ask(me, conversation_id=conversation.session_id)
    second = await responses.ask(me, conversation_id=conversation.session_id)
    process.clock.advance(2 * KEPT_S)

    kept = await pruner(process).prune()
    again = [await responses.service.get(me, body["id"]) for body in (first, second)]
    await responses.service.delete(me, first["id"])
    num_events = await count(process, "events")
    deleted = await pruner(process).prune()

    assert (kept, again) == (0, [first, second])
    assert 0 < deleted < num_events
    assert await responses.service.get(me, second["id"]) == second


async def test_added_items_are_no_turns_with_events(process: SessionProcess) -> None:
    """Items that a client adds without a turn of the model leave nothing to be looked at again and again."""
    me = new_principal()
    conversations = ConversationService(process.service)
    conversation = await conversations.create(me, {}, ())
    for _ in range(2):
        session = await process.load(me, conversation.session_id)
        await process.service.store.add_items(me.scope(), session, [message("user", "Hello")])
    process.clock.advance(KEPT_S + 1)

    await pruner(process).prune()

    assert await count(process, "turns") == 2
    assert await count(process, "turns WHERE has_events") == 0


@pytest.mark.parametrize(("turns_per_query", "events_per_transaction"), [(1, 1), (2, 3), (500, 2000)])
async def test_small_parts_delete_the_same(
    process: SessionProcess, turns_per_query: int, events_per_transaction: int
) -> None:
    """However small the transactions are, all events of all tenants go, and later runs have nothing to look at."""
    own = EventPruner(
        process.database,
        process.clock,
        KEPT_S,
        turns_per_query=turns_per_query,
        events_per_transaction=events_per_transaction,
    )
    for me in (new_principal(), new_principal()):
        for _ in range(2):
            session_id = (await process.session(me)).session_id
            for _ in range(2):
                await say(process, me, session_id)
    num_events = await count(process, "events")
    process.clock.advance(KEPT_S + 1)

    num_deleted = await own.prune()

    assert num_deleted == num_events > 0
    assert (await count(process, "events"), await count(process, "turns WHERE has_events")) == (0, 0)
    assert await own.prune() == 0


async def test_the_search_reads_only_turns_with_events(process: SessionProcess) -> None:
    """The search for old events uses the index that has no turn without events."""
    searches: list[tuple[str, Any]] = []

    def note(*arguments: Any) -> None:
        if "FROM turns" in arguments[2] and "ORDER BY" in arguments[2]:
            searches.append((arguments[2], arguments[3]))

    event.listen(Engine, "before_cursor_execute", note)
    await pruner(process).prune()
    event.remove(Engine, "before_cursor_execute", note)

    ((search, parameters),) = searches
    async with process.database.read() as database:
        connection = await database.connection()
        is_sqlite = connection.dialect.name == "sqlite"
        if not is_sqlite:
            await connection.exec_driver_sql("SET LOCAL enable_seqscan = off")  # a table without rows is read whole
        explained = await connection.exec_driver_sql(f"EXPLAIN {'QUERY PLAN ' * is_sqlite}{search}", parameters)
    assert "ix_turns_finished_at_id" in str(explained.all())
