"""Graftwork's processes as benchmarks start them: from any checkout, through the command line alone.

Knows of a checkout what its `pyproject.toml` says and nothing of its modules, so that one benchmark can run yesterday's
code beside today's.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

_READY_WITHIN_S = 180.0
_STOP_WITHIN_S = 30.0
_POLL_S = 0.1
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
OWN_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Checkout:
    """One tree of this project's files."""

    root: Path
    label: str = ""
    """Is shown beside the name of the tree."""
    prelude: str = ""
    """Python that its commands run before they start."""

    @property
    def name(self) -> str:
        return f"{self.root.name}, {self.label}" if self.label else self.root.name

    @property
    def package(self) -> Path:
        """The folder of the import package; every file of ours has its name below it."""
        return self.root / "src" / "graftwork"

    @property
    def demo_model(self) -> Path:
        return self.root / "demo" / "model"

    @property
    def entry_point(self) -> str:
        """`module:function` of the `graftwork` command."""
        project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        target: str = project["project"]["scripts"]["graftwork"]
        return target

    def command(self, *arguments: str) -> list[str]:
        """`graftwork ARGUMENTS` of this checkout."""
        module, _, function = self.entry_point.partition(":")
        return [
            sys.executable,
            "-c",
            f"{self.prelude}\nimport sys; from {module} import {function}; sys.exit({function}())",
            *arguments,
        ]

    def environment(self) -> dict[str, str]:
        """This process's, without settings of a real server, and with this checkout's package in front.

        Bytecode is written, as an installation does: else each start would compile all modules of the checkout.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GRAFTWORK_")}
        return _ONE_THREAD | kept | {"PYTHONPATH": str(self.package.parent), "PYTHONDONTWRITEBYTECODE": ""}


class ServerFailed(Exception):
    """A process did not become ready; the message ends with its log."""


class ServerProcess(AbstractContextManager["ServerProcess"]):
    """A child process with a log file of its own, ended with the block."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        self.process_id = self._process.pid

    def wait_for_http(self, url: str) -> None:
        """Return once a GET of `url` succeeds. Raises ServerFailed."""
        deadline = time.monotonic() + _READY_WITHIN_S
        while not _succeeds(url):
            if self._process.poll() is not None or time.monotonic() > deadline:
                end = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
                raise ServerFailed(f"{url} does not answer; the end of {self._log}:\n{end}")
            time.sleep(_POLL_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True, slots=True)
class Script:
    """What scripted engines do."""

    together: int
    """The requests that must wait before one engine answers any. Several engines answer at once: each gets a part."""
    step_ms: float
    engines: int = 1
    parts: int = 1
    """Messages of a step, each with a part of the streams."""
    over_tcp: bool = False


def scripted_engines(checkout: Checkout, folder: Path, script: Script) -> tuple[list[str], ServerProcess]:
    """Scripted engines for a gateway of `checkout`, and their addresses; `folder/steps` has the tokens that
    each of `script.together` streams has got.

    All are in one process: more processes would cost the gateway's caches on a machine with few cores.
    """
    listen = [
        f"127.0.0.1:{free_port()}" if script.over_tcp else f"unix:{folder / f'engine-{number}.sock'}"
        for number in range(script.engines)
    ]
    command = [sys.executable, str(Path(__file__).with_name("scripted_engine.py"))]
    command += [part for address in listen for part in ("--listen", address)]
    together = script.together if script.engines == 1 else 1
    command += ["--model", str(checkout.demo_model), "--together", str(together), "--step-ms", str(script.step_ms)]
    command += ["--progress", str(folder / "steps"), "--parts", str(script.parts), "--streams", str(script.together)]
    return listen, ServerProcess(command, checkout.environment(), folder / "engine.log")


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that answers, with its files."""

    folder: Path
    process_id: int
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_key(self) -> str:
        return (self.folder / "admin.key").read_text(encoding="utf-8").strip()


@contextmanager
def gateway_over_script(checkout: Checkout, script: Script) -> Iterator[RunningGateway]:
    """A gateway of `checkout` over scripted engines, with a data folder of its own. Raises ServerFailed."""
    with tempfile.TemporaryDirectory(prefix="graftwork-bench-") as name, ExitStack() as stack:
        folder, port = Path(name), free_port()
        addresses, engines = scripted_engines(checkout, folder, script)
        stack.enter_context(engines)
        options = ["--engine-address", ",".join(addresses), "--model", str(checkout.demo_model), "--data-dir", name]
        command = checkout.command("gateway", *options, "--port", str(port))
        gateway_process = stack.enter_context(ServerProcess(command, checkout.environment(), folder / "gateway.log"))
        gateway = RunningGateway(folder, gateway_process.process_id, port)
        gateway_process.wait_for_http(f"{gateway.url}/healthz")
        yield gateway


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def make_tenant(url: str, admin_key: str) -> str:
    """A new tenant's key, made through the admin API."""
    headers = {"authorization": f"Bearer {admin_key}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as admin:
        tenant = admin.post("/v1/admin/tenants", json={"name": "bench"}).raise_for_status().json()
        made = admin.post(f"/v1/admin/tenants/{tenant['id']}/keys", json={"name": "bench"}).raise_for_status().json()
    key: str = made["key"]
    return key


def _succeeds(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False
