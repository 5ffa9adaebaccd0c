"""Streams server-sent events to clients.

Owns the encoding of events, the pings while there are no events, and what happens when a client disconnects.
The caller passes a function that writes the events of one stream in order, and returns when the stream ends.
`write_session_events` is such a function for sessions. It never ends a turn: if the client that reads the stream
leaves, the session's running turn continues.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from json.encoder import encode_basestring
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from graftwork.api.http.client_presence import while_connected
from graftwork.platform.errors import GraftworkError
from graftwork.platform.tracing.request_trace import RequestTrace
from graftwork.sessions.core.events import SessionEvent

Result = TypeVar("Result")


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result], abandon: Callable[[], None]) -> Result:
    """Waits for `work` and returns its result. If `work` fails or the client leaves first, calls `abandon`.

    Raises the error of `work`. Raises ClientDisconnect if the client leaves first.
    The caller must have read the request's body to its end.
    """
    try:
        with while_connected(request.scope, request.receive):
            return await work
    except BaseException:
        abandon()
        raise


async def json_answer(build: Callable[[], Any], headers: Mapping[str, str], *, is_long: bool) -> JSONResponse:
    """Returns the answer with the body that `build` returns. Builds and encodes a long body on another thread."""

    def respond() -> JSONResponse:
        return JSONResponse(build(), headers=headers)

    return await asyncio.to_thread(respond) if is_long else respond()


Write = Callable[[bytes], Awaitable[None]]
"""A function that sends one or more encoded events. It waits if the client reads too slowly."""

Source = Callable[[Write], Awaitable[bytes | None]]
"""A function that writes the events of one stream, and returns when the stream ends. It may return the last event instead of
writing it, so that the event and the end of the body are sent together.
"""


TRACE = "trace"
"""The key in a request's state for its RequestTrace."""


WRITE_BODY = "write_body"
"""The key in a request's state for the connection's own `Write`. A server that has one puts it there.

Every layer between the route and the connection looks only at the beginning of a response. So the pieces of a stream
go directly to the connection.
"""


DONE = b"data: [DONE]\n\n"
"""The end of an OpenAI stream that had no error."""


PING_AFTER_S = 15.0
"""The seconds of silence after which the server sends a ping.

Many proxies close a connection that is silent for 30 to 60 seconds.
"""


_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


_PLACEHOLDER = "\x00text\x00"
"""A text that `TextEvents` puts into an event to find the place of the real text.

No other field has a control character.
"""


def data_event(data: Mapping[str, Any]) -> bytes:
    """Encodes a server-sent event that has no name, as in OpenAI's streams."""
    return b"data: " + _json(data) + b"\n\n"


def named_event(name: str, data: Mapping[str, Any], event_id: int | None = None) -> bytes:
    """Encodes a server-sent event that has a name.

    After the connection breaks, clients send the last `event_id` back as `Last-Event-ID`.
    """
    identity = b"" if event_id is None else f"id: {event_id}\n".encode()
    return identity + f"event: {name}\n".encode() + b"data: " + _json(data) + b"\n\n"


def error_event(error: GraftworkError) -> bytes:
    """Encodes the last event of a stream that failed after its start. No `[DONE]` follows this event."""
    return named_event("error", error.body())


class TextEvents:
    """Encodes many events that differ only in one piece of text. Encodes all other fields of the events only once."""

    def __init__(self, event_of: Callable[[str], bytes]) -> None:
        """`event_of` encodes the event for a text. The event must contain the text exactly once."""
        self._before, self._after = event_of(_PLACEHOLDER).decode().split(encode_basestring(_PLACEHOLDER))

    def of(self, text: str) -> bytes:
        """Returns the encoded event that contains `text`. These are the same bytes that `event_of(text)` returns."""
        return (self._before + encode_basestring(text) + self._after).encode()


class EventStream(StreamingResponse):
    """A response that streams server-sent events."""

    def __init__(
        self,
        source: Source,
        *,
        on_end: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
        as_generated: bool = False,
    ) -> None:
        """If the client leaves, `source` is cancelled.

        `on_end` is called in both cases, even if `source` never started. `on_end` must not block. `as_generated`: the
        reader of the request's generations writes their events itself, so these time the writes of a traced request.
        """
        super().__init__((), media_type="text/event-stream", headers={**_HEADERS, **(headers or {})})
        self._source = source
        self._on_end = on_end
        self._as_generated = as_generated
        self._write: Write | None = None
        self._trace: RequestTrace | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream. Does without the group of tasks in which Starlette would watch the client."""
        state = scope.get("state", {})
        self._write, self._trace = state.get(WRITE_BODY), state.get(TRACE)
        with suppress(ClientDisconnect), while_connected(scope, receive):
            await self.stream_response(send)

    async def stream_response(self, send: Send) -> None:
        async def send_event(event: bytes) -> None:
            await send({"type": "http.response.body", "body": event, "more_body": True})

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = await self._source(self._timed(self._write or send_event))
            await send({"type": "http.response.body", "body": last or b"", "more_body": False})
        finally:
            if self._on_end is not None:
                self._on_end()

    def _timed(self, write: Write) -> Write:
        if self._trace is None:
            return write
        self._trace.is_written_as_generated = self._as_generated
        return write if self._as_generated else timed_write(self._trace, write)


_MEASURED_EVERY = 16


def timed_write(trace: RequestTrace, write: Write) -> Write:
    """Returns `write`, or the same with the time of every sixteenth call measured if the request is traced."""
    if not trace.is_traced:
        return write
    timer, now = trace.writes, trace.now

    async def measured(event: bytes) -> None:
        began_at = now()
        await write(event)
        timer.add(now() - began_at)

    def counted(event: bytes) -> Awaitable[None]:
        timer.calls += 1
        return measured(event) if timer.calls % _MEASURED_EVERY == 1 else write(event)

    return counted


@asynccontextmanager
async def heartbeats(write: Write, ping: bytes, silence_s: float = PING_AFTER_S) -> AsyncGenerator[Write]:
    """Yields a function that writes events, and pings the client while the `async with` block runs.

    Writes the bytes `ping` after each `silence_s` seconds without an event.
    """
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
