"""Server-sent events: their bytes, the response that carries them, and its heartbeats.

A source writes the events of one stream in order, and returns at its end. It owns what they mean.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from graftwork.api.http.middleware import SEND_BODY
from graftwork.platform.errors import GraftworkError

Write = Callable[[bytes], Awaitable[None]]
"""Sends one event, or several; waits while the client reads too slowly."""

DONE = b"data: [DONE]\n\n"
"""How an OpenAI stream says that it ended well."""

PING_AFTER_S = 15.0
"""Silence after which a ping is sent: proxies close what is silent for longer, mostly after 30 to 60 seconds."""

_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_PLACEHOLDER = "\x00text\x00"
"""No header of an answer has a control character in it."""


def data_event(data: Mapping[str, Any]) -> bytes:
    """An unnamed event, as in OpenAI's streams."""
    return b"data: " + _json(data) + b"\n\n"


def named_event(name: str, data: Mapping[str, Any], event_id: int | None = None) -> bytes:
    """An event with a type. Clients send `event_id` back as `Last-Event-ID`."""
    identity = b"" if event_id is None else f"id: {event_id}\n".encode()
    return identity + f"event: {name}\n".encode() + b"data: " + _json(data) + b"\n\n"


def error_event(error: GraftworkError) -> bytes:
    """The last event of a stream that failed after its start. No `[DONE]` follows."""
    return named_event("error", error.body())


class TextEvents:
    """Events that differ in one text alone: the rest is encoded once."""

    def __init__(self, event_of: Callable[[str], bytes]) -> None:
        """`event_of` makes the event of a text, which must stand in it exactly once."""
        self._before, self._after = event_of(_PLACEHOLDER).split(_ENCODER.encode(_PLACEHOLDER).encode())

    def of(self, text: str) -> bytes:
        """The same bytes that `event_of` makes of this text."""
        return self._before + _ENCODER.encode(text).encode() + self._after


class EventStream(StreamingResponse):
    """A response whose events are written by its source."""

    def __init__(
        self,
        source: Callable[[Write], Awaitable[None]],
        *,
        on_end: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`source` returns at the stream's end, and is cancelled when the client leaves.

        `on_end` is called at the end of either kind, even if the source was never called; it must not wait.
        """
        super().__init__((), media_type="text/event-stream", headers={**_HEADERS, **(headers or {})})
        self._source = source
        self._on_end = on_end
        self._send_body: Send | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_body = scope.get("state", {}).get(SEND_BODY, send)
        await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        send_body = self._send_body or send

        async def write(event: bytes) -> None:
            await send_body({"type": "http.response.body", "body": event, "more_body": True})

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._source(write)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if self._on_end is not None:
                self._on_end()


@asynccontextmanager
async def heartbeats(write: Write, ping: bytes, silence_s: float = PING_AFTER_S) -> AsyncGenerator[Write]:
    """`write`, and while the block runs a `ping` after every `silence_s` without an event."""
    now = asyncio.get_running_loop().time
    written_at = now()

    async def write_and_note(event: bytes) -> None:
        nonlocal written_at
        written_at = now()
        await write(event)

    async def beat() -> None:
        while True:
            await asyncio.sleep(written_at + silence_s - now())
            if now() - written_at >= silence_s:
                await write_and_note(ping)

    beating = asyncio.create_task(beat())
    try:
        yield write_and_note
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


def _json(data: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(data).encode()
