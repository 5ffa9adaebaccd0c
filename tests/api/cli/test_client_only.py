"""Tests of the command line where no package of the extra `server` is installed."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.api.cli.live_gateway import LiveGateway

ROOT = Path(__file__).parents[3]
WITHOUT = """
import json, sys
from importlib.machinery import PathFinder

absent = set(json.loads(sys.argv.pop(1)))

class ClientPackages(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = ClientPackages
from graftwork.api.cli.main import main
main()
"""
"""Runs the command line as if the modules in the first argument were not installed."""


LOADED = """
import sys
import graftwork, graftwork.api.cli.main
graftwork.Graftwork
graftwork.api.cli.main.build_app()
print(*(module.__file__ for name, module in sys.modules.items() if name.startswith("graftwork.") and module.__file__))
"""
"""Shows the files of the client and of the command line's `--help`."""


def client_requirements() -> list[Requirement]:
    """What the package requires without an extra."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    return [Requirement(line) for line in required]


def client_distributions() -> set[str]:
    """Graftwork, what it requires without an extra, and what those require in turn."""
    waiting = client_requirements()
    found = {"graftwork"}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += [Requirement(line) for line in requires(name) or ()]
    return found


@cache
def absent_modules() -> tuple[str, ...]:
    """Every top-level module that a client-only installation does not have."""
    present = client_distributions()
    return tuple(
        module
        for module, distributions in packages_distributions().items()
        if not present & {canonicalize_name(name) for name in distributions}
    )


def run_client(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(absent_modules()), *arguments],
        check=False,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        input="Hello?\n/quit\n",
    )


def test_the_client_requires_all_that_it_imports() -> None:
    """Every package that the client imports is in its own list of requirements."""
    files = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout.split()
    statements = [node for file in files for node in ast.parse(Path(file).read_text("utf-8")).body]
    names = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in statements if isinstance(node, ast.ImportFrom)}
    foreign = {
        canonicalize_name(name.split(".")[0]) for name in names if name.split(".")[0] not in sys.stdlib_module_names
    }

    assert {"httpx", "typer"} <= foreign <= {"graftwork", *(requirement.name for requirement in client_requirements())}


def test_the_server_is_absent() -> None:
    """The packages that these tests hide include the heavy ones and none of the client's."""
    absent = absent_modules()

    assert {"torch", "numpy", "fastapi", "uvicorn", "sqlalchemy", "grpc", "tokenizers", "redis"} <= set(absent)
    assert {"httpx", "typer", "rich", "graftwork"}.isdisjoint(absent)


@pytest.mark.parametrize(
    "command",
    ["serve --demo", "gateway --demo", "engine --demo", "demo", "db current", "adapters verify ."],
)
def test_a_server_command_says_what_to_install(command: str, tmp_path: Path) -> None:
    """A server command prints one line with the extra to install, with status 1 and no traceback."""
    done = run_client(*command.split(), GRAFTWORK_DATA_DIR=str(tmp_path))

    assert done.returncode == 1
    assert done.stderr.startswith("Error: This command needs the server: pip install 'graftwork[server]'")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["--help", "serve --help", "sessions chat --help"])
def test_help_needs_no_server(command: str) -> None:
    """Every command's help works without the server's packages."""
    done = run_client(*command.split())

    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("tenants list --json", '"acme"'),
        ("adapters push demo/adapters/pirate --name pirate", "the model has 2 layers"),
        ("sessions chat tiny", "The weather in Paris is sunny."),
        ("usage --json", '"data"'),
    ],
)
def test_a_client_command_works_against_a_server(command: str, shown: str, live: LiveGateway) -> None:
    """Each client command reaches the gateway and shows its answer."""
    done = run_client(
        *command.split(), GRAFTWORK_URL=live.url, GRAFTWORK_API_KEY=live.key, GRAFTWORK_ADMIN_KEY=live.admin_key
    )

    assert shown in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
