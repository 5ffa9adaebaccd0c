"""Two gateways and an engine over PostgreSQL and Redis, as processes that faults can strike."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

READY_WITHIN_S = 120
ADMIN_KEY = "chaos-admin-" + secrets.token_hex(16)
MODEL = "graftwork-demo"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Process:
    """A process of the fleet, which can be killed and started again with the same command."""

    name: str
    command: Sequence[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GRAFTWORK_")}
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=kept | self.environment)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, also for a stopped process; returns when it is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")


@dataclass
class Fleet:
    """All processes, and the addresses of the gateways and of the database."""

    engine: Process
    """The engine; a server with an engine of its own is engine and gateway."""
    gateways: list[Process]
    redis: Process
    urls: list[str]
    redis_url: str
    database_url: str
    """PostgreSQL's, or the path of a SQLite file."""

    async def ready(self) -> None:
        """Returns once both gateways say that they are ready."""
        await asyncio.gather(
            *(self.answers(process, url) for process, url in zip(self.gateways, self.urls, strict=True))
        )

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

    async def answers(self, process: Process, url: str) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        async with httpx.AsyncClient(trust_env=False) as client:
            while time.monotonic() < deadline:
                try:
                    if (await client.get(f"{url}/readyz", timeout=5)).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                assert process.process is not None
                assert process.process.poll() is None, f"{process.name} has ended:\n{process.log[-4000:]}"
                await asyncio.sleep(0.2)
        raise AssertionError(f"{process.name} did not become ready:\n{process.log[-4000:]}")

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

    async def tenant(self, name: str, max_concurrent_requests: int) -> str:
        """Makes a tenant with a limit. Returns its key."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with httpx.AsyncClient(base_url=self.urls[0], headers=headers, trust_env=False, timeout=30) as admin:
            made = (await admin.post("/v1/admin/tenants", json={"name": name})).raise_for_status().json()
            path = f"/v1/admin/tenants/{made['id']}"
            limits = {"max_concurrent_requests": max_concurrent_requests}
            (await admin.put(f"{path}/quota", json=limits)).raise_for_status()
            key: str = (await admin.post(f"{path}/keys", json={"name": name})).raise_for_status().json()["key"]
        return key


@asynccontextmanager
async def running_fleet(folder: Path, postgres_url: str) -> AsyncIterator[Fleet]:
    """Starts a fleet on an empty database, and ends it with all its processes."""
    ports, redis_port = [free_port(), free_port()], free_port()
    program = [sys.executable, "-m", "graftwork.api.cli.main"]
    shared = ["--demo", "--data-dir", str(folder / "data")]
    redis_url = f"redis://127.0.0.1:{redis_port}/0"
    environment = {"GRAFTWORK_ADMIN_KEY": ADMIN_KEY, "GRAFTWORK_PEPPER": "chaos", "OMP_NUM_THREADS": "1"}
    listen = f"unix:{folder / 'engine.sock'}"
    addresses = ["--engine-address", listen, "--database-url", postgres_url, "--redis-url", redis_url]
    server = ["redis-server", "--port", str(redis_port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    fleet = Fleet(
        engine=Process("engine", [*program, "engine", *shared, "--listen", listen], folder, environment),
        gateways=[
            Process(
                f"gateway-{port}", [*program, "gateway", *shared, *addresses, "--port", str(port)], folder, environment
            )
            for port in ports
        ],
        redis=Process("redis", server, folder),
        urls=[f"http://127.0.0.1:{port}" for port in ports],
        redis_url=redis_url,
        database_url=postgres_url.replace("postgresql+asyncpg", "postgresql"),
    )
    processes = [fleet.redis, fleet.engine, *fleet.gateways]
    try:
        fleet.redis.start()
        fleet.engine.start()
        await fleet.redis_answers()
        fleet.gateways[0].start()
        await fleet.answers(fleet.gateways[0], fleet.urls[0])  # the first one makes the tables
        fleet.gateways[1].start()
        await fleet.ready()
        yield fleet
    finally:
        for process in reversed(processes):
            if process.process is not None and process.process.poll() is None:
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
async def running_server(folder: Path, data_dir: Path) -> AsyncIterator[Fleet]:
    """Starts `graftwork serve` with SQLite, as one gateway of a fleet, and ends it."""
    port = free_port()
    command = [sys.executable, "-m", "graftwork.api.cli.main", "serve", "--demo", "--data-dir", str(data_dir)]
    environment = {"GRAFTWORK_ADMIN_KEY": ADMIN_KEY, "GRAFTWORK_PEPPER": "chaos", "OMP_NUM_THREADS": "1"}
    environment |= {"GRAFTWORK_DISK_KV_BYTES": str(8 << 20)}
    server = Process("serve", [*command, "--port", str(port)], folder, environment)
    urls = [f"http://127.0.0.1:{port}"]
    fleet = Fleet(server, [server], server, urls, redis_url="", database_url=str(data_dir / "graftwork.db"))
    try:
        server.start()
        await fleet.ready()
        yield fleet
    finally:
        server.kill()
