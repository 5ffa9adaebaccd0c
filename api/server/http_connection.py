"""Reads HTTP requests from a connection. Extends uvicorn's protocol class for httptools, a parser that is written in C.

Adds limits that httptools and uvicorn lack: on the size of a request's head, on the time that a client takes to send a
request or to read an answer, and on the number of connections from one address. A refused client gets JSON, like all
errors of the server.
Never limits the time that the server itself takes for an answer.
Invariant: a connection whose client does nothing is closed within the times of `ConnectionLimits`.
"""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any, Self, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from graftwork.api.http.client_presence import WATCH_CLIENT
from graftwork.api.http.gathered_writes import GatheredWrites
from graftwork.api.http.repeats import LatestGet
from graftwork.api.http.streaming import WRITE_BODY, Write
from graftwork.platform.keys.wrong_keys import client_network
from graftwork.platform.settings.settings import Settings

MAX_HEAD_BYTES = 64 * 1024
"""The largest head of a request: the request line and all headers, with the trailers of a chunked body."""

_LINGER_S = 1.0
"""How long a refused connection stays open. If it closed at once, unread data would make the client lose the answer."""

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits on one client's connection, and on the connections of one address. Times are in seconds."""

    head_s: float = 20.0
    """The time for a request's head, from its first byte to its last.

    On a new connection, the time starts with the connection.
    """
    body_window_s: float = 30.0
    body_window_bytes: int = 32 * 1024
    """How many bytes of a request's body must arrive in each window of `body_window_s`, except the last window."""
    read_window_s: float = 60.0
    """In each window of this many seconds, a client must read at least one byte of an answer that waits to be sent."""
    per_address: int = 512
    """The most connections of one address; 0 means no limit. This machine's own addresses have no limit."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(per_address=settings.max_connections_per_address)


class HttpConnections:
    """Counts the connections of one server by address. uvicorn calls this object to make each new connection."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._number_by_network: Counter[str] = Counter()

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> "HttpConnection":
        return HttpConnection(config, server_state, app_state, _loop, connections=self)

    def enter(self, address: str) -> bool:
        """Counts a new connection from `address`. Returns False if the address has too many connections.

        For IPv6, all addresses of one /64 network count together.
        """
        network = client_network(address)
        self._number_by_network[network] += 1
        return not 0 < self.limits.per_address < self._number_by_network[network] or ip_address(address).is_loopback

    def leave(self, address: str) -> None:
        network = client_network(address)
        self._number_by_network[network] -= 1
        if not self._number_by_network[network]:
            del self._number_by_network[network]


