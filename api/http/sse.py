"""Server-sent events as bytes. What the events mean is their senders' business."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Send

from graftwork.platform.errors import GraftworkError

DONE = b"data: [DONE]\n\n"
"""How an OpenAI stream says that it ended well."""


_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


def data_event(data: Mapping[str, Any]) -> bytes:
    """An unnamed event, as in OpenAI's streams."""
    return b"data: " + _json(data) + b"\n\n"


def named_event(name: str, data: Mapping[str, Any], event_id: int | None = None) -> bytes:
    """`id:` is what a client sends back as `Last-Event-ID`; an event without one is never replayed."""
    identity = b"" if event_id is None else f"id: {event_id}\n".encode()
    return identity + f"event: {name}\n".encode() + b"data: " + _json(data) + b"\n\n"


def error_event(error: GraftworkError) -> bytes:
    """The last event of a stream that failed after it had begun; no `[DONE]` follows."""
    return named_event("error", error.body())


class EventStream(StreamingResponse):
    """A response of events that tells its source, whatever happens to the connection, that it has ended."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_end: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`on_end` must not wait."""
        super().__init__(events, media_type="text/event-stream", headers={**_HEADERS, **(headers or {})})
        self._events = events
        self._on_end = on_end

    async def stream_response(self, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await super().stream_response(send)
        finally:
            if self._on_end is not None:  # a generator that was never begun has no `finally` of its own
                self._on_end()


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


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
