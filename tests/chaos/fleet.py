"""Two gateways and an engine over PostgreSQL and Redis, or one server over SQLite, as processes that faults can strike."""

import asyncio
import contextlib
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from graftwork.api.cli.chaos.fleet import (
    PROGRAM,
    READY_WITHIN_S,
    Fleet,
    Process,
    fleet_environment,
    fleet_processes,
    start_fleet,
)
from graftwork.api.cli.demo.server import free_port


@dataclass
class ServedFleet(Fleet):
    """A fleet with its Redis and its database, which the suite reads."""

    redis: Process
    redis_url: str
    database_url: str
    """PostgreSQL's, or the path of a SQLite file."""

    async def redis_answers(self) -> None:
        """Returns once Redis answers."""
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            try:
                async with Redis.from_url(self.redis_url, socket_connect_timeout=5) as redis:
                    await redis.ping()
                return
            except (OSError, RedisError):
                await asyncio.sleep(0.1)
        raise AssertionError(f"Redis did not start:\n{self.redis.log}")

    async def query(self, statement: str, *arguments: object) -> Sequence[Mapping[str, Any]]:
        """Runs one statement in the fleet's database."""
        if "://" not in self.database_url:
            with contextlib.closing(sqlite3.connect(self.database_url)) as database:
                database.row_factory = sqlite3.Row
                return [dict(row) for row in database.execute(statement, arguments)]
        connection = await asyncpg.connect(self.database_url, timeout=10)
        try:
            rows: Sequence[Mapping[str, Any]] = await connection.fetch(statement, *arguments)
            return rows
        finally:
            await connection.close()


@asynccontextmanager
async def running_fleet(folder: Path, postgres_url: str) -> AsyncIterator[ServedFleet]:
    """Starts a fleet on an empty database, and ends it with all its processes."""
    redis_port = free_port()
    redis_url = f"redis://127.0.0.1:{redis_port}/0"
    server = ["redis-server", "--port", str(redis_port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    processes = fleet_processes(folder, ["--database-url", postgres_url, "--redis-url", redis_url])
    fleet = ServedFleet(
        engines=processes.engines,
        gateways=processes.gateways,
        urls=processes.urls,
        redis=Process("redis", server, folder),
        redis_url=redis_url,
        database_url=postgres_url.replace("postgresql+asyncpg", "postgresql"),
    )
    try:
        fleet.redis.start()
        await fleet.redis_answers()
        await start_fleet(fleet)
        yield fleet
    finally:
        for process in (*fleet.gateways, fleet.engine, fleet.redis):
            if process.is_running:
                process.kill()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mounts a disk of 64 MiB at `folder`. Skips the test where this user may not mount."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"only root may mount a small disk: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@asynccontextmanager
async def running_server(folder: Path, data_dir: Path) -> AsyncIterator[ServedFleet]:
    """Starts `graftwork serve` with SQLite, as one gateway of a fleet, and ends it."""
    port = free_port()
    command = [*PROGRAM, "serve", "--demo", "--data-dir", str(data_dir), "--port", str(port)]
    environment = fleet_environment() | {"GRAFTWORK_DISK_KV_BYTES": str(8 << 20)}
    server = Process("serve", command, folder, environment)
    urls, database = [f"http://127.0.0.1:{port}"], str(data_dir / "graftwork.db")
    fleet = ServedFleet([server], [server], urls, redis=server, redis_url="", database_url=database)
    try:
        server.start()
        await fleet.ready()
        yield fleet
    finally:
        server.kill()
