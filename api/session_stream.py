"""A session's events as server-sent events, with a heartbeat while nothing happens.

Reading them is all this does: a reader who leaves changes nothing about the turn.
"""

import asyncio
from collections.abc import AsyncGenerator

from graftwork.api.sse import error_event, named_event
from graftwork.platform.errors import GraftworkError
from graftwork.sessions.events import SessionEvent

PING_AFTER_S = 15.0
"""Silence after which a ping is sent: proxies close what is silent for longer, mostly after 30 to 60 seconds."""

_PING = named_event("ping", {"type": "ping"})


async def session_events(
    events: AsyncGenerator[SessionEvent, None], ping_after_s: float = PING_AFTER_S
) -> AsyncGenerator[bytes, None]:
    """The stream's bytes. A failure to read on is an `error` event, the last one."""
    upcoming: asyncio.Task[SessionEvent | None] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.create_task(_next(events))
            done, _ = await asyncio.wait({upcoming}, timeout=ping_after_s)
            if not done:
                yield _PING
                continue
            event, upcoming = upcoming.result(), None
            if event is None:
                return
            yield named_event(event.type.value, event.data(), event.seq)
    except GraftworkError as error:
        yield error_event(error)
    finally:
        if upcoming is None:
            await events.aclose()
        else:
            upcoming.cancel()  # which ends the generator that it waits in


async def _next(events: AsyncGenerator[SessionEvent, None]) -> SessionEvent | None:
    return await anext(events, None)
