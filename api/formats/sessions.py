"""Writes a session's events as server-sent events, and writes pings while there are no events.

Never ends a turn: if the client that reads the stream leaves, the session's running turn continues.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from graftwork.api.http.streaming import PING_AFTER_S, Write, error_event, heartbeats, named_event
from graftwork.platform.errors import GraftworkError
from graftwork.sessions.core.events import SessionEvent

_PING = named_event("ping", {"type": "ping"})


async def write_session_events(
    events: AsyncGenerator[SessionEvent, None], write: Write, ping_after_s: float = PING_AFTER_S
) -> None:
    """Writes all events of the session with `write`. If `events` raises an error, the last event is an `error`.

    After each `ping_after_s` seconds without an event, writes a `ping` event.
    """
    async with heartbeats(write, _PING, ping_after_s) as write_event, aclosing(events):
        try:
            async for event in events:
                await write_event(named_event(event.type.value, event.data(), event.seq))
        except GraftworkError as error:
            await write_event(error_event(error))
