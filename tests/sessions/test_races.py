"""What two verbs on one session may do to one another when they meet in the middle."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from graftwork.sessions.agent_session import SessionStatus, TurnStatus
from tests.sessions.fakes_sessions import Answer, HesitantDatabase, World, principal


@pytest.fixture
async def hesitant(database_url: str) -> AsyncIterator[HesitantDatabase]:
    database = HesitantDatabase(database_url)
    yield database
    await database.close()


async def until_running(world: World, session_id: str) -> None:
    """Return once the session's row says that a turn runs."""
    while (await world.service.get(principal(), session_id)).status is not SessionStatus.RUNNING:
        pass


async def test_turn_that_begins_during_a_recovery_lives(hesitant: HesitantDatabase) -> None:
    """A recovery that looks for what a crash left takes no turn that began after it was called."""
    world, me = World(hesitant), principal()
    session = await world.session(me)
    world.will_say(Answer("A long story", waits=True))
    hesitant.hold_read = may_look = asyncio.Event()
    recovery = asyncio.create_task(world.service.recover())
    await asyncio.sleep(0)
    running = await world.service.start_turn(me, session.session_id, "Tell")

    may_look.set()
    recovered = await recovery
    await world.engine.half_way.wait()
    world.engine.go_on()

    assert recovered == 0
    assert (await running.result()).status is TurnStatus.COMPLETED


@pytest.mark.parametrize("verb", ["cancel", "close_session"])
async def test_cancel_meets_a_turn_that_is_being_launched(hesitant: HesitantDatabase, verb: str) -> None:
    """A turn that its row says runs, but whose task has not begun, is cancelled like any other."""
    world, me = World(hesitant), principal()
    session = await world.session(me)
    world.will_say(Answer("A long story", waits=True))
    hesitant.hold_written = may_start = asyncio.Event()
    starting = asyncio.create_task(world.service.start_turn(me, session.session_id, "Tell"))
    await until_running(world, session.session_id)

    ending = asyncio.create_task(getattr(world.service, verb)(me, session.session_id))
    await asyncio.wait({ending}, timeout=0.2)  # it looks, and finds no task to end
    may_start.set()
    async with asyncio.timeout(20):
        ended = await ending
        turn = await (await starting).result()

    assert turn.status is TurnStatus.CANCELLED
    assert ended.status is (SessionStatus.IDLE if verb == "cancel" else SessionStatus.CLOSED)
