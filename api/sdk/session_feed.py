"""Reads a session's events from the server, and reconnects when the connection breaks. Never starts a turn by itself.

The server numbers the events. After a break, the client asks for the events after the last number that it read. If the
connection breaks before the first event, the client sends the first request again, and the server answers with the same
turn.
Invariant: each event is emitted once, in order.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from graftwork.api.sdk.transport.effects import Call, Connection, Emit, Opened, ReadStream, Sleep, Steps
from graftwork.api.sdk.transport.errors import APIConnectionError, error_from_description
from graftwork.api.sdk.transport.retries import RetryPolicy, open_stream, with_key
from graftwork.api.sdk.transport.sse import Frame, FrameParser
from graftwork.platform.answers.session_events import TERMINAL_EVENTS, SessionEvent, read_session_event


@dataclass(slots=True)
class SessionFeed:
    """Reads the events of one session, and emits them to the stream that the caller reads."""

    events_path: str
    policy: RetryPolicy
    connection: Connection
    last_seq: int | None
    """The number of the last event that was emitted. It is None if no number is known; the first event then sets it."""
    ends_with_turn: bool
    """If true, the events end with the turn's last event. A connection that ends earlier counts as broken."""
    observe: Callable[[SessionEvent], None]
    """A function that is called with each event, just before the event is emitted."""

    def read(self, opening: Call) -> Steps[None]:
        """Sends the request `opening`, and emits the events of the server's answer.

        If the connection breaks, reconnects and emits the missing events.
        """
        opening, first = with_key(opening), self.last_seq
        response = yield from open_stream(opening, self.connection, self.policy)
        yield Opened()
        if not _holds_events(response):
            return
        futile = 0
        while True:
            seen = self.last_seq
            dropped: APIConnectionError | None = None
            try:
                if (yield from self._read_connection()):
                    return
            except APIConnectionError as error:
                dropped = error
            futile = 0 if self.last_seq != seen else futile + 1
            if futile > self.policy.max_retries:
                raise dropped or self._broken_off()
            yield Sleep(self.policy.backoff(futile))
            again = opening if self.last_seq is None or self.last_seq == first else self.replay_call(self.last_seq)
            yield from open_stream(again, self.connection, self.policy)

    def replay_call(self, after: int) -> Call:
        call = Call("GET", self.events_path, query={"after": after})
        return call.with_headers(last_event_id=str(after))

    def _read_connection(self) -> Steps[bool]:
        """Emits events until the connection ends. Returns True if no more events can follow."""
        parser = FrameParser()
        while (chunk := (yield ReadStream(self.connection))) is not None:
            for frame in parser.feed(chunk):
                event = self._accept(frame)
                if event is None:
                    continue
                self.observe(event)
                yield Emit(event)
                if self.ends_with_turn and isinstance(event, TERMINAL_EVENTS):
                    return True
        return not self.ends_with_turn

    def _accept(self, frame: Frame) -> SessionEvent | None:
        """Converts a frame to its event. Returns None for a ping, and for an event that the feed has already emitted.

        Raises APIError for an `error` event.
        """
        if frame.event == "ping" or frame.data == "[DONE]":
            return None
        body = json.loads(frame.data)
        if frame.event == "error":
            raise error_from_description(body.get("error", body), None)
        event = read_session_event(body)
        if self.last_seq is not None and event.seq <= self.last_seq:
            return None
        self.last_seq = event.seq
        return event

    def _broken_off(self) -> APIConnectionError:
        return APIConnectionError(
            "The stream broke off before the turn's end; read on with session.events(after=…).", code="dropped"
        )


def _holds_events(response: httpx.Response) -> bool:
    """Returns whether the answer is a stream.

    If tool calls still need outputs, the server answers with plain JSON instead.
    """
    return str(response.headers.get("content-type")).startswith("text/event-stream")
