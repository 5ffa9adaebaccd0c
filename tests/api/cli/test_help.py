"""Tests of the help of every command, and of what a start loads."""

import subprocess
import sys
from typing import Any

import pytest
import typer

from graftwork.api.cli.main import build_app
from tests.api.cli.conftest import Graftwork

COMMANDS = """serve|gateway|engine|probe|demo|top|fleet start|fleet status|fleet scale|fleet upgrade|fleet stop|
bench throughput|bench fairness|bench sessions|bench soak|bench chaos|plan|usage|usage export|audit|db upgrade|db downgrade|db current|
tenants create|tenants list|tenants show|tenants suspend|tenants resume|tenants delete|tenants erasure|
keys create|keys list|keys rotate|keys revoke|quotas show|quotas set|prices show|prices set|modes show|modes set|modes clear|replicas list|
replicas drain|adapters push|adapters list|adapters show|adapters promote|adapters rollback|adapters delete|adapters verify|
sessions list|sessions show|sessions chat|sessions close""".replace("\n", "").split("|")


def commands_of(group: Any, path: str = "") -> dict[str, Any]:
    """Every command below a group by its path."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        full = f"{path} {name}".strip()
        found |= commands_of(command, full) if hasattr(command, "commands") else {full: command}
        if getattr(command, "invoke_without_command", False):
            found[full] = command  # a group that is a command too
    return found


ALL = commands_of(typer.main.get_command(build_app()))


def test_the_commands_are_those_of_the_contract() -> None:
    """The program has exactly the commands of the contract."""
    assert sorted(ALL) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, graftwork: Graftwork) -> None:
    """Each command's help says what it does and has an example."""
    result = graftwork(*command.split(), "--help")

    assert result.exit_code == 0
    assert f"Example: graftwork {command}" in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command: str) -> None:
    """Every option has a help text."""
    silent = [parameter.name for parameter in ALL[command].params if not getattr(parameter, "help", None)]

    assert silent == []


DATA = [name for name in COMMANDS if name.split()[0] in ("tenants", "keys", "quotas", "prices", "adapters", "audit")]
DATA += ["usage", "plan", "sessions list", "sessions show", "sessions close", "db current", "demo"]


@pytest.mark.parametrize("command", DATA)
def test_data_commands_speak_json(command: str) -> None:
    """Every command that prints data has `--json`."""
    assert "--json" in [option for parameter in ALL[command].params for option in parameter.opts]


@pytest.mark.parametrize(
    "command",
    ["tenants suspend", "tenants delete", "keys rotate", "keys revoke", "adapters delete", "sessions close"],
)
def test_destructive_commands_ask_first(command: str, graftwork: Graftwork, unreachable: str) -> None:
    """Without a yes a destructive command sends nothing and ends with status 1; `--yes` does not ask."""
    arguments = [*command.split(), "it", *(["key"] if command.startswith("keys") else [])]

    refused = graftwork(*arguments, input="n\n")
    agreed = graftwork(*arguments, "--yes")

    assert refused.exit_code == 1
    assert "No Graftwork server" not in refused.output
    assert "[y/N]" not in agreed.output
    assert "No Graftwork server" in agreed.output


def test_groups_without_a_command_show_their_help(graftwork: Graftwork) -> None:
    """A group without a command shows its help and ends as a usage error."""
    result = graftwork("tenants")

    assert result.exit_code == 2
    assert "create" in result.output


def test_starting_loads_nothing_heavy() -> None:
    """`graftwork --help` loads neither torch nor the libraries of server and client."""
    heavy = {"torch", "fastapi", "sqlalchemy", "pydantic", "httpx", "uvicorn", "numpy", "grpc", "alembic"}
    program = "import sys; from graftwork.api.cli.main import build_app; build_app(); print(*sorted(sys.modules))"

    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert heavy & set(output.split()) == set()
