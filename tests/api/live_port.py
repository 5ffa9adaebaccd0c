"""A gateway that listens on a real port, for clients that open their own connections."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from graftwork.api.http_server import HttpServer
from graftwork.api.listening_socket import bind, url_of
from tests.api.harness import Gateway


@asynccontextmanager
async def listening(gateway: Gateway) -> AsyncGenerator[str, None]:
    """Yields where."""
    ready = asyncio.Event()
    with bind("127.0.0.1", 0) as socket:
        server = HttpServer(gateway.app, ready.set)
        serving = asyncio.create_task(server.serve(sockets=[socket]))
        await ready.wait()
        yield url_of(socket)
        server.stop()
        await serving
