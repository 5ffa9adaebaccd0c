"""Servers whose processes run under `traced_process.py`, and the way to ask them what they did."""

import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from server_processes import Checkout, Script, ServerProcess, free_port, scripted_engines
from traced_process import Function, Recording

_SETTLE_S = 0.3
"""Recorded after the work: what a request leaves to be done behind its answer."""


class TracedServer:
    """A gateway, and perhaps its engine, that can be asked what they did."""

    def __init__(self, url: str, data_dir: Path, controls: Mapping[str, Path]) -> None:
        self.url = url
        self._data_dir = data_dir
        self._controls = controls

    @property
    def admin_key(self) -> str:
        return (self._data_dir / "admin.key").read_text(encoding="utf-8").strip()

    def demo_key(self, tenant: str) -> str:
        keys: dict[str, str] = json.loads((self._data_dir / "demo-keys.json").read_text(encoding="utf-8"))
        return keys[tenant]

    def client(self, key: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False)

    def record(self, work: Callable[[], None]) -> dict[str, Recording]:
        """What each traced process did while `work` ran, and shortly after it."""
        for control in self._controls.values():
            _command(control, "start")
        work()
        time.sleep(_SETTLE_S)
        return {name: _recording(_command(control, "stop")) for name, control in self._controls.items()}


@contextmanager
def traced_demo(checkout: Checkout) -> Iterator[TracedServer]:
    """The demo's engine and gateway, both traced."""
    with tempfile.TemporaryDirectory(prefix="graftwork-bench-") as name, ExitStack() as stack:
        folder, port = Path(name), free_port()
        listen = f"unix:{folder / 'engine.sock'}"
        shared = ["--demo", "--data-dir", name]
        stack.enter_context(_traced(checkout, folder, "engine", [*shared, "--listen", listen]))
        flags = [*shared, "--engine-address", listen, "--port", str(port)]
        gateway = stack.enter_context(_traced(checkout, folder, "gateway", flags))
        yield _ready(gateway, port, folder, ("engine", "gateway"))


@contextmanager
def traced_gateway(
    checkout: Checkout, together: int, step_ms: float, database_url: str | None = None
) -> Iterator[TracedServer]:
    """A gateway over a scripted engine, with its transactions traced; its database is by default a file of its own."""
    with tempfile.TemporaryDirectory(prefix="graftwork-bench-") as name, ExitStack() as stack:
        folder, port = Path(name), free_port()
        (listen,), engine = scripted_engines(checkout, folder, Script(together, step_ms))
        stack.enter_context(engine)
        flags = ["--model", str(checkout.demo_model), "--data-dir", name]
        flags += ["--engine-address", listen, "--port", str(port)]
        flags += [] if database_url is None else ["--database-url", database_url]
        gateway = stack.enter_context(_traced(checkout, folder, "gateway", flags, ["--transactions-only"]))
        yield _ready(gateway, port, folder, ("gateway",))


def _traced(
    checkout: Checkout, folder: Path, command: str, flags: Sequence[str], tracing: Sequence[str] = ()
) -> ServerProcess:
    """`graftwork COMMAND FLAGS`, which takes orders at `folder/COMMAND.control`. `tracing`: flags of the tracer."""
    tracer = [sys.executable, str(Path(__file__).with_name("traced_process.py"))]
    tracer += ["--package", str(checkout.package), "--control", str(_control(folder, command)), *tracing]
    orders = [*tracer, "--", checkout.entry_point, command, *flags]
    return ServerProcess(orders, checkout.environment(), folder / f"{command}.log")


def _ready(gateway: ServerProcess, port: int, folder: Path, traced: Sequence[str]) -> TracedServer:
    url = f"http://127.0.0.1:{port}"
    gateway.wait_for_http(f"{url}/healthz")
    return TracedServer(url, folder, {name: _control(folder, name) for name in traced})


def _control(folder: Path, command: str) -> Path:
    return folder / f"{command}.control"


def _command(control: Path, word: str) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(control))
        with connection.makefile("rw") as stream:
            stream.write(f"{word}\n")
            stream.flush()
            answer: dict[str, Any] = json.loads(stream.readline())
            return answer


def _recording(answer: dict[str, Any]) -> Recording:
    calls = [(caller, callee) for caller, callee in answer["calls"]]
    return Recording([Function(**function) for function in answer["functions"]], calls, answer["transactions"])
