"""Runs `graftwork serve`: a gateway, and one engine or several as its child processes.

If the settings have the address of an engine, starts no child. Never serves requests itself: `gateway.py` does.

bind the port ─► lock the data folder ─► start the engine ─► open the resources ─► serve ─► … ─► close all in reverse
                                         └► import the gateway's code meanwhile
"""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from graftwork.api.server.engine_probe import engine_connection
from graftwork.api.server.engine_supervisor import EngineChild
from graftwork.api.server.gateway import import_app, listen, run_until_signalled, serve_gateway
from graftwork.api.server.served_model import model_folder
from graftwork.api.server.uvicorn_server import SignalWatch
from graftwork.engine.model.config import read_model_config
from graftwork.platform.clock import SystemClock
from graftwork.platform.cores import leave_engine_cores
from graftwork.platform.data_folder import locked_data_folder
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings.settings import Settings
from graftwork.sessions.text.model_files import ModelFolder

if TYPE_CHECKING:
    from graftwork.engine.fleet.client import FleetClient

_MAX_SOCKET_PATH = 100
"""The longest path of a Unix-domain socket that is used, in bytes."""


def serve(settings: Settings) -> None:
    """Serves the HTTP API, and runs the engine, until SIGTERM or SIGINT. Blocks the caller until then.

    Raises a GraftworkError if the server cannot start.
    """
    if settings.engine_cores is not None and settings.engine_address is None:
        leave_engine_cores(settings.engine_cores)
    folder = model_folder(settings)
    if not settings.most_replicas:
        raise InvalidRequest(
            "replicas 0 needs max_replicas: with --replicas 0 --max-replicas 1 an engine runs only while there are requests.",
            param="replicas",
        )
    read_model_config(folder)  # fails at once if the model cannot be served,
    ModelFolder.load(folder)  # and not only when the engine has loaded its weights
    run_until_signalled(settings, _serve)


async def _serve(settings: Settings, console: Console, signals: SignalWatch) -> None:
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(listen(settings))
        if settings.engine_address is None:
            stack.enter_context(locked_data_folder(settings.data_dir))
            token = settings.engine_token or secrets.token_urlsafe(32)
            settings = replace(settings, engine_token=token)
            if settings.most_replicas > 1 or settings.replicas == 0:
                fleet = await stack.enter_async_context(_running_fleet(settings, console, stack))
                await serve_gateway(settings, listening, console, signals, fleet)
                return
            settings = replace(settings, engine_address=f"unix:{_private_socket(settings, stack)}")
            await stack.enter_async_context(_running_engine(settings, console))
        await serve_gateway(settings, listening, console, signals)


@asynccontextmanager
async def _running_engine(settings: Settings, console: Console) -> AsyncGenerator[None, None]:
    """Starts the engine child, waits until it answers, and stops it at the end of the block."""
    child = EngineChild(settings, settings.resolved_engine_address, SystemClock())
    probe = engine_connection(settings)(settings.resolved_engine_address)
    console.print(f"Starting the engine with {model_folder(settings)} …", soft_wrap=True)
    try:
        await _import_meanwhile(child.start(probe, lambda waited_s: console.print(f"  … {waited_s:.0f} s")))
        yield
    finally:
        await probe.close()
        await child.stop()


@asynccontextmanager
async def _running_fleet(
    settings: Settings, console: Console, stack: AsyncExitStack
) -> "AsyncGenerator[FleetClient, None]":
    """Starts `settings.replicas` engines, at least one, waits until all answer, and stops them at the end of the block.
    With `settings.max_replicas`, more are started and ended by their load.

    Yields a client of all of them.
    """
    from graftwork.api.server.local_fleet import LocalFleet, local_fleet_client
    from graftwork.api.server.local_scaling import LocalScaling
    from graftwork.engine.fleet.autoscaler import ScalingLimits
    from graftwork.platform.database import Database
    from graftwork.platform.replicas.lease import ReplicaLeases

    database, clock = Database(settings.resolved_database_url, settings.lease_s), SystemClock()
    await database.upgrade_to_head()
    sockets = [_private_socket(settings, stack, f"engine-{number}.sock") for number in range(settings.most_replicas)]
    connect = engine_connection(settings)
    probes = {f"unix:{path}": connect(f"unix:{path}") for path in sockets}
    local = LocalFleet(settings, sockets, ReplicaLeases(database, settings.lease_s), clock)
    fleet = local_fleet_client(local, connect, clock, settings.drain_grace_s)
    number = max(settings.replicas, 1)  # the gateway learns from the first engine what it serves
    console.print(f"Starting {number} engines with {model_folder(settings)} …", soft_wrap=True)
    try:
        started_at = clock.monotonic()
        await _import_meanwhile(local.start(probes, lambda waited_s: console.print(f"  … {waited_s:.0f} s"), number))
        await fleet.describe()
        limits = ScalingLimits(
            settings.replicas,
            settings.most_replicas,
            first_token_s=settings.scale_first_token_s,
            down_after_s=settings.scale_down_after_s,
        )
        scaling = LocalScaling(local, fleet, limits, clock)
        if fleet.demand is not None:
            fleet.demand.note_start(clock.monotonic() - started_at)
        async with local.leased(fleet, settings.lease_s), scaling.running():
            yield fleet
    finally:
        await fleet.close()
        await asyncio.gather(*(probe.close() for probe in probes.values()))
        await local.stop()
        await database.close()


async def _import_meanwhile(starting: Coroutine[Any, Any, None]) -> None:
    """Waits for engines that start, and imports the gateway's code on another thread: each takes seconds.

    Raises the error of the import or of the engines.
    """
    engines = asyncio.create_task(starting)
    try:
        await asyncio.to_thread(import_app)
        await engines
    finally:
        engines.cancel()


def _private_socket(settings: Settings, stack: AsyncExitStack, name: str = "engine.sock") -> Path:
    """Returns the path of a socket in the data folder, or in a temporary folder if the path would be too long."""
    path = settings.data_dir.absolute() / name
    if len(str(path).encode()) <= _MAX_SOCKET_PATH:
        return path
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graftwork-"))) / name
