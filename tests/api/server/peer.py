"""A client of a connection without a network, in time that passes only when a test says so."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from graftwork.api.server.http_connection import HttpConnections


async def let_others_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Timer:
    """What `call_later` returns."""

    def __init__(self, at: float, callback: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.at = at
        self.callback = callback
        self.arguments = arguments
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class ManualLoop:
    """The part of an event loop that connections use, with time that passes only on `advance`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[Timer] = []

    def call_later(self, delay_s: float, callback: Callable[..., object], *arguments: object) -> Timer:
        timer = Timer(self._now + delay_s, callback, arguments)
        self._timers.append(timer)
        return timer

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> asyncio.Handle:
        return asyncio.get_running_loop().call_soon(callback, *arguments)

    def create_task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return asyncio.create_task(work)

    def advance(self, seconds: float) -> None:
        """Runs everything that is due within these seconds, in order of time."""
        end = self._now + seconds
        while due := [timer for timer in self._timers if timer.at <= end and not timer.is_cancelled]:
            timer = min(due, key=lambda one: one.at)
            self._timers.remove(timer)
            self._now = max(self._now, timer.at)
            timer.callback(*timer.arguments)
        self._now = end


class Peer(asyncio.Transport):
    """A client from 192.0.2.1, and the server's connection to it. `app` answers; without one, no handler ever does."""

    def __init__(self, connections: HttpConnections, app: ASGIApp | None = None) -> None:
        super().__init__({"peername": ("192.0.2.1", 1), "sockname": ("192.0.2.9", 80)})
        self.time = ManualLoop()
        self.is_reading_paused = self.is_aborted = self._is_closing = False
        self.waiting_bytes = 0
        self.received = b""
        self.closed = asyncio.Event()
        config = Config(app or _never_answer, log_config=None, interface="asgi3", proxy_headers=False)
        config.load()
        self.connection = connections(config, ServerState(), {}, cast(asyncio.AbstractEventLoop, self.time))
        self.connection.connection_made(self)

    @property
    def status(self) -> int | None:
        """The status of the server's answer; None if it has not answered."""
        return int(self.received.split()[1]) if self.received else None

    @property
    def code(self) -> str:
        return str(json.loads(self.received.partition(b"\r\n\r\n")[2])["error"]["code"])

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.received += data

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        self.closed.set()

    def abort(self) -> None:
        self.is_aborted = True
        self.connection.connection_lost(None)

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes


async def _never_answer(scope: object, receive: object, send: object) -> None:
    await asyncio.Event().wait()
