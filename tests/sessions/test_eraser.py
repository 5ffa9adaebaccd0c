"""Tests of erasing all sessions of a deleted tenant."""

from sqlalchemy import func, select

from graftwork.platform.database import Base, Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.ledger.tables import UsageRow
from graftwork.platform.ledger.usage import UsageOutcome
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.session import TurnStatus
from tests.sessions.session_process import (
    LEASE_S,
    Answer,
    SessionProcess,
    UnreliableDatabase,
    crash,
    new_principal,
)

TABLES = ("sessions", "turns", "checkpoints", "items", "tool_calls", "events", "responses")


async def num_rows(database: Database, me: Principal) -> int:
    """Counts the rows of a tenant in all tables of sessions."""
    tables = [Base.metadata.tables[name] for name in TABLES]
    async with database.read() as session:
        counts = [
            await session.scalar(select(func.count()).select_from(table).where(table.c.tenant_id == me.tenant_id))
            for table in tables
        ]
    return sum(count or 0 for count in counts)


async def say(process: SessionProcess, me: Principal, session_id: str, text: str) -> None:
    turn = await (await process.service.start_turn(me, session_id, text)).result()
    assert turn.status is TurnStatus.COMPLETED


async def a_family(process: SessionProcess, me: Principal) -> str:
    """Creates a session with a fork and a fork of the fork, all of which went on. Returns the first one's id."""
    session_id = first = (await process.session(me)).session_id
    for _ in range(3):
        await say(process, me, session_id, "Hello")
        (fork,) = await process.service.fork(me, session_id)
        await say(process, me, session_id, "And on")
        session_id = fork.session_id
    return first


async def test_families_of_forks_are_erased_and_other_tenants_are_not(database: Database) -> None:
    """No row of a tenant's sessions and forks is left, and each row of another tenant is."""
    process, me, other = SessionProcess(database), new_principal(), new_principal()
    for each in (me, other):
        await a_family(process, each)
    kept = await num_rows(database, other)

    assert await process.service.eraser.erase(me.scope())

    assert (await num_rows(database, me), await num_rows(database, other)) == (0, kept)
    assert kept > 0


async def test_a_running_turn_is_cancelled_before_its_rows_go(database: Database) -> None:
    """While a turn runs in another process nothing is deleted; the turn is asked to end, and then all is deleted."""
    process, me = SessionProcess(database, heartbeat_s=0.0), new_principal()
    eraser = process.restarted("another").service.eraser
    session = await process.session(me)
    process.will_say(Answer("A long story", waits=True, never_ends=True))
    running = await process.service.start_turn(me, session.session_id, "Tell")
    await process.engine.half_way.wait()

    is_erased = await eraser.erase(me.scope())
    turn = await running.result()

    assert not is_erased
    assert turn.status is TurnStatus.CANCELLED
    assert await eraser.erase(me.scope())
    assert await num_rows(database, me) == 0


async def test_a_turn_of_a_dead_process_is_billed_and_then_erased(database: Database) -> None:
    """A turn whose process died keeps the rows until its lease ends; then its usage row is written and all is erased."""
    process, me = SessionProcess(database), new_principal()
    session = await process.session(me)
    process.will_say(Answer("A long story", waits=True))
    await process.service.start_turn(me, session.session_id, "Tell")
    await process.engine.half_way.wait()
    await process.until_delivered(me, session.session_id)
    await crash()
    eraser = process.restarted("another").service.eraser

    before = await eraser.erase(me.scope())
    process.clock.advance(LEASE_S + 1)
    after = await eraser.erase(me.scope())

    assert (before, after) == (False, True)
    assert await num_rows(database, me) == 0
    async with database.read() as reading:
        outcomes = (await reading.scalars(select(UsageRow.outcome).where(UsageRow.tenant_id == me.tenant_id))).all()
    assert outcomes == [UsageOutcome.INTERRUPTED]


async def test_an_erasure_continues_where_it_was_interrupted(unreliable: UnreliableDatabase) -> None:
    """An erasure that fails at each of its transactions in turn gets to its end."""
    process, me = SessionProcess(unreliable), new_principal()
    await a_family(process, me)
    eraser, failures = process.service.eraser, 0
    is_erased = False
    while not is_erased:
        unreliable.fails_at = 2  # each call gets one transaction further
        try:
            is_erased = await eraser.erase(me.scope())
        except Unavailable:
            failures += 1

    assert failures > 3
    assert await num_rows(unreliable, me) == 0
