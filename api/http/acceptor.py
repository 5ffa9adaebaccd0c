"""Accepts the connections of a server, at a pace that leaves its event loop time for the streams that run.

    the system's queue ──► accepted, without a protocol ──► a connection with its protocol

Owns accepted sockets until they have their protocol. Never reads from one.

uvloop's own server accepts one connection in each turn of the loop (seen in uvloop 0.23 with libuv 1.52), and asyncio's
accepts all. With the first, a client that opens and cancels a thousand connections a second fills the system's queue, and
nobody else can connect for minutes. With the second, all of them begin at once, and no stream gets a token meanwhile.
"""

import asyncio
import logging
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE = 256
"""The most connections that are accepted in one turn of the loop: one or two milliseconds of work."""
_MOST_WAITING = 1024
"""The most accepted connections without a protocol. If there are more, the others stay in the system's queue."""
_MOST_BEGUN = 64
"""The most connections that get their protocol in one turn of the loop."""
_FIRST_BEGUN = 8
_LONGEST_TURN_S = 0.004
"""If a turn takes longer while connections wait, the next one begins fewer."""
REST_S = 1.0
"""How long nothing is accepted after the system refused a connection, such as one for which no descriptor is left."""
_CLIENT_LEFT = getattr(select, "POLLRDHUP", 0)
"""What the system says of a connection that its client has closed, also before all was read; 0 where it does not say."""


class Acceptor:
    """Accepts the connections of one listening socket, and gives each its protocol, in their order.

    In each turn of the loop, as many begin as it has time for: one more than in the turn before, or half as many if that
    one was long. A connection whose client has left meanwhile never begins.
    """

    def __init__(
        self, listening: socket.socket, new_connection: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None
    ) -> None:
        """Starts to accept at once. Must be made on the running loop. The caller closes the socket, after `close`."""
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._new_connection = new_connection
        self._tls = tls
        self._waiting: deque[socket.socket] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._most = _FIRST_BEGUN
        self._left_at: float | None = None
        """When the last turn left some that wait; None if none was left."""
        self._next_turn: asyncio.Handle | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._accepts = False
        listening.setblocking(False)
        self._start()

    def close(self) -> None:
        """Accepts nothing more. Gives up connections that have no protocol, or have not agreed on TLS; the others stay open."""
        self._stop()
        for handle in (self._rest, self._next_turn):
            if handle is not None:
                handle.cancel()
        while self._waiting:
            self._waiting.popleft().close()
        if self._tls is not None:
            for task in self._connecting:
                task.cancel()

    async def wait_closed(self) -> None:
        """Waits until each connection that has begun has its protocol."""
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _start(self) -> None:
        self._rest, self._accepts = None, True
        self._loop.add_reader(self._listening, self._accept)

    def _stop(self) -> None:
        self._accepts = False
        self._loop.remove_reader(self._listening)

    def _accept(self) -> None:
        for _ in range(min(_ACCEPTED_AT_ONCE, _MOST_WAITING - len(self._waiting))):
            try:
                connected, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:  # usually, the process has no descriptor left, or the machine no memory
                _log.warning("No connection is accepted for %g s: %s.", REST_S, error.strerror)
                self._stop()
                self._rest = self._loop.call_later(REST_S, self._start)
                break
            self._waiting.append(connected)
        if self._waiting and self._next_turn is None:
            self._begin()
        if len(self._waiting) >= _MOST_WAITING:
            self._stop()

    def _begin(self) -> None:
        """Begins the connections that have waited longest, as many as this turn of the loop has time for."""
        now, begun = self._loop.time(), 0
        if self._left_at is not None:
            is_long = now - self._left_at > _LONGEST_TURN_S
            self._most = max(self._most // 2, 1) if is_long else min(self._most + 1, _MOST_BEGUN)
        while self._waiting and begun < self._most:
            connected = self._waiting.popleft()
            if self._left_at is not None and _has_left(connected):
                connected.close()
                continue
            task = self._loop.create_task(self._connect(connected))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            begun += 1
        self._left_at = now if self._waiting else None
        self._next_turn = self._loop.call_soon(self._begin) if self._waiting else None
        if not self._accepts and self._rest is None and len(self._waiting) < _MOST_WAITING // 2:
            self._start()

    async def _connect(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._new_connection, connected, ssl=self._tls)
        except OSError:  # the client has left, or speaks no TLS
            connected.close()
        except asyncio.CancelledError:
            connected.close()
            raise


def _has_left(connected: socket.socket) -> bool:
    """Returns whether the client has closed the connection."""
    if not _CLIENT_LEFT:
        return False
    poll = select.poll()
    poll.register(connected, _CLIENT_LEFT)
    return bool(poll.poll(0))
