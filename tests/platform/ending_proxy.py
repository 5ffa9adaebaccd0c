"""A proxy before PostgreSQL that tells clients the end of their connections at any point."""

import asyncio
from contextlib import suppress

from sqlalchemy import make_url

READY = b"Z\0\0\0\5I"
LAST_WORDS = b"SFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
LAST_MESSAGE = b"E" + (len(LAST_WORDS) + 4).to_bytes(4) + LAST_WORDS
"""What PostgreSQL sends when it waits for a statement, and when it is told to end a connection that waits."""


class EndingProxy:
    """Passes bytes between clients and PostgreSQL. Tells each client the end of its connection after it has been ready for
    so many statements, but does not end it."""

    def __init__(self) -> None:
        self.most_ready = 0
        """0 for never."""
        self.num_told = 0
        self.num_ready = 0
        self._clients = set[asyncio.Task[None] | None]()

    async def start(self, database_url: str) -> str:
        """Listens, and returns the address of the same database through this proxy."""
        url = make_url(database_url)
        self._behind = (url.host or "127.0.0.1", url.port or 5432)
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(*self._behind)
        self._clients.add(asyncio.current_task())
        answers = asyncio.create_task(self._answer(from_server, writer))
        with suppress(ConnectionResetError):
            while piece := await reader.read(65536):
                to_server.write(piece)
        to_server.close()
        await answers

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_ready = 0
        while piece := await reader.read(65536):
            num_ready += piece.endswith(READY)
            self.num_ready += piece.endswith(READY)
            if num_ready == self.most_ready and piece.endswith(READY):
                self.num_told += 1
                piece += LAST_MESSAGE
            writer.write(piece)
        writer.close()

    async def close(self) -> None:
        """Waits until all clients have closed their connections."""
        self._server.close()
        await asyncio.wait([client for client in self._clients if client])
