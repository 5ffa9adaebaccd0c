"""Runs the application in uvicorn on uvloop, with four changes to uvicorn. Never starts or stops an engine.

The server calls a function when it is ready, wakes once a second and not ten times while it is idle, accepts its
connections by an `Acceptor`, and `SignalWatch` handles the signals instead of uvicorn.
After it has stopped, uvicorn alone would raise a captured SIGTERM again. The process would then end before it has
stopped its engine.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import uvicorn

from graftwork.api.http.acceptor import Acceptor
from graftwork.api.server.tls import TlsFiles
from graftwork.platform.errors import Conflict

if TYPE_CHECKING:  # `serve` starts its engine before it imports the code of the gateway (see gateway.py)
    from fastapi import FastAPI

    from graftwork.api.server.http_connection import ConnectionLimits

try:
    import uvloop
except ImportError:
    uvloop = None  # type: ignore[assignment]

_DRAIN_S = 10
"""How many seconds running answers may take after the first SIGTERM or SIGINT."""


_KEEP_ALIVE_S = 75
TICK_S = 1.0
"""Seconds between two ticks of the server's loop, each of which renews the `date` header."""
_TICKS_PER_DATE = 10
"""The calls of uvicorn's `on_tick` between two new `date` headers."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop for a gateway: uvloop's, or asyncio's own where uvloop is not installed, as on Windows."""
    return asyncio.new_event_loop() if uvloop is None else uvloop.new_event_loop()


class HttpServer(uvicorn.Server):
    """Serves the application over HTTP until `stop` is called.

    The first call of `stop` lets running answers end, and the second call drops them.
    """

    def __init__(
        self,
        app: "FastAPI",
        on_ready: Callable[[], None],
        limits: "ConnectionLimits | None" = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """Calls `on_ready` when the server accepts connections. With `tls`, the server speaks HTTPS only."""
        from graftwork.api.server.http_connection import ConnectionLimits, HttpConnections

        config = uvicorn.Config(
            app,
            http=HttpConnections(limits or ConnectionLimits()),  # type: ignore[arg-type]  # a factory of connections
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_DRAIN_S,
        )
        if tls is not None:
            config.load()
            config.ssl = tls.context
        super().__init__(config)
        self._on_ready = on_ready
        self._app = app
        self._stopping = asyncio.Event()
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets, "this server is given sockets that listen already"
        await super().startup([])
        self._acceptors = [Acceptor(one, self._new_connection, self.config.ssl) for one in sockets]
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for one in self._acceptors:
            one.close()
            await one.wait_closed()
        await super().shutdown(sockets)

    def _new_connection(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def main_loop(self) -> None:
        """Ticks once a second, and ends when `stop` was called. uvicorn looks ten times a second whether to end."""
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += _TICKS_PER_DATE
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stopping.wait()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._stopping.set()
        from graftwork.api.deps.resources import Resources

        resources = getattr(self._app.state, "resources", None)
        if isinstance(resources, Resources):
            resources.overview.end_streams()  # they would go on for ever


class SignalWatch:
    """Handles SIGTERM and SIGINT: stops the server, or cancels the start if no server runs yet."""

    def __init__(self) -> None:
        self._main = asyncio.current_task()
        self._server: HttpServer | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)

    def direct_to(self, server: HttpServer) -> None:
        """Makes SIGTERM and SIGINT stop `server` from now on."""
        self._server = server

    def _stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        elif self._main is not None:
            self._main.cancel()


_BACKLOG = 2048


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Returns a socket that listens at the address. If `port` is 0, the system chooses a free port.

    Raises Conflict if the address is not available. The error tells the user to choose another `flag`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise Conflict(f"{host}:{port} cannot be listened on ({error.strerror}): choose another {flag}.") from error


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    """Returns the URL of a listening socket.

    If the socket listens on every address, the URL has this machine's own address.
    """
    host, port = bound.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{shown}:{port}"
