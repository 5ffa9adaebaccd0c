"""Runs `graftwork gateway`: only the HTTP server, for an engine that runs elsewhere. Never starts an engine.

bind the port ─► wait for the engine ─► open the resources ─► serve ─► … ─► close all in reverse

Importing this module loads neither FastAPI nor SQLAlchemy. `import_app` does, which takes seconds: `graftwork serve` calls
it while its engine starts.
"""

import asyncio
import errno
import json
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from graftwork.api.deps.background import repeating
from graftwork.api.server.served_model import model_folder
from graftwork.api.server.tls import TlsFiles
from graftwork.api.server.uvicorn_server import HttpServer, SignalWatch, bind, new_event_loop, url_of
from graftwork.engine.core.client import EngineClient
from graftwork.engine.rpc.conversation import TOKEN_REFUSED
from graftwork.platform.data_folder import prepare_data_folder, warn_of_readers
from graftwork.platform.errors import Conflict, InvalidRequest, Unavailable
from graftwork.platform.memory import (
    FreedMemory,
    free_large_blocks_at_once,
    make_full_collections_rare,
    without_collections,
)
from graftwork.platform.settings.settings import Settings
from graftwork.platform.tracing.logs import configure_logging, configure_token_log

if TYPE_CHECKING:
    from graftwork.api.deps.resources import Resources
    from graftwork.api.server.demo_seed import DemoTenant

_POLL_S = 0.5


_TLS_REFRESH_S = 10.0
_MEMORY_S = 10.0


_LEAST_WIDTH = 120


TOKEN_LOG = "token-ids.log"
"""The file of the data folder that has token ids of those tenants and sessions for which the operator has asked."""


_REPORT_EVERY = 20
"""After how many polls the console prints again that it waits for the engine."""


Process = Callable[[Settings, Console, SignalWatch], Awaitable[None]]


def import_app() -> None:
    """Imports all code that serves HTTP. Any thread may call this."""
    with without_collections():
        import graftwork.api.server.app  # noqa: F401


def run_gateway(settings: Settings) -> None:
    """Serves the HTTP API until SIGTERM or SIGINT. Blocks the caller until then.

    Raises a GraftworkError if the gateway cannot start.
    """
    model_folder(settings, with_weights=False)  # fails at once if a setting is missing
    if settings.engine_address is None and settings.fleet == "static":
        raise InvalidRequest(
            "A gateway needs an engine: name it with --engine-address, find those in the database with --fleet leases, or "
            "use `graftwork serve`."
        )
    run_until_signalled(settings, _gateway)


