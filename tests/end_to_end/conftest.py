"""`graftwork serve --demo` as a child process, as a newcomer starts it."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

DEMO = Path(__file__).parents[2] / "demo"
_READY_WITHIN_S = 120
_STOP_WITHIN_S = 30


@dataclass
class DemoServer:
    """A demo server on a port of its own. Its data folder outlives it."""

    data_dir: Path
    port: int
    settings: dict[str, str] = field(default_factory=dict)
    """GRAFTWORK_* variables."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.data_dir / "serve.log").read_text()

    def start(self) -> None:
        """Return once the server says that it is ready."""
        command = [sys.executable, "-m", "graftwork.api.cli.main", "serve", "--demo", "--port", str(self.port)]
        command += ["--data-dir", str(self.data_dir)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GRAFTWORK_")}
        environment |= self.settings
        with (self.data_dir / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + _READY_WITHIN_S
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not become ready:\n{self.log}")

    def stop(self) -> int:
        """SIGTERM, as an operator would; returns the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(_STOP_WITHIN_S)

    def kill(self) -> None:
        """SIGKILL, as a crash would; the engine follows its gateway by itself."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(_STOP_WITHIN_S)

    def kill_engine(self) -> None:
        """SIGKILL to the engine alone; returns when it is gone, and the gateway is not."""
        engine = self.engine()
        engine.kill()
        engine.wait(_STOP_WITHIN_S)

    def engine(self) -> psutil.Process:
        """The child process that serves the model now."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        (engine,) = [child for child in children if "graftwork.api.server.engine_process" in child.cmdline()]
        return engine

    def key(self, tenant: str) -> str:
        keys: dict[str, str] = json.loads((self.data_dir / "demo-keys.json").read_text())
        return next(key for name, key in keys.items() if tenant in name)

    def admin_key(self) -> str:
        return (self.data_dir / "admin.key").read_text().strip()

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels."""
        headers = {"authorization": f"Bearer {self.admin_key()}"}
        lines = httpx.get(f"{self.url}/metrics", headers=headers).text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def metrics_once(self, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """The metrics, read again until they say so."""
        deadline = time.monotonic() + _STOP_WITHIN_S
        while time.monotonic() < deadline:
            metrics = self.metrics()
            if condition(metrics):
                return metrics
        raise AssertionError("the metrics never said so")

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            select_nothing_for(0.1)
            return False


def select_nothing_for(seconds: float) -> None:
    """Give the processor to the server that is starting."""
    import select

    select.select([], [], [], seconds)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def restartable(tmp_path: Path) -> Iterator[DemoServer]:
    """A server that the test starts and stops. It is stopped at the end in any case."""
    server = DemoServer(tmp_path, free_port())
    yield server
    if server.process is not None and server.process.poll() is None:
        server.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    """A demo server for the tests of one module."""
    server = DemoServer(tmp_path_factory.mktemp("demo"), free_port())
    server.start()
    yield server
    server.stop()
