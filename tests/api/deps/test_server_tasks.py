"""Work that belongs to the server, and streams that are kept alive."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from graftwork.api.deps.background import ServerTasks
from graftwork.api.formats.sessions import session_events
from graftwork.platform.errors import CapacityAbsent
from graftwork.platform.ids import SessionId, TurnId
from graftwork.sessions.core.events import EventType, SessionEvent


async def test_close_waits() -> None:
    """Closing waits for what runs."""
    tasks, release, done = ServerTasks(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await release.wait()
        done.set()

    tasks.start(work(), "work")
    closing = asyncio.create_task(tasks.close())
    release.set()
    await closing

    assert done.is_set()


async def test_close_ends_what_is_late() -> None:
    """What outlasts the patience is cancelled, and its clean-up awaited."""
    tasks, cleaned = ServerTasks(patience_s=0.01), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    tasks.start(work(), "work")
    await tasks.close()

    assert cleaned.is_set()


async def test_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A failure that nobody awaits is logged with its task's name."""
    tasks = ServerTasks()

    async def work() -> None:
        raise ZeroDivisionError

    tasks.start(work(), "the work")
    await tasks.close()

    assert "the work" in caplog.text


async def test_ping() -> None:
    """While nothing happens a session's stream is kept alive by pings, which have no id."""
    release = asyncio.Event()

    async def events() -> AsyncGenerator[SessionEvent, None]:
        await release.wait()
        yield SessionEvent(SessionId("ses_1"), TurnId("turn_1"), 1, EventType.TURN_CREATED, {})

    stream = session_events(events(), ping_after_s=0.001)
    first = await anext(stream)
    release.set()
    rest = [frame async for frame in stream]

    assert first == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert rest[-1].startswith(b"id: 1\nevent: turn.created\n")


async def test_failure_to_read_on() -> None:
    """A stream that cannot go on says so in its last event."""

    async def events() -> AsyncGenerator[SessionEvent, None]:
        raise CapacityAbsent("The database is away.")
        yield

    frames = [frame async for frame in session_events(events())]

    assert len(frames) == 1
    assert frames[0].startswith(b"event: error\n")


async def test_leaving_ends_the_reading() -> None:
    """A reader who leaves while nothing happens ends the generator that is read from."""
    ended = asyncio.Event()

    async def events() -> AsyncGenerator[SessionEvent, None]:
        try:
            await asyncio.Event().wait()
            yield SessionEvent(SessionId("ses_1"), TurnId("turn_1"), 1, EventType.TURN_CREATED, {})
        finally:
            ended.set()

    stream = session_events(events(), ping_after_s=0.001)
    await anext(stream)
    await stream.aclose()

    await asyncio.wait_for(ended.wait(), 5)
