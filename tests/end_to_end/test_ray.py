"""Tests of a fleet on a real Ray of this machine: scaling, losses and an upgrade under load fail no request."""

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.end_to_end.conftest import DEMO, DemoServer, free_port, select_nothing_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is missing: pip install 'graftwork[ray]'"),
]

PROGRAM = [sys.executable, "-m", "graftwork.api.cli.main"]
_LOOKS = 2400
_TOKENS = 24


class Gateway(DemoServer):
    """A gateway that finds its engines by their leases."""

    def launch(self, environment: dict[str, str]) -> None:
        """Starts the gateway. It is ready once an engine is."""
        command = [*PROGRAM, "gateway", "--demo", "--fleet", "leases", "--port", str(self.port)]
        with (self.data_dir / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def replicas(self) -> dict[str, dict[str, Any]]:
        headers = {"authorization": f"Bearer {self.admin_key()}"}
        answer = httpx.get(f"{self.url}/v1/admin/replicas", headers=headers, timeout=60)
        return {one["id"]: one for one in answer.json()["data"]}

    def ready(self) -> dict[str, dict[str, Any]]:
        return {name: one for name, one in self.replicas().items() if one["status"] == "ready"}

    def until(self, condition: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
        """Returns the replicas once they are as wanted."""
        found: dict[str, dict[str, Any]] = {}
        for _ in range(_LOOKS):
            found = self.replicas()
            if condition(found):
                return found
            select_nothing_for(0.25)
        raise AssertionError(f"never happened: {found}")


@dataclass
class RayCluster:
    """A Ray of this machine, and a gateway beside it that does not know of Ray."""

    folder: Path
    gateway: Gateway
    environment: dict[str, str]
    head: subprocess.Popen[str]
    address: str = ""

    def fleet(self, verb: str, *arguments: str) -> str:
        """Runs `graftwork fleet`."""
        command = [*PROGRAM, "fleet", verb, "--ray-address", self.address, *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def process_of(self, replica_id: str) -> int:
        """The id of the process that serves a replica."""
        (file,) = (self.folder / "ray").glob(f"{replica_id}@*.json")
        return int(json.loads(file.read_text())["process_id"])

    def engines(self) -> list[psutil.Process]:
        """All engines of this test that run."""
        marks = {"GRAFTWORK_DATA_DIR": str(self.folder)}
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "engine" in command and "graftwork.api.cli.main" in command:
                with_marks = process.environ()
                if all(with_marks.get(name) == value for name, value in marks.items()):
                    found.append(process)
        return found

    def kill_ray(self) -> None:
        """SIGKILL to all processes of Ray, the head and its actors."""
        if self.head.poll() is None:
            head = psutil.Process(self.head.pid)
            for process in [*head.children(recursive=True), head]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.head.wait(30)
        for pipe in (self.head.stdin, self.head.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    folder = tmp_path / "data"
    folder.mkdir()
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("GRAFTWORK_", "RAY_"))}
    environment = inherited | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "GRAFTWORK_ENGINE_TOKEN": secrets.token_hex(16),
        "GRAFTWORK_DATABASE_URL": f"sqlite+aiosqlite:///{folder}/fleet.db",
        "GRAFTWORK_DATA_DIR": str(folder),
        "GRAFTWORK_DEVICE_BYTES": str(64 << 20),
        "GRAFTWORK_HOST_KV_BYTES": str(16 << 20),
        "GRAFTWORK_DISK_KV_BYTES": str(16 << 20),
        "GRAFTWORK_DTYPE": "float32",
        "GRAFTWORK_LEASE_S": "10",
        "GRAFTWORK_DRAIN_GRACE_S": "5",
    }
    head = start_ray(environment)
    gateway = Gateway(folder, free_port())
    cluster = RayCluster(folder, gateway, environment, head, head_address(head))
    try:
        yield cluster
    finally:
        if gateway.process is not None:
            gateway.process.kill()
            gateway.process.wait(30)
        cluster.kill_ray()
        for engine in cluster.engines():
            engine.kill()
        shutil.rmtree(ray_folder(), ignore_errors=True)


def ray_folder() -> Path:
    return Path(f"/tmp/graftwork-ray-{os.getpid()}")  # the paths of Ray's sockets must be short


def start_ray(environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.end_to_end.ray_head", str(ray_folder()), "8"],
        env=environment,
        cwd=DEMO.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def head_address(head: "subprocess.Popen[str]") -> str:
    assert head.stdout is not None
    address = head.stdout.readline().strip()
    assert address, "Ray did not start"
    return address


@dataclass
class Load:
    """Clients that stream answers without a pause. Each answer must have all its tokens."""

    url: str
    key: str
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _must_end: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(2)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._must_end.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        turn = 0
        with httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, timeout=120) as client:
            while not self._must_end.is_set():
                turn += 1
                self._check(client, f"Client {number} asks for the {turn}th time: tell me a story about the harbour")

    def _check(self, client: httpx.Client, prompt: str) -> None:
        body = {"model": "graftwork-demo", "prompt": prompt, "max_tokens": _TOKENS, "ignore_eos": True, "stream": True}
        try:
            with client.stream("POST", "/v1/completions", json=body | {"logprobs": 0, "temperature": 0}) as answer:
                lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
            choices = [choice for line in lines for choice in line.get("choices", ())]
            number = sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice.get("logprobs"))
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        if answer.status_code != 200 or number != _TOKENS:
            self.failures.append(f"{answer.status_code}, {number} tokens: {lines[-1:]}")
        self.answered += 1

    def more(self, number: int = 3) -> None:
        """Returns once some more answers have come."""
        wanted = self.answered + number
        for _ in range(_LOOKS):
            if self.answered >= wanted:
                return
            select_nothing_for(0.1)
        raise AssertionError("no answers come")


