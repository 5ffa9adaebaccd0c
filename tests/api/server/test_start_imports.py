"""Tests of what the processes of a server import before they answer, and of a start whose imports fail."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from graftwork.api.server.served_model import demo_folder
from graftwork.engine.core.events import TokensGenerated
from graftwork.engine.core.requests import EngineRequest, GrammarKind, GrammarSource
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import IsolationDomain, RequestId
from graftwork.sessions.text.model_files import ModelFolder

ENGINE = """
import sys
from graftwork.api.server.engine_process import run_engine
from graftwork.platform.settings.settings import Settings
settings = Settings.from_environment({"demo": True, "data_dir": sys.argv[1], "device": "cpu"})
run_engine(settings, f"unix:{sys.argv[1]}/engine.sock")
print(*sorted(sys.modules))
"""
"""Serves until SIGTERM, and then prints all modules that the process has imported."""
GATEWAYS_ONLY = {
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "httpx",
    "jinja2",
    "tokenizers",
    "redis",
    "prometheus_client",
}
NEVER_AT_START = {
    "sqlalchemy",
    "alembic",
    "rich",
    "typer",
    "cryptography",
    "huggingface_hub",
    "obstore",
    "opentelemetry",
}
AT_FIRST_USE = {"xgrammar", "llguidance", "triton", "sympy", "transformers", "peft"}
PROGRAM_WITHOUT_REDIS = """
import sys
sys.modules["redis"] = None  # as if it were not installed: only the gateway's own code imports it
from graftwork.api.cli.main import main
main()
"""


class EngineProcess:
    """An engine of the demo model in a process of its own."""

    def __init__(self, data_dir: Path) -> None:
        command = [sys.executable, "-c", ENGINE, str(data_dir)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._address = f"unix:{data_dir}/engine.sock"

    async def client(self) -> GrpcEngineClient:
        """A client of the engine, which answers."""
        while True:
            client = GrpcEngineClient(self._address)
            try:
                await client.describe()
            except Unavailable:
                await client.close()
                assert self._process.poll() is None, "the engine has ended"
            else:
                return client

    def modules_at_end(self) -> set[str]:
        """Ends the engine, and returns the top-level modules that it has imported."""
        self._process.send_signal(signal.SIGTERM)
        shown, _ = self._process.communicate(timeout=60)
        return {name.partition(".")[0] for name in shown.split()}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path)
    yield process
    process.kill()


def test_an_engine_imports_what_serves_tokens(engine: EngineProcess) -> None:
    """An engine that has answered, and computed nothing yet, has imported torch, and neither the code of gateways, nor a
    database, nor what only some requests need."""

    async def wait() -> None:
        await (await engine.client()).close()

    asyncio.run(wait())
    imported = engine.modules_at_end()

    assert {"torch", "numba", "grpc", "safetensors"} <= imported
    assert imported & (GATEWAYS_ONLY | NEVER_AT_START | AT_FIRST_USE) == set()


def test_the_first_request_of_an_engine_may_have_a_grammar(engine: EngineProcess) -> None:
    """The first request is held to its schema: the engine that compiles grammars is imported when it is needed."""
    tokenizer = ModelFolder.load(demo_folder() / "model").tokenizer
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    request = EngineRequest(
        request_id=RequestId("req_first"),
        prompt_token_ids=tokenizer.encode_user_text("Hello"),
        sampling=SamplingParams(max_tokens=40, temperature=0.0),
        domain=IsolationDomain(b"d" * 32),
        grammar=GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
    )

    async def ask() -> str:
        client = await engine.client()
        token_ids: list[int] = []
        async with aclosing(client.generate(request)) as events:
            async for event in events:
                token_ids += event.token_ids if isinstance(event, TokensGenerated) else ()
        await client.close()
        return tokenizer.decode(token_ids)

    answer = asyncio.run(ask())

    assert json.loads(answer) in ({"n": 1}, {"n": 2})
    assert engine.modules_at_end() & AT_FIRST_USE


def test_a_gateway_that_cannot_be_imported_ends_the_start(tmp_path: Path) -> None:
    """If a module that the gateway imports while its engine starts is missing, `serve` names it and ends with its engine."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM_WITHOUT_REDIS, "serve", "--demo", "--port", "0", "--data-dir", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={name: value for name, value in os.environ.items() if not name.startswith("GRAFTWORK_")},
    )

    assert done.returncode == 1
    assert "there is no module redis" in done.stderr
    assert "Starting the engine" in done.stdout
    assert "serves" not in done.stdout
