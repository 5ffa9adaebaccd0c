"""Tests of the OpenAPI document with public linters, checkers and generators, in pinned versions."""

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.api.server.app import create_app
from graftwork.platform.settings.settings import Settings
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import ADMIN_KEY, gateway_settings, open_gateway, write_model_folder
from tests.api.signed_in import token_of_person

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PYTHON_TOOLS = ("schemathesis==4.32.5", "openapi-python-client==0.29.1", "mypy==2.4.1", "ruff==0.17.6")
NODE_TOOLS = ("@stoplight/spectral-cli@6.16.3", "openapi-typescript@7.13.0", "typescript@5.9.3")
CONFIG = Path(__file__).with_name("schemathesis.toml")
MAX_EXAMPLES = 8
"""Of each operation and check."""
PEOPLES = "^/v1/(keys|members)"
"""The routes of people who have signed in."""
SENDERS = {
    "tenant": ("--exclude-path-regex", "^/v1/admin", 2000),
    "admin": ("--include-path-regex", "^/v1/admin", 2000),
    "person": ("--include-path-regex", PEOPLES, 200),
}
"""By who sends: how to choose the routes, and the fewest requests."""


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openapi") / "openapi.json"
    path.write_text(json.dumps(create_app(Settings()).openapi()))
    return path


@pytest.fixture(scope="module")
def python_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the Python tools' programs."""
    folder = tmp_path_factory.mktemp("python-tools")
    run([sys.executable, "-m", "venv", folder], check=True)
    done = run([folder / "bin" / "pip", "install", "-q", *PYTHON_TOOLS], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the tools cannot be installed: {done.stderr[-300:]}")
    return folder / "bin"


@pytest.fixture(scope="module")
def node_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Node's tools."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("these tools need Node.js")
    folder = tmp_path_factory.mktemp("node-tools")
    done = run([npm, "install", "--silent", *NODE_TOOLS], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the tools cannot be installed: {done.stderr[-300:]}")
    return folder / "node_modules" / ".bin"


def output_of(*command: object, cwd: Path) -> str:
    """What a tool prints. It must succeed; it finds the programs beside it."""
    environment = os.environ | {"PATH": f"{Path(str(command[0])).parent}{os.pathsep}{os.environ['PATH']}"}
    done = run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def test_spectral_finds_nothing(document: Path, node_tools: Path) -> None:
    """Spectral's rules for OpenAPI documents find no error and no warning."""
    rules = document.parent / "rules.yaml"
    rules.write_text('extends: ["spectral:oas"]\n')

    output = output_of(node_tools / "spectral", "lint", "-F", "hint", "-r", rules, document, cwd=document.parent)

    assert "No results" in output


def test_a_typed_python_client(document: Path, python_tools: Path) -> None:
    """A generated Python client has every operation, compiles and passes mypy."""
    folder = document.parent / "client"

    config = document.parent / "client.yaml"
    known = dict.fromkeys(("application/zip", "application/x-jsonl"), "application/octet-stream")
    config.write_text(json.dumps({"content_type_overrides": known}))
    generate = (python_tools / "openapi-python-client", "generate", "--path", document, "--meta", "none")
    options = ("--output-path", folder, "--config", config, "--fail-on-warning")
    output = output_of(*generate, *options, cwd=python_tools)
    output_of(sys.executable, "-m", "compileall", "-q", folder, cwd=document.parent)
    checked = (folder / "models", folder / "api")  # the rest is the generator's own, the same for every document
    output_of(python_tools / "mypy", "--follow-imports=silent", *checked, cwd=document.parent)

    assert "WARNING" not in output
    assert (folder / "api" / "sessions" / "create_turn.py").is_file()


def test_a_typed_typescript_client(document: Path, node_tools: Path) -> None:
    """The generated types pass the TypeScript compiler's strict checks."""
    types = document.parent / "types.ts"

    output_of(node_tools / "openapi-typescript", document, "-o", types, cwd=document.parent)
    output_of(node_tools / "tsc", "--noEmit", "--strict", types, cwd=document.parent)

    assert "create_turn" in types.read_text()


@asynccontextmanager
async def gateway_with_an_adapter(
    folder: Path, database: Path, inspector: AdapterInspector
) -> AsyncIterator[tuple[str, dict[str, str]]]:
    """The address of a gateway whose model has the name in the examples, and what each of `SENDERS` sends as a key."""
    shutil.copy(database, folder / "graftwork.db")
    model = write_model_folder(folder / "assistant")
    settings = replace(gateway_settings(folder, model), max_wrong_keys=1_000_000)  # schemathesis tries many wrong keys
    async with open_gateway(settings, inspector) as gateway:
        tenant = await gateway.tenant()
        await tenant.push_adapter("support")
        await gateway.anonymous.get("/openapi.json")  # builds it, which a busy machine may not do in time for a tool
        keys = {"tenant": tenant.key, "admin": ADMIN_KEY, "person": await token_of_person(gateway, tenant.id)}
        async with gateway_on_port(gateway) as url:
            yield url, keys


@pytest.mark.parametrize("who", SENDERS)
async def test_schemathesis_finds_nothing(
    who: str, tmp_path: Path, sqlite_template: Path, inspector: AdapterInspector, python_tools: Path
) -> None:
    """Schemathesis' checks hold for 2,000 valid and invalid requests at least, to every operation: no answer is a 5xx or
    has a status that is not in the document.
    """
    choice, paths, at_least = SENDERS[who]
    async with gateway_with_an_adapter(tmp_path, sqlite_template, inspector) as (url, keys):
        command: tuple[Any, ...] = (
            *(python_tools / "schemathesis", "--config-file", CONFIG, "run", f"{url}/openapi.json"),
            *("--header", f"Authorization: Bearer {keys[who]}", choice, paths, "--max-examples", MAX_EXAMPLES),
            *("--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--generation-deterministic"),
            *("--suppress-health-check", "too_slow"),  # which a busy machine is, and the server's answers are not
        )
        output = await asyncio.to_thread(output_of, *command, cwd=tmp_path)

    generated = re.search(r"(\d+) generated", output)
    assert generated is not None
    assert int(generated[1]) >= at_least