def started(cluster: RayCluster) -> Gateway:
    """Starts one engine on Ray, and the gateway beside it."""
    gateway = cluster.gateway
    gateway.launch(cluster.environment)
    cluster.fleet("start", "--replicas", "1", "--demo")
    for _ in range(_LOOKS):
        if gateway.is_ready():
            return gateway
        select_nothing_for(0.25)
    raise AssertionError(f"the gateway never got ready:\n{gateway.log}")


def upgrade_flags(folder: Path) -> tuple[str, ...]:
    """Makes a copy of the demo model with another fingerprint. Returns the flags that serve it under the same name."""
    shutil.copytree(DEMO / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": "newer"}))
    return "--model", str(folder), "--served-model-name", "graftwork-demo"


def test_scaling_losses_and_an_upgrade_fail_no_request(cluster: RayCluster) -> None:
    """1 → 3 engines, an engine killed, other weights, → 1 engine, all under load: no request fails."""
    gateway = started(cluster)
    with Load(gateway.url, gateway.key("Plain")) as load:
        load.more()
        cluster.fleet("scale", "3")
        before = gateway.until(lambda found: len(gateway.ready()) == 3)
        load.more()

        os.kill(cluster.process_of("graftwork-1"), signal.SIGKILL)
        gateway.until(
            lambda found: (
                {name: one["epoch"] for name, one in found.items() if one["status"] == "ready"}
                == {"graftwork-0": 1, "graftwork-1": 2, "graftwork-2": 1}
            )
        )
        load.more()

        flags = upgrade_flags(cluster.folder.parent / "newer")
        assert cluster.fleet("upgrade", *flags).strip() == "Generation 2"
        after = gateway.until(
            lambda found: (
                len(found) == 3 and all(one["status"] == "ready" and one["generation"] == 2 for one in found.values())
            )
        )
        assert {one["fingerprint"] for one in after.values()} != {one["fingerprint"] for one in before.values()}
        load.more()

        cluster.fleet("scale", "1")
        gateway.until(lambda found: len(found) == 1)
        load.more()

    assert load.failures == []
    cluster.fleet("stop")
    assert cluster.engines() == []


def test_engines_outlive_their_actors_and_ray(cluster: RayCluster) -> None:
    """The engine serves on when its actor, and then all of Ray, is killed; the next Ray finds it. No request fails."""
    gateway = started(cluster)
    with Load(gateway.url, gateway.key("Plain")) as load:
        ((replica_id, before),) = gateway.ready().items()
        process_id = cluster.process_of(replica_id)
        (actor,) = [
            process
            for process in psutil.Process(cluster.head.pid).children(recursive=True)
            if "EngineActor" in " ".join(process.cmdline())
        ]
        actor.kill()
        load.more()

        cluster.kill_ray()
        load.more(10)
        cluster.head = start_ray(cluster.environment)
        cluster.address = head_address(cluster.head)
        cluster.fleet("start", "--replicas", "1", "--demo")
        found = list[dict[str, Any]]()
        while not found or found[0]["process_id"] is None:
            found = json.loads(cluster.fleet("status", "--json"))
        load.more()
        after = gateway.ready()

    assert load.failures == []
    assert [(one["replica_id"], one["process_id"], one["starts"]) for one in found] == [(replica_id, process_id, 0)]
    assert after[replica_id]["epoch"] == before["epoch"]
    cluster.fleet("stop")
    assert cluster.engines() == []
