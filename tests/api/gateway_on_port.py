"""The test gateway on a real port of this machine, for clients that bring their own HTTP."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from graftwork.api.server.uvicorn_server import HttpServer, bind, url_of
from tests.api.in_process_gateway import Gateway


@asynccontextmanager
async def gateway_on_port(gateway: Gateway) -> AsyncGenerator[str, None]:
    """Runs a gateway on a free port. Yields its address."""
    ready = asyncio.Event()
    with bind("127.0.0.1", 0) as listening:
        server = HttpServer(gateway.app, ready.set)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        await ready.wait()
        yield url_of(listening)
        server.stop()
        await serving
