"""Server-sent events as bytes. What the events mean is their senders' business."""

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

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
