"""Runs a whole fleet for `graftwork bench chaos`: gateways and engines that find each other by leases, and their stores.

    gateways ──(leases in the database)──► engine-0, engine-1: Unix-domain sockets
                                           engine-2: TCP, through a Link that faults can cut

Owns the processes, the link and the small disk. Never decides what is struck: fleet_faults.py does.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from graftwork.api.cli.chaos.fleet import (
    ADMIN_KEY,
    PROGRAM,
    READY_WITHIN_S,
    Fleet,
    Process,
    fleet_environment,
    start_fleet,
)
from graftwork.api.cli.chaos.link import Link
from graftwork.api.cli.chaos.stores import Stores, server_stores, sqlite_store
from graftwork.api.cli.demo.server import ServerFailed, free_port

STORES = ("auto", "postgres", "sqlite")
_DISK_BYTES = 256 << 20
_CLOCKED = (sys.executable, "-m", "graftwork.api.cli.chaos.clock_jump")
_DISK_KV_BYTES = 16 << 20
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What a fleet has."""

    engines: int = 3
    gateways: int = 2
    store: str = "auto"
    """One of STORES: `postgres` (with Redis), `sqlite`, or `auto`, which is `postgres` where its programs are."""
    shares_kv: bool = True
    """Whether engines share a folder of KV files. If not, each has one of its own."""


@dataclass
class WholeFleet(Fleet):
    """A fleet with everything that faults can strike."""

    folder: Path
    data: Path
    """The data folder of gateways and engines."""
    has_small_disk: bool
    """Whether `data` is a disk of its own, which can be full."""
    stores: Stores
    link: Link
    kv_folders: list[Path]
    """By engine: the folder with its KV files, which may be that of all."""
    clocks: list[Path]
    """By process of `clocked`: the file with the seconds that its clock is off."""

    @property
    def clocked(self) -> list[Process]:
        """The processes whose clocks can be moved."""
        return [self.gateways[0], self.engines[0]]

    async def replicas(self) -> list[dict[str, Any]]:
        """Returns the engines as the first gateway that answers sees them."""
        for url in self.urls:
            if found := await _replicas_at(url):
                return found
        return []

    async def whole(self) -> None:
        """Returns once all gateways are ready, and see all engines ready. Raises ServerFailed."""
        await self.ready()
        deadline = time.monotonic() + READY_WITHIN_S
        seen: list[list[dict[str, Any]]] = []
        while time.monotonic() < deadline:
            seen = [await _replicas_at(url) for url in self.urls]
            if all(sum(one["status"] == "ready" for one in replicas) >= len(self.engines) for replicas in seen):
                return
            await asyncio.sleep(_POLL_S)
        raise ServerFailed(f"The fleet does not get whole: {seen}")

    def log_lines(self, event: str) -> list[str]:
        """Returns the lines of all gateways' logs that have an event."""
        return [line for gateway in self.gateways for line in gateway.log.splitlines() if f'"event": "{event}"' in line]


async def _replicas_at(url: str) -> list[dict[str, Any]]:
    """Returns the engines as one gateway sees them; none if it does not answer."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with suppress(httpx.TransportError):
        async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=10) as admin:
            answer = await admin.get(f"{url}/v1/admin/replicas")
        if answer.is_success:
            found: list[dict[str, Any]] = answer.json()["data"]
            return found
    return []


@asynccontextmanager
async def whole_fleet(folder: Path, plan: FleetPlan) -> AsyncGenerator[WholeFleet]:
    """Starts a fleet with the demo model, and ends it with all its processes. Raises ServerFailed."""
    data = folder / "data"
    data.mkdir()
    has_small_disk = _mount_small_disk(data)
    link_port = free_port()
    link = Link(link_port)
    await link.start()
    fleet = _processes(folder, plan, _stores(folder, plan.store), link, link_port, has_small_disk=has_small_disk)
    try:
        await fleet.stores.start()
        await start_fleet(fleet)
        await fleet.whole()
        yield fleet
    finally:
        for process in (*fleet.gateways, *fleet.engines, *fleet.stores.processes):
            if process.is_running:
                process.kill()
        await link.close()
        if has_small_disk:
            await asyncio.to_thread(subprocess.run, ["umount", "--lazy", str(data)], check=False)


def _stores(folder: Path, name: str) -> Stores:
    stores = None if name == "sqlite" else server_stores(folder)
    if stores is None and name == "postgres":
        raise ServerFailed("--store postgres needs PostgreSQL's programs (initdb, postgres) and redis-server.")
    return stores or sqlite_store(folder)


def _processes(
    folder: Path, plan: FleetPlan, stores: Stores, link: Link, link_port: int, *, has_small_disk: bool
) -> WholeFleet:
    data, environment = folder / "data", fleet_environment()
    shared = ["--demo", "--data-dir", str(data), "--fleet", "leases"]
    engine = [*shared, *stores.database_options]
    engine += [
        "--disk-kv-bytes",
        str(_DISK_KV_BYTES),
        "--device-bytes",
        str(256 << 20),
        "--host-kv-bytes",
        str(64 << 20),
    ]
    clocks = [folder / "clock-gateway", folder / "clock-engine"]
    engines, gateways, ports = [], [], [free_port() for _ in range(plan.gateways)]
    own_folders = [data / f"kv-{number}" for number in range(plan.engines)]
    kv_folders = [data / "shared-kv"] * plan.engines if plan.shares_kv else own_folders
    for number in range(plan.engines):
        name = f"engine-{number}"
        where = ["--listen", f"unix:{folder / name}.sock"]
        if number == plan.engines - 1:
            where = ["--listen", f"127.0.0.1:{link_port}", "--advertise", f"127.0.0.1:{link.port}"]
        where += ["--shared-kv-dir" if plan.shares_kv else "--kv-dir", str(kv_folders[number])]
        program = [*_CLOCKED, str(clocks[1])] if number == 0 else PROGRAM
        engines.append(Process(name, [*program, "engine", *engine, "--replica-id", name, *where], folder, environment))
    for number, port in enumerate(ports):
        program = [*_CLOCKED, str(clocks[0])] if number == 0 else PROGRAM
        command = [*program, "gateway", *shared, *stores.options, "--port", str(port)]
        gateways.append(Process(f"gateway-{number}", command, folder, environment))
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    return WholeFleet(engines, gateways, urls, folder, data, has_small_disk, stores, link, kv_folders, clocks)


def _mount_small_disk(folder: Path) -> bool:
    """Makes `folder` a disk of 256 MiB. Returns False where this user may not mount."""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
