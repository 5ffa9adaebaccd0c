"""Tests of the help of every command, and of what a start loads."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from graftwork.api.cli.main import build_app
from tests.api.cli.conftest import Graftwork

COMMANDS = """serve|gateway|engine|probe|demo|doctor|completion|top|ask|models|fleet start|fleet status|fleet scale|fleet upgrade|fleet stop|
bench throughput|bench fairness|bench sessions|bench soak|bench chaos|plan|model check|usage|usage export|usage check|trace|audit|
db upgrade|db downgrade|db current|db export-usage|db erasures list|db erasures apply|db master-key create|db master-key rotate|db master-key rewrap|db encrypt|
tenants create|tenants list|tenants show|tenants suspend|tenants resume|tenants delete|tenants erasure|tenants export|tenants retention|
keys create|keys list|keys rotate|keys revoke|login|logout|whoami|members|people list|people show|people add|people grant|
people revoke|people suspend|people resume|people delete|quotas show|quotas set|prices show|prices set|modes show|modes set|modes clear|replicas list|
replicas drain|adapters push|adapters uploads list|adapters uploads cancel|adapters list|adapters show|adapters change|adapters promote|adapters rollback|adapters history|adapters delete|adapters restore|
adapters rollouts start|adapters rollouts list|adapters rollouts show|adapters rollouts cancel|adapters verify|
sessions list|sessions show|sessions chat|sessions close|
batches submit|batches list|batches show|batches cancel|batches results|
organisations create|organisations list|organisations show|organisations rename|organisations delete|organisations tenants|
organisations add|organisations remove|webhooks set|webhooks show|webhooks delete""".replace("\n", "").split("|")


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


DIFFERENT = {
    "--agents": 2,  # agents of sessions, and of the chaos
    "--alias": 2,  # of a push, and of a roll-out
    "--currency": 2,  # of prices, and of budgets
    "--demo": 2,  # to serve the model, and to check an adapter against it
    "--dtype": 2,  # to plan for, and to load
    "--expires-at": 2,  # of a key, and of its successor
    "--from": 2,  # prices, and usage
    "--html": 2,  # a page of a benchmark, and of usage
    "--key": 2,  # to send, and whose limits are meant
    "--limit": 2,  # sessions, and audit entries
    "--model": 3,  # a folder, a folder that needs no weights, and a name
    "--name": 4,  # a fleet, a key, an adapter, and a part of its name
    "--outstanding": 2,  # while the capacity is measured, and all the time
    "--output": 2,  # tokens of a request, and a file
    "--plot": 2,  # charts, and bars
    "--png": 2,
    "--replicas": 2,  # of one machine, and of a cluster
    "--seconds": 2,  # of one phase and of a longer one
    "--tag": 2,  # to set, and to filter by
    "--temperature": 2,  # of a question, and of a session
    "--tenant": 5,  # traced, with prices shown, with prices set, with usage, and to act in
    "--url": 2,  # to measure, and to sign in at
    "--user": 2,  # whose limits are meant, and in whose limit an adapter counts
}
"""The flags that mean different things in different commands, and how many. Every other flag is stated once."""


def test_a_flag_is_the_same_in_all_commands() -> None:
    """A flag has one help text, one default and one form in all commands, if no other meaning is listed."""
    forms: dict[str, set[str]] = {}
    for command in ALL.values():
        for parameter in command.params:
            told = (parameter.help, parameter.default, parameter.metavar, parameter.min, parameter.max, parameter.opts)
            for flag in parameter.opts:
                if flag.startswith("--"):
                    forms.setdefault(flag, set()).add(repr(told))

    assert {flag: len(found) for flag, found in forms.items() if len(found) > 1} == DIFFERENT


DATA = [
    name
    for name in COMMANDS
    if name.split()[0] in ("tenants", "keys", "quotas", "people", "prices", "adapters", "audit")
]
DATA += [
    "usage",
    "plan",
    "sessions list",
    "sessions show",
    "sessions close",
    "db current",
    "demo",
    "login",
    "whoami",
    "members",
]


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


def test_a_command_imports_its_own_module_alone() -> None:
    """`graftwork tenants list` imports the SDK, no other group of commands, and nothing of the server."""
    program = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); from graftwork.api.cli.main import main; main()"
    environment = {**os.environ, "GRAFTWORK_URL": "http://127.0.0.1:9", "GRAFTWORK_ADMIN_KEY": "gwa_key"}

    done = subprocess.run(
        [sys.executable, "-c", program, "tenants", "list"],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )

    modules = done.stdout.split()
    groups = {name for name in modules if name.startswith(("graftwork.api.cli.admin.", "graftwork.api.cli.commands."))}
    assert "No Graftwork server" in done.stderr
    assert groups == {"graftwork.api.cli.admin.tenants", "graftwork.api.cli.commands.completion"}
    assert not {"torch", "numpy", "grpc", "sqlalchemy", "fastapi", "tokenizers"} & set(modules)


def test_a_command_after_an_option_is_found(tmp_path: Path) -> None:
    """An option before the command is no command: all commands are there to choose from."""
    config = tmp_path / "graftwork.toml"
    config.write_text("")
    program = [sys.executable, "-m", "graftwork.api.cli.main"]

    done = subprocess.run(
        [*program, "--config", str(config), "tenants", "--help"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert "graftwork tenants" in done.stdout


def test_an_unknown_command_is_told_from_its_neighbours() -> None:
    """A misspelt command is a usage error that names the one that was meant."""
    done = subprocess.run(
        [sys.executable, "-m", "graftwork.api.cli.main", "tenant"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 2
    assert "Did you mean 'tenants'" in done.stderr
