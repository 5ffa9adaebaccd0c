"""A stream that says something while nothing happens: proxies close what is silent for long."""

import asyncio
from collections.abc import AsyncGenerator

from graftwork.api.sse import error_event
from graftwork.platform.errors import GraftworkError

HEARTBEAT_AFTER_S = 15.0
"""Proxies close what is silent for longer, mostly after 30 to 60 seconds."""


async def with_heartbeat(
    frames: AsyncGenerator[bytes, None], heartbeat: bytes, after_s: float = HEARTBEAT_AFTER_S
) -> AsyncGenerator[bytes, None]:
    """The frames, and `heartbeat` after each such silence. A failure to go on is an `error` event, the last one."""
    upcoming: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.create_task(_next(frames))
            done, _ = await asyncio.wait({upcoming}, timeout=after_s)
            if not done:
                yield heartbeat
                continue
            frame, upcoming = upcoming.result(), None
            if frame is None:
                return
            yield frame
    except GraftworkError as error:
        yield error_event(error)
    finally:
        if upcoming is None:
            await frames.aclose()
        else:
            upcoming.cancel()  # which ends the generator that it waits in


async def _next(frames: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(frames, None)
