"""Runs `serve --demo` as a child process on a free port, and stops and restarts this process.

Owns the child process. Never deletes the data folder, which the caller owns. The child's output goes to `server.log` in
that folder.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx

START_WITHIN_S = 120.0
STOP_WITHIN_S = 30.0
_POLL_S = 0.1
_LOG_FILE = "server.log"
_KEYS_FILE = "demo-keys.json"


class ServerFailed(Exception):
    """Raised if the demo's server does not start. The message ends with the last lines of the server's output."""


class DemoServer:
    """Starts and stops the demo's server. After `stop`, `start` can start the server again at the same address."""

    def __init__(self, data_dir: Path, port: int | None = None, settings: Mapping[str, str] | None = None) -> None:
        """`settings` are settings of the server by name, in lower case."""
        self._data_dir = data_dir
        self._settings = {f"GRAFTWORK_{name.upper()}": value for name, value in (settings or {}).items()}
        self._port = port or free_port()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def process_id(self) -> int | None:
        """The id of the server's first process; None before the first start."""
        return None if self._process is None else self._process.pid

    def keys(self) -> dict[str, str]:
        """Returns the API key of each demo tenant, by the tenant's name."""
        keys: dict[str, str] = json.loads((self._data_dir / _KEYS_FILE).read_text(encoding="utf-8"))
        return keys

    def admin_key(self) -> str:
        return (self._data_dir / "admin.key").read_text(encoding="utf-8").strip()

    async def start(self) -> None:
        """Starts the server and waits until it is ready. Raises ServerFailed if it ends, or is not ready in time."""
        arguments = ["serve", "--demo", "--port", str(self._port), "--data-dir", str(self._data_dir)]
        with (self._data_dir / _LOG_FILE).open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "graftwork.api.cli.main", *arguments),
                stdout=log,
                stderr=log,
                env=_plain_environment() | self._settings,
                start_new_session=True,  # Ctrl-C stops this process, which then stops the server
            )
        try:
            await asyncio.wait_for(self._until_ready(self._process), START_WITHIN_S)
        except TimeoutError:
            raise ServerFailed(
                f"The server was not ready after {START_WITHIN_S:.0f} s.\n{self._last_words()}"
            ) from None

    async def stop(self) -> None:
        """Stops the server by SIGTERM, and by SIGKILL if it still runs after STOP_WITHIN_S.

        Does nothing if no server runs.
        """
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_WITHIN_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as http:
            while process.returncode is None:
                with suppress(httpx.TransportError):
                    if (await http.get("/readyz")).is_success:
                        return
                await asyncio.sleep(_POLL_S)
        raise ServerFailed(f"The server ended with status {process.returncode}.\n{self._last_words()}")

    def _last_words(self) -> str:
        lines = (self._data_dir / _LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-15:])


def free_port() -> int:
    """Returns a port of this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _plain_environment() -> dict[str, str]:
    """Returns this process's environment without GRAFTWORK_*, so that the demo never uses a real server's database.

    Sets one thread for torch, unless the environment sets another number (see the Makefile).
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRAFTWORK_")}
    return {"OMP_NUM_THREADS": "1"} | kept