class HttpConnection(HttpToolsProtocol):
    """One client's connection.

    If the client breaks a limit, the server answers with an error and closes the connection.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        event_loop: asyncio.AbstractEventLoop | None,
        *,
        connections: HttpConnections,
    ) -> None:
        super().__init__(config, server_state, app_state, event_loop)
        self._connections = connections
        self._limits = connections.limits
        self._address: str | None = None
        """The client's address; None if the connection is not by TCP."""
        self._head_bytes = 0
        """The bytes of the finished parts of the head: the URL and whole headers."""
        self._pending_bytes = 0
        """The bytes received since the parser last reported a part of a request. They may be one unfinished header."""
        self._window_bytes = 0
        """The bytes of the body that arrived in the current window."""
        self._reads_body = False
        self._latest_get = LatestGet(b"")
        self._repeated_at = float("-inf")
        """When the connection answered a repeated request, by the loop's clock."""
        self._has_received = False
        self._is_refused = False
        """Whether a refusal was sent. All further data is discarded."""
        self._request_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None
        self._watchers: dict[Callable[[], None], RequestResponseCycle] = {}
        """What must be called when the client leaves, each for the request that it belongs to."""
        self._has_left = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._writes = GatheredWrites(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._writes))
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self._address = peer[0]
            if (connected := transport.get_extra_info("socket")) is not None:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # no token waits for the last one's ACK
        self._wait_for_head()
        if self._address is not None and not self._connections.enter(self._address):
            message = f"Your address holds {self._limits.per_address} connections already: close some, or reuse them."
            self._refuse(429, "too_many_connections", message)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request_timer, self._answer_timer):
            if timer is not None:
                timer.cancel()
        self._request_timer = self._answer_timer = None
        if self._address is not None:
            self._connections.leave(self._address)
        super().connection_lost(exc)
        self._has_left = True
        for leave in [*self._watchers]:
            leave()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._request_timer is None or not self._has_received:  # a new connection waits for its first head already
            if self._has_repeated(data):
                return
            self._latest_get = LatestGet(data)
        if self._request_timer is None:
            self._wait_for_head()
        self._has_received = True
        self._pending_bytes += len(data)
        super().data_received(data)
        if self._pending_bytes > MAX_HEAD_BYTES and not self._is_refused:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            state = self.scope["state"]
            state[WRITE_BODY] = _body_writer(self.cycle, self._writes)
            state[WATCH_CLIENT] = partial(self._watch, self.cycle)
        self._reads_body = True
        self._wait_for_body()

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        self._window_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending_bytes = 0
        self._reads_body = False
        self._stop_waiting()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuses the request and closes the connection. uvicorn calls this if it cannot parse a request."""
        if max(self._head_bytes, self._pending_bytes) > MAX_HEAD_BYTES:
            message = (
                f"The head is larger than {MAX_HEAD_BYTES} bytes: send fewer or shorter headers, or a shorter URL."
            )
            self._refuse(431, "request_header_fields_too_large", message)
        else:
            self._refuse(400, "bad_request", "The server cannot read this as an HTTP/1.1 request.")

    def _has_repeated(self, data: bytes) -> bool:
        """Answers a request that repeats the one before. Returns False if the parser must read it."""
        if (
            self.cycle is None
            or not self.cycle.response_complete
            or not self.cycle.keep_alive
            or self.flow.write_paused
        ):
            return False
        reply = self._latest_get.repeated(data, self.scope["state"])
        if reply is None:
            return False
        self._writes.write_on(reply.encode(self.server_state.default_headers))
        self.server_state.total_requests += 1
        self._repeated_at = self.loop.time()
        return True

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection that has been idle. Waits on if it has repeated an answer meanwhile: a repeat sets no
        timer, which would cost as much as the answer.
        """
        idle_s = self.loop.time() - self._repeated_at
        if idle_s < self.timeout_keep_alive:
            wait_s = self.timeout_keep_alive - idle_s
            self.timeout_keep_alive_task = self.loop.call_later(wait_s, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def _count_head(self, num_bytes: int) -> None:
        """Raises an error if the head is too large. The parser then stops, and uvicorn calls `send_400_response`."""
        self._pending_bytes = 0
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the request's head is too large")

    def _wait_for_head(self) -> None:
        self._request_timer = self.loop.call_later(self._limits.head_s, self._time_out)

    def _wait_for_body(self) -> None:
        self._stop_waiting()
        self._window_bytes = 0
        self._request_timer = self.loop.call_later(self._limits.body_window_s, self._check_body)

    def _check_body(self) -> None:
        if self._window_bytes >= self._limits.body_window_bytes or self.flow.read_paused:
            self._wait_for_body()
        else:
            self._time_out()

    def _stop_waiting(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _time_out(self) -> None:
        """Refuses a request that arrives too slowly. Stray bytes after a request do not end its answer."""
        answers = self.cycle is not None and not self.cycle.response_complete
        if answers and not self._reads_body:
            self._wait_for_head()
        elif self._head_bytes or self._pending_bytes or self._reads_body:
            part = "body" if self._reads_body else "head"
            self._refuse(408, "request_timeout", f"The request's {part} arrived too slowly: send it again.")
        else:
            self.transport.close()

    def _wait_for_reader(self, waiting_bytes: int) -> None:
        self._answer_timer = self.loop.call_later(self._limits.read_window_s, self._check_reader, waiting_bytes)

    def _check_reader(self, waiting_bytes: int) -> None:
        """Drops the connection if its client has taken nothing since `waiting_bytes` were counted."""
        still_waiting_bytes = self.transport.get_write_buffer_size()
        if still_waiting_bytes < waiting_bytes:
            self._wait_for_reader(still_waiting_bytes)
        else:
            self.transport.abort()

    def _watch(self, cycle: RequestResponseCycle, leave: Callable[[], None]) -> Callable[[], Any]:
        """Calls `leave` once the client has left, as `cycle.receive` would say. Returns a function that ends the watch."""
        if self._has_left or cycle.disconnected:
            return self.loop.call_soon(leave).cancel
        self.flow.resume_reading()  # or nobody would notice
        self._watchers[leave] = cycle
        return partial(self._watchers.pop, leave, None)

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Sends an error and closes the connection. If an answer has begun, only closes."""
        self._is_refused = True
        self._stop_waiting()
        cycle = self.cycle
        has_begun = cycle is not None and cycle.response_started and not cycle.response_complete
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # its handler learns that the client is gone, and writes no more
            cycle.message_event.set()
            for leave in [leave for leave, watched in self._watchers.items() if watched is cycle]:
                leave()
        if has_begun:
            self.transport.close()
            return
        self._writes.write_on(_answer(status, code, message))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


def _body_writer(cycle: RequestResponseCycle, writes: GatheredWrites) -> Write:
    """Returns a function that writes a piece of an answer's body, after the answer's head has been sent.

    It sends the same bytes as `cycle.send`, which costs three times as much. So every token of a stream uses it. It
    waits while the client reads too slowly, and drops the piece if the client has left.
    """
    flow = cycle.flow

    async def write(piece: bytes) -> None:
        if flow.write_paused and not cycle.disconnected:
            await flow.drain()
        if not (cycle.chunked_encoding and piece) or cycle.disconnected or cycle.response_complete:
            await cycle.send({"type": "http.response.body", "body": piece, "more_body": True})
            return
        writes.write_on(b"%x\r\n%b\r\n" % (len(piece), piece))

    return write


def _answer(status: int, code: str, message: str) -> bytes:
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    headers: Mapping[bytes, bytes] = {
        b"content-type": b"application/json",
        b"content-length": b"%d" % len(body),
        b"connection": b"close",
    } | ({b"retry-after": b"1"} if status in (408, 429) else {})
    lines = b"".join(b"%s: %s\r\n" % header for header in headers.items())
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (status, _REASONS[status], lines, body)
