"""Runs `graftwork serve`: a gateway, and one engine as its child process.

If the settings have the address of an engine, starts no child. Never serves requests itself: `gateway.py` does.

bind the port ─► lock the data folder ─► start the engine ─► open the resources ─► serve ─► … ─► close all in reverse
"""

import secrets
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from graftwork.api.server.engine_supervisor import EngineChild
from graftwork.api.server.gateway import listen, run_until_signalled, serve_gateway
from graftwork.api.server.served_model import model_folder
from graftwork.api.server.uvicorn_server import SignalWatch
from graftwork.api.server.wiring import connect_engine
from graftwork.engine.model.config import read_model_config
from graftwork.platform.clock import SystemClock
from graftwork.platform.data_folder import locked_data_folder
from graftwork.platform.settings import Settings
from graftwork.sessions.text.model_files import ModelFolder

_MAX_SOCKET_PATH = 100
"""The longest path of a Unix-domain socket that is used, in bytes."""


def serve(settings: Settings) -> None:
    """Serves the HTTP API, and runs the engine, until SIGTERM or SIGINT. Blocks the caller until then.

    Raises a GraftworkError if the server cannot start.
    """
    folder = model_folder(settings)
    read_model_config(folder)  # fails at once if the model cannot be served,
    ModelFolder.load(folder)  # and not only when the engine has loaded its weights
    run_until_signalled(settings, _serve)


async def _serve(settings: Settings, console: Console, signals: SignalWatch) -> None:
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(listen(settings))
        if settings.engine_address is None:
            stack.enter_context(locked_data_folder(settings.data_dir))
            token = settings.engine_token or secrets.token_urlsafe(32)
            settings = replace(settings, engine_address=_private_address(settings, stack), engine_token=token)
            await stack.enter_async_context(_running_engine(settings, console))
        await serve_gateway(settings, listening, console, signals)


@asynccontextmanager
async def _running_engine(settings: Settings, console: Console) -> AsyncGenerator[None, None]:
    """Starts the engine child, waits until it answers, and stops it at the end of the block."""
    child = EngineChild(settings, settings.resolved_engine_address, SystemClock())
    probe = connect_engine(settings)
    console.print(f"Starting the engine with {model_folder(settings)} …", soft_wrap=True)
    try:
        await child.start(probe, lambda waited_s: console.print(f"  … {waited_s:.0f} s"))
        yield
    finally:
        await probe.close()
        await child.stop()


def _private_address(settings: Settings, stack: AsyncExitStack) -> str:
    """Returns the address of a socket in the data folder, or in a temporary folder if the path would be too long."""
    path = settings.data_dir.absolute() / "engine.sock"
    if len(str(path).encode()) > _MAX_SOCKET_PATH:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="graftwork-"))
        path = Path(folder) / "engine.sock"
    return f"unix:{path}"
