"""A session's events as server-sent events, with a heartbeat while nothing happens.

Reading them is all this does: a reader who leaves changes nothing about the turn.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from graftwork.api.http.sse import PING_AFTER_S, error_event, named_event, with_heartbeats
from graftwork.platform.errors import GraftworkError
from graftwork.sessions.core.events import SessionEvent

_PING = named_event("ping", {"type": "ping"})


async def session_events(
    events: AsyncGenerator[SessionEvent, None], ping_after_s: float = PING_AFTER_S
) -> AsyncGenerator[bytes, None]:
    """The stream's bytes. A failure to read on is an `error` event, the last one."""
    async with aclosing(with_heartbeats(events, ping_after_s)) as beating:
        try:
            async for event in beating:
                yield _PING if event is None else named_event(event.type.value, event.data(), event.seq)
        except GraftworkError as error:
            yield error_event(error)
