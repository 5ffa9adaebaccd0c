"""Builds the program `graftwork`, which serves, operates and uses Graftwork.

Owns the order of the commands. Never defines a command: the modules in `commands/` and `admin/` do. A run imports the
module of its own command alone, and `--help` imports all. The exit status is 0 after success, 1 after a failure, 2 for
wrong usage, and 75 for an engine that lost its device and must be started again.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

import graftwork
from graftwork.api.cli.commands.completion import COMPLETE_VARIABLE
from graftwork.api.cli.console.config_file import load_config
from graftwork.api.cli.console.failures import CommandGroup

SERVER, ADMIN, TENANT = (
    "Run a server",
    "Administer one (GRAFTWORK_ADMIN_KEY)",
    "Use one (GRAFTWORK_API_KEY, or graftwork login)",
)


class _Command(NamedTuple):
    """A command, or a group of them: the panel of `--help` that shows it, and the module that defines it."""

    name: str
    panel: str
    module: str
    is_group: bool = False
    """Whether the command is the module's `app`. Else it is the function of its name."""

    def add_to(self, app: typer.Typer) -> None:
        """Imports the module, and adds the command to `app`."""
        module = import_module(f"graftwork.api.cli.{self.module}")
        if self.is_group:
            app.add_typer(module.app, name=self.name, rich_help_panel=self.panel)
        else:
            app.command(rich_help_panel=self.panel)(getattr(module, self.name))


_COMMANDS = (
    _Command("serve", SERVER, "commands.server"),
    _Command("gateway", SERVER, "commands.server"),
    _Command("engine", SERVER, "commands.server"),
    _Command("probe", SERVER, "commands.server"),
    _Command("demo", SERVER, "commands.demo"),
    _Command("doctor", SERVER, "commands.doctor"),
    _Command("completion", SERVER, "commands.completion"),
    _Command("db", SERVER, "commands.db", is_group=True),
    _Command("fleet", SERVER, "commands.fleet", is_group=True),
    _Command("bench", SERVER, "commands.bench", is_group=True),
    _Command("plan", SERVER, "commands.plan"),
    _Command("model", SERVER, "commands.model", is_group=True),
    _Command("organisations", ADMIN, "admin.organisations", is_group=True),
    _Command("tenants", ADMIN, "admin.tenants", is_group=True),
    _Command("keys", ADMIN, "admin.keys", is_group=True),
    _Command("people", ADMIN, "admin.people", is_group=True),
    _Command("quotas", ADMIN, "admin.quotas", is_group=True),
    _Command("webhooks", ADMIN, "admin.webhooks", is_group=True),
    _Command("prices", ADMIN, "admin.prices", is_group=True),
    _Command("modes", ADMIN, "admin.modes", is_group=True),
    _Command("replicas", ADMIN, "admin.replicas", is_group=True),
    _Command("audit", ADMIN, "commands.usage"),
    _Command("top", ADMIN, "commands.top"),
    _Command("login", TENANT, "commands.login"),
    _Command("logout", TENANT, "commands.login"),
    _Command("whoami", TENANT, "commands.login"),
    _Command("members", TENANT, "admin.people"),
    _Command("ask", TENANT, "commands.ask"),
    _Command("models", TENANT, "commands.ask"),
    _Command("adapters", TENANT, "commands.adapters", is_group=True),
    _Command("sessions", TENANT, "commands.sessions", is_group=True),
    _Command("batches", TENANT, "commands.batches", is_group=True),
    _Command("usage", TENANT, "commands.usage", is_group=True),
    _Command("trace", TENANT, "commands.timeline"),
)
"""In the order in which `--help` lists them."""


def show_version(wanted: bool) -> None:
    """Prints the version and ends the program, if `wanted`."""
    if wanted:
        typer.echo(f"graftwork {graftwork.__version__}")
        raise typer.Exit


def first(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and end.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The settings' file (default: ./graftwork.toml, or the one in ~/.config)."),
    ] = None,
) -> None:
    """Reads the file with settings before any command runs."""
    load_config(config)


def build_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """Builds the command line. `--help` lists the commands in the order in which this function adds them.

    If the first of the `arguments` is a command, adds only that one: the others would take longer than most commands do.
    """
    app = typer.Typer(
        cls=CommandGroup,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Serve one base model, many tenants' LoRA adapters, and agent sessions that last.\n\n"
        "First steps: `graftwork serve --demo` in one terminal; it prints keys to use in another.",
        epilog="Client commands read GRAFTWORK_URL (default http://127.0.0.1:8000) and the two keys, or graftwork.toml; or run `graftwork login`.",
    )
    app.callback()(first)
    wanted = [command for command in _COMMANDS if command.name in arguments[:1]]
    for command in wanted or _COMMANDS:
        command.add_to(app)
    return app


def main() -> None:
    """Runs the command line. The installed program starts here."""
    if COMPLETE_VARIABLE in os.environ:
        # A shell asks what could follow, and its words are not this program's arguments.
        from typer.completion import completion_init  # type: ignore[attr-defined]  # Typer re-exports it

        completion_init()
        build_app()(prog_name="graftwork")
    build_app(sys.argv[1:])(prog_name="graftwork")


if __name__ == "__main__":
    main()
