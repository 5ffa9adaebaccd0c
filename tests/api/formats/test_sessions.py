"""Tests of a session's events as a stream."""

import asyncio
from collections.abc import AsyncGenerator

from graftwork.api.formats.sessions import write_session_events
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import SessionId, TurnId
from graftwork.sessions.core.events import EventType, SessionEvent

CREATED = SessionEvent(SessionId("ses_1"), TurnId("turn_1"), 1, EventType.TURN_CREATED, {})


class RecordingClient:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.heard = asyncio.Event()

    async def write(self, event: bytes) -> None:
        self.received.append(event)
        self.heard.set()


async def test_ping() -> None:
    """A session's stream sends pings without an id while no event comes."""
    client, release = RecordingClient(), asyncio.Event()

    async def events() -> AsyncGenerator[SessionEvent, None]:
        await release.wait()
        yield CREATED

    writing = asyncio.create_task(write_session_events(events(), client.write, ping_after_s=0.001))
    await client.heard.wait()
    release.set()
    await writing

    assert client.received[0] == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert client.received[-1].startswith(b"id: 1\nevent: turn.created\n")


async def test_failure_to_read_on() -> None:
    """A stream that fails has a last event `error`."""
    client = RecordingClient()

    async def events() -> AsyncGenerator[SessionEvent, None]:
        raise Unavailable("The database is away.")
        yield

    await write_session_events(events(), client.write)

    assert len(client.received) == 1
    assert client.received[0].startswith(b"event: error\n")


async def test_leaving_ends_the_reading() -> None:
    """When a reader leaves a quiet stream, the generator that it reads from is closed."""
    client, ended = RecordingClient(), asyncio.Event()

    async def events() -> AsyncGenerator[SessionEvent, None]:
        try:
            await asyncio.Event().wait()
            yield CREATED
        finally:
            await asyncio.sleep(0)
            ended.set()

    writing = asyncio.create_task(write_session_events(events(), client.write, ping_after_s=0.001))
    await client.heard.wait()
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)

    assert ended.is_set()
