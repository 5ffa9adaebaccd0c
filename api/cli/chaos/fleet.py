"""Runs the processes of a fleet, so that they can be killed, stopped and started again: gateways and engines.

Owns the processes. Never decides which one is struck: faults.py does. The suite of tests/chaos runs the same fleet over
PostgreSQL and Redis.
"""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from graftwork.api.cli.demo.server import ServerFailed, free_port

READY_WITHIN_S = 120
ADMIN_KEY = "chaos-admin-" + secrets.token_hex(16)
PROGRAM = (sys.executable, "-m", "graftwork.api.cli.main")
_POLL_S = 0.2
_LAST_WORDS = 4000


@dataclass
class Process:
    """A process of the fleet, which can be killed and started again with the same command."""

    name: str
    command: Sequence[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    """The user that the process runs as; None for the user of this process."""
    process: subprocess.Popen[bytes] | None = None
    struck_at: list[float] = field(default_factory=list)
    """When the process was killed or got another signal, on the monotonic clock."""

    def start(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GRAFTWORK_")}
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                env=kept | self.environment,
                start_new_session=True,
                user=self.user,
            )

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.struck_at.append(time.monotonic())
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, also for a stopped process; returns when it is gone."""
        assert self.process is not None
        self.struck_at.append(time.monotonic())
        self.process.kill()
        self.process.wait(30)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")


@dataclass
class Fleet:
    """The gateways and the engines, and the gateways' addresses."""

    engines: list[Process]
    """The engines; a server with an engine of its own is engine and gateway."""
    gateways: list[Process]
    urls: list[str]

    @property
    def engine(self) -> Process:
        """The first engine."""
        return self.engines[0]

    async def ready(self) -> None:
        """Returns once all gateways say that they are ready. Raises ServerFailed."""
        await asyncio.gather(
            *(self.answers(process, url) for process, url in zip(self.gateways, self.urls, strict=True))
        )

    async def answers(self, process: Process, url: str) -> None:
        """Returns once a gateway says that it is ready. Raises ServerFailed, with the end of its log."""
        deadline = time.monotonic() + READY_WITHIN_S
        async with httpx.AsyncClient(trust_env=False) as client:
            while time.monotonic() < deadline and process.is_running:
                with suppress(httpx.TransportError):  # nobody listens yet; the end of the wait tells what the log says
                    if (await client.get(f"{url}/readyz", timeout=5)).status_code == 200:
                        return
                await asyncio.sleep(_POLL_S)
        state = "did not become ready" if process.is_running else "has ended"
        raise ServerFailed(f"{process.name} {state}:\n{process.log[-_LAST_WORDS:]}")

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


def fleet_environment() -> dict[str, str]:
    """Returns the environment of the fleet's processes."""
    return {"GRAFTWORK_ADMIN_KEY": ADMIN_KEY, "GRAFTWORK_PEPPER": "chaos", "OMP_NUM_THREADS": "1"}


def fleet_processes(folder: Path, options: Sequence[str] = (), gateways: int = 2) -> Fleet:
    """Returns a fleet of gateways and one engine with the demo model, not started. `options` are those of gateways."""
    shared = ["--demo", "--data-dir", str(folder / "data")]
    listen, environment = f"unix:{folder / 'engine.sock'}", fleet_environment()
    ports = [free_port() for _ in range(gateways)]
    command = [*PROGRAM, "gateway", *shared, "--engine-address", listen, *options]
    return Fleet(
        engines=[Process("engine", [*PROGRAM, "engine", *shared, "--listen", listen], folder, environment)],
        gateways=[Process(f"gateway-{port}", [*command, "--port", str(port)], folder, environment) for port in ports],
        urls=[f"http://127.0.0.1:{port}" for port in ports],
    )


async def start_fleet(fleet: Fleet) -> None:
    """Starts the engines and the gateways, and returns once all are ready. Raises ServerFailed."""
    fleet.engine.start()
    fleet.gateways[0].start()
    await fleet.answers(fleet.gateways[0], fleet.urls[0])  # the first one makes the tables
    for process in (*fleet.engines[1:], *fleet.gateways[1:]):
        process.start()
    await fleet.ready()
