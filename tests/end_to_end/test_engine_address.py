"""Tests of who may speak to an engine: the one of `serve`, and one on a TCP port."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graftwork.engine.rpc.client import TOKEN_REFUSED, GrpcEngineClient
from graftwork.platform.errors import Unavailable
from tests.end_to_end.conftest import DemoServer, free_port, select_nothing_for

_WITHIN_S = 60


def graftwork(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GRAFTWORK_")} | variables
    command = [sys.executable, "-m", "graftwork.api.cli.main", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


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
