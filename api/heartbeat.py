"""Noticing silence in a stream, so that its sender can say that it is still there."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

Event = TypeVar("Event")

PING_AFTER_S = 15.0
"""Silence after which a ping is sent: proxies close what is silent for longer, mostly after 30 to 60 seconds."""


async def with_heartbeats(
    events: AsyncGenerator[Event, None], silence_s: float = PING_AFTER_S
) -> AsyncGenerator[Event | None, None]:
    """The events as they come, and None for every `silence_s` without one. Closing this closes `events`."""
    upcoming: asyncio.Task[tuple[Event, ...]] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.create_task(_next(events))
            done, _ = await asyncio.wait({upcoming}, timeout=silence_s)
            if not done:
                yield None
                continue
            found, upcoming = upcoming.result(), None
            if not found:
                return
            yield found[0]
    finally:
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)
        await events.aclose()  # an event that came just now has left it open


async def _next(events: AsyncGenerator[Event, None]) -> tuple[Event, ...]:
    """The next event alone, or nothing at the end."""
    try:
        return (await anext(events),)
    except StopAsyncIteration:
        return ()
