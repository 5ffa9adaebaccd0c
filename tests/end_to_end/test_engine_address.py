"""Tests of who may speak to an engine: the one of `serve`, and one on a TCP port."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.engine.rpc.conversation import TOKEN_REFUSED
from graftwork.engine.rpc.engine_tls import EngineTls
from graftwork.platform.errors import Unavailable
from tests.certificates import Authority
from tests.end_to_end.conftest import DemoServer, free_port, select_nothing_for

_WITHIN_S = 60


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("GRAFTWORK_")}


def graftwork(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "graftwork.api.cli.main", *arguments]
    return subprocess.Popen(
        command, env=clean_environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


async def error_of(address: str) -> Unavailable | None:
    """The error of a client without a token; None if it is served."""
    client = GrpcEngineClient(address)
    try:
        await client.describe()
    except Unavailable as error:
        return error
    finally:
        await client.close()
    return None


def test_the_engine_of_serve_obeys_its_gateway_alone(server: DemoServer) -> None:
    """A process that can open the engine's socket, and has no token, is refused."""
    (address,) = (f"unix:{path}" for path in server.data_dir.glob("*.sock"))

    refused = asyncio.run(error_of(address))

    assert refused is not None
    assert refused.code == TOKEN_REFUSED


def test_a_gateway_with_a_wrong_token_ends_with_one_sentence(tmp_path: Path) -> None:
    """A gateway whose token is not its engine's ends with status 1 and a sentence that names the variable."""
    address = f"127.0.0.1:{free_port()}"
    shared = ["--demo", "--data-dir", str(tmp_path)]
    engine = graftwork("engine", *shared, "--listen", address, GRAFTWORK_ENGINE_TOKEN="a-token-of-the-engine")
    try:
        while (error := asyncio.run(error_of(address))) is not None and error.code != TOKEN_REFUSED:
            assert engine.poll() is None
            select_nothing_for(0.1)
        arguments = (*shared, "--engine-address", address, "--port", "0")
        gateway = graftwork("gateway", *arguments, GRAFTWORK_ENGINE_TOKEN="another-token-of-the-gateway")
        output, _ = gateway.communicate(timeout=_WITHIN_S)
    finally:
        engine.kill()
        engine.communicate()

    assert gateway.returncode == 1
    assert "GRAFTWORK_ENGINE_TOKEN" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_an_engine_that_all_can_reach_does_not_start_without_a_token(address: str, tmp_path: Path) -> None:
    """`graftwork engine` at an address of the network, without a token, ends with one sentence."""
    engine = graftwork("engine", "--demo", "--data-dir", str(tmp_path), "--listen", address)

    output, _ = engine.communicate(timeout=_WITHIN_S)

    assert engine.returncode == 1
    assert "GRAFTWORK_ENGINE_TOKEN" in output
    assert "Traceback" not in output


WITHOUT_ENGINE_PACKAGES = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {"torch", "triton", "numba", "safetensors", "xgrammar", "llguidance"}:
            raise ModuleNotFoundError(f"{name} is no part of a gateway")

sys.meta_path.insert(0, Missing())
from graftwork.api.cli.main import main
main()
"""
"""Runs the command line as on a machine that has installed the extra `gateway` alone."""


def probe(address: str, within_s: float, **variables: str) -> tuple[int, str]:
    """The exit status and the output of `graftwork probe`."""
    process = graftwork("probe", address, "--within", str(within_s), **variables)
    output, _ = process.communicate(timeout=_WITHIN_S)
    return process.returncode, output


def test_a_gateway_without_torch_serves_over_tls_and_a_probe_tells_whether_the_engine_computes(tmp_path: Path) -> None:
    """With certificates and no token, a gateway that cannot import the engine's packages answers, also in a grammar. The
    probe fails for an engine that is stopped, and for a caller without a certificate."""
    authority = Authority(tmp_path, "ours")
    address = f"127.0.0.1:{free_port()}"
    ours = {role: variables_of(authority.issue(role)) for role in ("engine", "gateway")}
    shared = ["--demo", "--data-dir", str(tmp_path)]
    engine = graftwork("engine", *shared, "--listen", address, **ours["engine"])
    port = free_port()
    command = [sys.executable, "-c", WITHOUT_ENGINE_PACKAGES, "gateway", *shared, "--engine-address", address]
    gateway = subprocess.Popen(
        [*command, "--port", str(port)], env=clean_environment() | ours["gateway"], stdout=subprocess.DEVNULL
    )
    try:
        wait_for_readiness(f"http://127.0.0.1:{port}", gateway)
        served = probe(address, _WITHIN_S, **ours["gateway"])
        stranger = probe(address, 5)
        keys: dict[str, str] = json.loads((tmp_path / "demo-keys.json").read_text())
        schema = {
            "type": "object",
            "properties": {"n": {"type": "boolean"}},
            "required": ["n"],
            "additionalProperties": False,
        }
        body = {"model": "graftwork-demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 40}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        headers = {"authorization": f"Bearer {next(iter(keys.values()))}"}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=_WITHIN_S)
        engine.send_signal(signal.SIGSTOP)
        stopped = probe(address, 2, **ours["gateway"])
    finally:
        for process in (gateway, engine):
            process.kill()
            process.communicate()

    assert served[0] == 0, served
    assert "gave a token" in served[1]
    assert stranger[0] == stopped[0] == 1
    assert "Error:" in stopped[1]
    assert "Traceback" not in stopped[1] + stranger[1]
    assert answer.status_code == 200, answer.text
    assert isinstance(json.loads(answer.json()["choices"][0]["message"]["content"])["n"], bool)


def variables_of(tls: EngineTls) -> dict[str, str]:
    files = {"ca": tls.ca, "cert": tls.cert, "key": tls.key, "name": tls.name}
    return {f"GRAFTWORK_ENGINE_TLS_{name.upper()}": str(value) for name, value in files.items()}


def wait_for_readiness(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Returns when a gateway says that it is ready."""
    deadline = time.monotonic() + _WITHIN_S
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            select_nothing_for(0.1)
    raise AssertionError("the gateway did not become ready")
