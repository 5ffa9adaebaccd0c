"""A session's events as server-sent events, with a heartbeat while nothing happens.

Reading them is all this does: a reader who leaves changes nothing about the turn.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from graftwork.api.heartbeat import HEARTBEAT_AFTER_S, with_heartbeat
from graftwork.api.sse import named_event
from graftwork.sessions.events import SessionEvent

_PING = named_event("ping", {"type": "ping"})


async def session_events(
    events: AsyncGenerator[SessionEvent, None], ping_after_s: float = HEARTBEAT_AFTER_S
) -> AsyncGenerator[bytes, None]:
    """The stream's bytes. A failure to read on is an `error` event, the last one."""
    async with aclosing(with_heartbeat(_frames(events), _PING, ping_after_s)) as frames:
        async for frame in frames:
            yield frame


async def _frames(events: AsyncGenerator[SessionEvent, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield named_event(event.type.value, event.data(), event.seq)
