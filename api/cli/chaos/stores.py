"""Runs a PostgreSQL and a Redis for one fleet alone, so that faults can strike them, and reads the fleet's database.

Owns their processes. Never touches the servers of this machine: each has a port and a folder of its own.
"""

import asyncio
import contextlib
import os
import pwd
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftwork.api.cli.chaos.fleet import READY_WITHIN_S, Process
from graftwork.api.cli.demo.server import ServerFailed, free_port

_POLL_S = 0.2
_REDIS = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir")
_PACKAGED = Path("/usr/lib/postgresql")
"""Where Debian and its descendants put the programs of PostgreSQL, one folder for each version."""


@dataclass
class Stores:
    """The database and the Redis of a fleet. Without servers, the database is a SQLite file and there is no Redis."""

    database_url: str
    redis_url: str | None = None
    postgres: Process | None = None
    redis: Process | None = None

    @property
    def options(self) -> list[str]:
        """The options of gateways. Engines need only the database's."""
        return [*self.database_options, *(["--redis-url", self.redis_url] if self.redis_url else [])]

    @property
    def database_options(self) -> list[str]:
        return ["--database-url", self.database_url]

    @property
    def processes(self) -> list[Process]:
        return [one for one in (self.postgres, self.redis) if one is not None]

    async def start(self) -> None:
        """Starts the servers, and returns once they answer. Raises ServerFailed."""
        for process in self.processes:
            process.start()
        await self.answer()

    async def answer(self) -> None:
        """Returns once both answer; starts a server again that has ended. Raises ServerFailed."""
        if self.postgres is not None:
            await _until(self.postgres, lambda: self.query("SELECT 1"))
        if self.redis is not None:
            port = int(self.redis.command[self.redis.command.index("--port") + 1])
            await _until(self.redis, lambda: _ping_redis(port))

    async def query(self, statement: str, *arguments: object) -> Sequence[Mapping[str, Any]]:
        """Runs one statement in the fleet's database."""
        if self.postgres is None:
            path = self.database_url.removeprefix("sqlite+aiosqlite:///")
            with contextlib.closing(sqlite3.connect(path, timeout=30)) as database:
                database.row_factory = sqlite3.Row
                return [dict(row) for row in database.execute(statement, arguments)]
        import asyncpg

        connection = await asyncpg.connect(self.database_url, timeout=10)
        try:
            rows: Sequence[Mapping[str, Any]] = await connection.fetch(statement, *arguments)
            return rows
        finally:
            await connection.close()


def sqlite_store(folder: Path) -> Stores:
    """Returns a store without servers."""
    return Stores(f"sqlite+aiosqlite:///{folder / 'fleet.db'}")


def server_stores(folder: Path) -> Stores | None:
    """Makes an empty PostgreSQL cluster and returns it with a Redis, both not started. None if this machine lacks one of
    the programs.
    """
    programs, redis = postgres_programs(), shutil.which("redis-server")
    if programs is None or redis is None:
        return None
    user = _postgres_user()
    home, port, redis_port = folder / "postgres", free_port(), free_port()
    home.mkdir()
    if user is not None:
        folder.chmod(0o711)
        shutil.chown(home, user)
    made = subprocess.run(
        [programs / "initdb", "-D", home, "-A", "trust", "-U", "postgres", "--no-locale", "-E", "UTF8"],
        user=user,
        check=False,
        capture_output=True,
        text=True,
        cwd=home,
    )
    if made.returncode:
        raise ServerFailed(f"initdb failed:\n{made.stderr}")
    settings = {"listen_addresses": "127.0.0.1", "port": str(port), "unix_socket_directories": ""}
    command = [str(programs / "postgres"), "-D", str(home)]
    for name, value in settings.items():
        command += ["-c", f"{name}={value}"]
    return Stores(
        database_url=f"postgresql://postgres@127.0.0.1:{port}/postgres",
        redis_url=f"redis://127.0.0.1:{redis_port}/0",
        postgres=Process("postgres", command, folder, user=user),
        redis=Process("redis", [redis, "--port", str(redis_port), *_REDIS, str(folder)], folder),
    )


def postgres_programs() -> Path | None:
    """Returns the folder with `initdb` and `postgres`; None if there is none."""
    on_path = shutil.which("initdb")
    versions = sorted(_PACKAGED.glob("*/bin"), key=lambda path: int(path.parent.name))
    folders = [*([Path(on_path).parent] if on_path else []), *reversed(versions)]
    return next((one for one in folders if (one / "initdb").exists() and (one / "postgres").exists()), None)


def _postgres_user() -> str | None:
    """Returns the user that PostgreSQL must run as: it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)


async def _ping_redis(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"PING\r\n")
        if await reader.readline() != b"+PONG\r\n":
            raise ConnectionError("Redis is still loading")
    finally:
        writer.close()


async def _until(process: Process, ask: Any) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if not process.is_running:  # such as PostgreSQL, while the children of a killed one still end
            process.start()
        try:
            async with asyncio.timeout(5):
                await ask()
        except Exception:  # noqa: BLE001 - whatever it is: the server is not ready, and its log says why
            await asyncio.sleep(_POLL_S)
        else:
            return
    raise ServerFailed(f"{process.name} does not answer:\n{process.log[-4000:]}")
