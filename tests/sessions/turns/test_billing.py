"""Tests of what a turn costs, by how it ended."""

import pytest
from sqlalchemy import select

from graftwork.platform.database import Database
from graftwork.platform.errors import GraftworkError, InternalFailure, InvalidRequest, Unavailable
from graftwork.platform.ids import TurnId, new_id
from graftwork.platform.ledger.tables import UsageRow
from graftwork.platform.ledger.usage import UsageGroup, UsageOutcome
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.session import TurnStatus
from tests.platform.spending import billed_tokens
from tests.sessions.session_process import (
    LEASE_S,
    Answer,
    SessionProcess,
    UnreliableDatabase,
    crash,
    new_principal,
    run_half_a_turn,
)


async def rows_of(database: Database, me: Principal) -> list[UsageRow]:
    async with database.read() as session:
        return list(await session.scalars(select(UsageRow).where(UsageRow.tenant_id == me.tenant_id)))


async def test_turns_that_their_engine_does_not_survive_cost_nothing(database: Database) -> None:
    """The tokens billed for turns that failed because the engine died, or by a bug, sum to zero; so does the quota."""
    process, me = SessionProcess(database), new_principal()
    session = await process.session(me)
    faults: list[Answer] = [
        Answer("A long story", failure=Unavailable("The engine is gone.")),
        Answer("A long story", failure=InternalFailure("The step failed.")),
        Answer("A long story", bug=ZeroDivisionError("a bug")),
    ]
    process.will_say(*faults)

    turns = [await (await process.service.start_turn(me, session.session_id, "Tell")).result() for _ in faults]

    rows = await rows_of(database, me)
    assert [turn.status for turn in turns] == [TurnStatus.FAILED] * 3
    assert [turn.usage for turn in turns] == [None] * 3
    assert [row.outcome for row in rows] == [UsageOutcome.SERVER_ERROR] * 3
    assert sum(row.prompt_tokens + row.cached_tokens + row.completion_tokens for row in rows) == 0
    assert await billed_tokens(process.meter, me.tenant_id) == 0
    assert all(reservation.is_refunded for reservation in process.quotas.reservations)
    assert 'graftwork_generated_tokens_total{tenant="' in process.telemetry.render()[0].decode()


async def test_a_turn_whose_end_cannot_be_stored_costs_nothing(unreliable: UnreliableDatabase) -> None:
    """A database that is full for too long fails the turn, which then has one usage row without tokens."""
    process, me = SessionProcess(unreliable), new_principal()
    running = await run_half_a_turn(process, me)
    await process.until_delivered(me, running.session_id)
    unreliable.refusals = 100
    process.engine.go_on()
    with pytest.raises(Unavailable):
        await running.result()

    unreliable.refusals = 0
    await process.accounting.backlog.flush()
    await process.service.recover()

    (row,) = await rows_of(unreliable, me)
    turn = await running.stored()
    assert (row.outcome, row.prompt_tokens, row.completion_tokens) == (UsageOutcome.SERVER_ERROR, 0, 0)
    assert (turn.status, turn.usage) == (TurnStatus.FAILED, None)


@pytest.mark.parametrize("cause", ["cancel", "request"])
async def test_what_a_client_ends_is_billed(database: Database, cause: str) -> None:
    """The tokens of a turn that its client cancels, or whose own request fails, are billed."""
    process, me = SessionProcess(database), new_principal()
    session = await process.session(me)
    failure: GraftworkError | None = InvalidRequest("No token fits.") if cause == "request" else None
    process.will_say(Answer("A long story", waits=True, failure=failure))
    running = await process.service.start_turn(me, session.session_id, "Tell")
    await process.engine.half_way.wait()

    if failure is None:
        await process.service.cancel(me, session.session_id)
    else:
        process.engine.go_on()
    turn = await running.result()

    (row,) = await rows_of(database, me)
    prompt = process.engine.requests[0].prompt_token_ids
    half = len(process.engine.said[turn.turn_id]) // 2
    assert (row.prompt_tokens, row.completion_tokens) == (len(prompt), half)
    assert row.outcome == (UsageOutcome.FAILED if failure else UsageOutcome.CANCELLED)
    assert turn.usage is not None


@pytest.mark.parametrize("owner", ["first", "second"])
async def test_what_a_gateway_delivered_before_it_died_is_billed_once(database: Database, owner: str) -> None:
    """After a kill in the middle of an answer, whoever takes the turn over writes one row for the delivered tokens."""
    process, me = SessionProcess(database), new_principal()
    session = await process.session(me)
    process.will_say(Answer("A long story about a fox", waits=True))
    running = await process.service.start_turn(me, session.session_id, "Tell")
    await process.engine.half_way.wait()
    await process.until_delivered(me, session.session_id)
    await crash()
    assert await rows_of(database, me) == []

    process.clock.advance(LEASE_S + 1)
    successors = [process.restarted(owner), process.restarted("third")]
    for _ in range(2):
        for successor in successors:
            await successor.service.recover()

    (row,) = await rows_of(database, me)
    turn = await running.stored()
    delivered = len(process.engine.said[turn.turn_id]) // 2
    prompt = process.engine.requests[0].prompt_token_ids
    assert (row.request_id, row.key_id, row.session_id) == (turn.turn_id, me.key_id, session.session_id)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (len(prompt), 4, delivered)
    assert (row.model, row.adapter, row.outcome) == ("tiny", None, UsageOutcome.INTERRUPTED)
    assert turn.usage is not None
    assert turn.usage["total_tokens"] == len(prompt) + delivered
    summary = await process.meter.summarise(me.tenant_id, 0.0, 1e12, UsageGroup.KEY)
    assert [(one.requests, one.completion_tokens) for one in summary] == [(1, delivered)]


async def test_a_turn_that_delivered_nothing_costs_nothing(database: Database) -> None:
    """A turn whose gateway died before it stored an event has a row without tokens: its engine may have begun."""
    process, me = SessionProcess(database), new_principal()
    session, turn_id = await process.session(me), TurnId(new_id("turn"))
    await process.service.reader.store.begin(me, session, turn_id, ())

    await process.restarted().service.recover()

    (row,) = await rows_of(database, me)
    assert (row.request_id, row.outcome, row.session_id) == (turn_id, UsageOutcome.INTERRUPTED, session.session_id)
    assert (row.prompt_tokens, row.completion_tokens, row.kv_byte_seconds, row.cost_atoms) == (0, 0, 0, 0)
    turn = await process.service.reader.store.find_turn(me.scope(), turn_id)
    assert turn is not None
    assert (turn.status, turn.usage) == (TurnStatus.FAILED, None)
