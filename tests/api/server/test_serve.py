"""Tests of `graftwork serve --demo` as a process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

PROGRAM = """
import sys
from graftwork.api.server.serve import serve
from graftwork.platform.settings.settings import Settings
serve(Settings.from_environment({"demo": True, "port": 0, "data_dir": sys.argv[1]}))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A server that has just been started."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def url_when_ready(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"at (http://\S+)", line):
            return found[1]
    raise AssertionError("the server ended before it was ready")


def ask(url: str, data_dir: Path) -> httpx.Response:
    key = json.loads((data_dir / "demo-keys.json").read_text())["Plain Labs"]
    body = {"model": "graftwork-demo", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


def engine_of(server: subprocess.Popen[str]) -> psutil.Process:
    """The child that serves the model; others inspect uploads."""
    (engine,) = (
        child for child in psutil.Process(server.pid).children() if "engine_process" in " ".join(child.cmdline())
    )
    return engine


@pytest.mark.slow
def test_life(server: subprocess.Popen[str], tmp_path: Path) -> None:
    """The server generates tokens, survives its engine's death, and leaves no process after SIGTERM."""
    url = url_when_ready(server)
    assert ask(url, tmp_path).json()["usage"]["completion_tokens"] == 4
    engine_of(server).kill()
    deadline = time.monotonic() + 60
    while ask(url, tmp_path).status_code != 200:
        assert time.monotonic() < deadline
    engine = engine_of(server)

    server.send_signal(signal.SIGTERM)

    assert server.wait(30) == 0
    assert not engine.is_running()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or os.cpu_count() == 1, reason="needs Linux and two cores")
def test_cores(tmp_path: Path) -> None:
    """With `engine_cores`, the engine's threads keep to these cores, but for the one that waits for the server's end, and
    all threads of the server to the others.
    """
    usable = sorted(os.sched_getaffinity(0))
    command, environment = [sys.executable, "-c", PROGRAM, str(tmp_path)], {"GRAFTWORK_ENGINE_CORES": str(usable[-1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment) as server:
        try:
            assert ask(url_when_ready(server), tmp_path).json()["usage"]["completion_tokens"] == 4
            engines, servers = (
                [os.sched_getaffinity(thread.id) for thread in process.threads()]
                for process in (engine_of(server), psutil.Process(server.pid))
            )
        finally:
            server.kill()

    assert len(engines) > 3
    assert sum(cores != {usable[-1]} for cores in engines) == 1
    assert servers
    assert all(cores == set(usable[:-1]) for cores in servers)


@pytest.mark.slow
def test_sudden_death(server: subprocess.Popen[str]) -> None:
    """An engine whose supervisor was killed ends by itself."""
    url_when_ready(server)
    engine = engine_of(server)

    os.kill(server.pid, signal.SIGKILL)

    engine.wait(30)
    assert not engine.is_running()


@pytest.mark.slow
def test_impatience(server: subprocess.Popen[str]) -> None:
    """A signal while the engine starts ends both processes with status 0."""
    assert server.stdout is not None
    next(line for line in server.stdout if "1 s" in line)
    engine = engine_of(server)

    server.send_signal(signal.SIGINT)

    assert server.wait(30) == 0
    assert not engine.is_running()