def run_until_signalled(settings: Settings, process: Process) -> None:
    """Runs the async function `process` until it ends.

    If SIGTERM or SIGINT comes before the HTTP server starts, cancels `process` and returns without an error. Later, a
    signal stops the HTTP server (see SignalWatch).
    """
    configure_logging(settings.log_level, form=settings.log_format)
    configure_token_log(settings.data_dir / TOKEN_LOG)
    free_large_blocks_at_once()
    for chatty in ("uvicorn", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    prepare_data_folder(settings.data_dir)
    warn_of_readers(settings.data_dir)

    async def live() -> None:
        await process(settings, _console(), SignalWatch())

    with asyncio.Runner(loop_factory=new_event_loop) as runner, suppress(asyncio.CancelledError):
        runner.run(live())


def _console() -> Console:
    """Returns a console that is wide enough for an API key, so that no key is cut off.

    If the terminal is narrower, it wraps the key, and a user can still copy the key.
    """
    found = Console()
    return Console(width=max(found.width, _LEAST_WIDTH))


async def serve_gateway(
    settings: Settings,
    listening: socket.socket,
    console: Console,
    signals: SignalWatch,
    engine: EngineClient | None = None,
) -> None:
    """Opens the services and serves at the socket `listening`, until the last connection ends.

    The engine must already answer. By default it is the one at the settings' address. This function closes `engine`.
    """
    from graftwork.api.server.app import create_app
    from graftwork.api.server.demo_seed import seed_demo
    from graftwork.api.server.http_connection import ConnectionLimits
    from graftwork.api.server.wiring import open_resources

    async with open_resources(settings, engine=engine) as resources:
        tenants = await seed_demo(resources.admin) if settings.demo else ()
        tls = TlsFiles.of(settings)
        url = url_of(listening, "http" if tls is None else "https")

        def on_ready() -> None:
            show_ready(console, url, resources.inference.base_name, settings)
            if tenants:
                show_demo(console, url, resources.inference.base_name, tenants)

        app = create_app(settings, resources=resources)
        server = HttpServer(app, on_ready, ConnectionLimits.of(settings), tls)
        signals.direct_to(server)
        make_full_collections_rare()
        returned = repeating(partial(asyncio.to_thread, FreedMemory().give_back), _MEMORY_S, "returning freed memory")
        async with _metrics_port(settings, resources, console), _renewed(tls), returned:
            await server.serve(sockets=[listening])


@asynccontextmanager
async def _renewed(tls: TlsFiles | None) -> AsyncGenerator[None]:
    """Reads the TLS certificate again when its files change, until the end of the block."""
    if tls is None:
        yield
        return
    async with repeating(tls.refresh, _TLS_REFRESH_S, "reading the TLS certificate"):
        yield


@asynccontextmanager
async def _metrics_port(settings: Settings, resources: "Resources", console: Console) -> AsyncGenerator[None]:
    """Serves metrics on their own port, if the settings name one, until the end of the block."""
    if settings.metrics_port is None:
        yield
        return
    from graftwork.api.server.app import create_metrics_app

    with bind(settings.metrics_host, settings.metrics_port, "--metrics-port") as listening:
        url = url_of(listening)
        server = HttpServer(
            create_metrics_app(resources), lambda: console.print(f"Metrics are at {url}/metrics", soft_wrap=True)
        )
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield
        finally:
            server.stop()
            await serving


def listen(settings: Settings) -> socket.socket:
    """Binds the settings' address.

    Raises Conflict, or InvalidRequest if the host is no address of this machine or the TLS files cannot be used.
    """
    TlsFiles.of(settings)  # fails at once, and not only when the engine has loaded its weights
    try:
        return bind(settings.host, settings.port)
    except Conflict as error:
        cause = error.__cause__
        if isinstance(cause, socket.gaierror) or (isinstance(cause, OSError) and cause.errno == errno.EADDRNOTAVAIL):
            raise InvalidRequest(
                f"{settings.host} is no address of this machine: choose another --host, such as 127.0.0.1 or 0.0.0.0.",
                param="host",
            ) from cause
        raise Conflict(f"{error.message} GRAFTWORK_PORT=8001 does the same, also for `make serve`.") from cause


async def _gateway(settings: Settings, console: Console, signals: SignalWatch) -> None:
    with listen(settings) as listening:
        import_app()
        await _wait_for_engine(settings, console)
        await serve_gateway(settings, listening, console, signals)


async def _wait_for_engine(settings: Settings, console: Console) -> None:
    """Waits until the engine answers. There is no time limit, because the operator decides how long to wait."""
    from graftwork.api.server.fleets import connect_engine
    from graftwork.platform.database import Database

    database = Database(settings.resolved_database_url, settings.lease_s)
    if settings.fleet == "leases":
        await database.upgrade_to_head()
    probe = connect_engine(settings, database)
    polls = 0
    try:
        while True:
            try:
                await probe.describe()
            except Unavailable as error:
                if error.code == TOKEN_REFUSED:
                    raise InvalidRequest(error.message, param="engine_token") from error
                if polls % _REPORT_EVERY == 0:
                    console.print(f"Waiting for the engine: {error.message}", soft_wrap=True)
                polls += 1
                await asyncio.sleep(_POLL_S)
            else:
                return
    finally:
        await probe.close()
        await database.close()


def show_ready(console: Console, url: str, model: str, settings: Settings) -> None:
    console.print(f"Graftwork serves [bold]{model}[/bold] at [bold]{url}[/bold]", soft_wrap=True)
    if settings.admin_key is None:
        console.print(f"Admin key: {settings.data_dir / 'admin.key'}", soft_wrap=True)


def show_demo(console: Console, url: str, base: str, tenants: "Sequence[DemoTenant]") -> None:
    """Prints the demo tenants with their keys, and a curl command that the user can copy."""
    table = Table(title="Demo tenants")
    for heading in ("Tenant", "Adapter", "Key"):
        table.add_column(heading, no_wrap=True, overflow="ignore")
    for tenant in tenants:
        table.add_row(tenant.name, tenant.adapter or f"(base) {base}", tenant.key)
    console.print(table, soft_wrap=True)
    first = tenants[0]
    body = {
        "model": first.adapter or base,
        "messages": [{"role": "user", "content": "Where is my parcel?"}],
        "max_tokens": 64,
        "temperature": 0,
    }
    console.print("Try it:", soft_wrap=True)
    console.out(f"curl {url}/v1/chat/completions \\")
    console.out(f"  -H 'Authorization: Bearer {first.key}' -H 'Content-Type: application/json' \\")
    console.out(f"  -d '{json.dumps(body)}'", highlight=False)
