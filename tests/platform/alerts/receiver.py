"""A receiver of webhooks on a port of this machine, which answers as a test says."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Receiver:
    """What arrived, and what is answered."""

    port: int = 0
    answer: bytes | None = b"HTTP/1.1 204 No Content\r\n\r\n"
    """The whole answer; None never answers."""
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    connections: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Is set by the first body."""

    def headers(self, index: int = -1) -> dict[str, str]:
        lines = self.heads[index].decode().split("\r\n")[1:]
        return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        self.bodies.append(await reader.readexactly(int(self.headers()["content-length"])))
        self.arrived.set()
        if self.answer is None:
            await reader.read()  # until the client gives up
        else:
            writer.write(self.answer)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def receiving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """A receiver on a free port of 127.0.0.1."""
    receiver = Receiver()
    server = await asyncio.start_server(receiver.receive, "127.0.0.1", 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
