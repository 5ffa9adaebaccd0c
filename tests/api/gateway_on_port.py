"""The test gateway on a real port of this machine, for clients that bring their own HTTP."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from graftwork.api.server.http_connection import ConnectionLimits
from graftwork.api.server.tls import TlsFiles
from graftwork.api.server.uvicorn_server import HttpServer, bind, url_of
from tests.api.in_process_gateway import Gateway


@asynccontextmanager
async def gateway_on_port(gateway: Gateway, limits: ConnectionLimits | None = None) -> AsyncGenerator[str, None]:
    """The URL of the gateway, while the block runs."""
    async with running_server(gateway, limits) as (_, url):
        yield url


@asynccontextmanager
async def running_server(
    gateway: Gateway, limits: ConnectionLimits | None = None, tls: TlsFiles | None = None
) -> AsyncGenerator[tuple[HttpServer, str], None]:
    """The gateway's HTTP server and its URL, while the block runs."""
    ready = asyncio.Event()
    with bind("127.0.0.1", 0) as listening:
        server = HttpServer(gateway.app, ready.set, limits, tls)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        await ready.wait()
        yield server, url_of(listening, "http" if tls is None else "https")
        server.stop()
        await serving
