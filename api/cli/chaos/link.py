"""Stands between gateways and one engine, so that a fault can cut their connections or let nothing through.

Owns the port and the connections. Never reads what goes through.
"""

import asyncio
from contextlib import suppress

_PIECE = 1 << 16


class Link:
    """Forwards the connections at a port of its own to a port of the engine."""

    def __init__(self, engine_port: int) -> None:
        self._engine_port = engine_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self.port = 0
        """The port for gateways, after `start`."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._visit, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Ends all connections at once, without a word to either end."""
        for writer in [*self._writers]:
            writer.transport.abort()

    def block(self) -> None:
        """Lets nothing through from now on. Connections stay open, as when a cable is pulled."""
        self._is_open.clear()

    def unblock(self) -> None:
        self._is_open.set()

    async def close(self) -> None:
        self.unblock()
        if self._server is not None:
            self._server.close()
        self.cut()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", self._engine_port)
        except OSError:
            writer.transport.abort()
            return
        both = (writer, engine_writer)
        self._writers.update(both)
        try:
            pumps = [
                asyncio.create_task(self._pump(reader, engine_writer)),
                asyncio.create_task(self._pump(engine_reader, writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except asyncio.CancelledError:
            return  # the run has ended
        finally:
            self._writers.difference_update(both)
            for one in both:
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE):
                await self._is_open.wait()
                writer.write(piece)
                await writer.drain()
