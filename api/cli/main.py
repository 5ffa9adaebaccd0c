"""Builds the program `graftwork`, which serves, operates and uses Graftwork.

Owns the order of the commands. Never defines a command: the modules in `commands/` do. The exit status is 0 after
success, 1 after a failure, 2 for wrong usage, and 75 for an engine that lost its device and must be started again.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

import graftwork
from graftwork.api.cli.admin import keys, modes, organisations, people, prices, quotas, replicas, tenants, webhooks
from graftwork.api.cli.commands import adapters, batches, bench, fleet, model, sessions, usage
from graftwork.api.cli.commands import db as database
from graftwork.api.cli.commands.ask import ask, models
from graftwork.api.cli.commands.completion import COMPLETE_VARIABLE, completion
from graftwork.api.cli.commands.demo import demo
from graftwork.api.cli.commands.doctor import doctor
from graftwork.api.cli.commands.login import login, logout, whoami
from graftwork.api.cli.commands.plan import plan
from graftwork.api.cli.commands.server import engine, gateway, probe, serve
from graftwork.api.cli.commands.timeline import trace
from graftwork.api.cli.commands.top import top
from graftwork.api.cli.commands.usage import audit
from graftwork.api.cli.console.config_file import load_config
from graftwork.api.cli.console.failures import CommandGroup

SERVER, ADMIN, TENANT = (
    "Run a server",
    "Administer one (GRAFTWORK_ADMIN_KEY)",
    "Use one (GRAFTWORK_API_KEY, or graftwork login)",
)


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


def build_app() -> typer.Typer:
    """Builds the whole command line. `--help` lists the commands in the order in which this function adds them."""
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
    for command in (serve, gateway, engine, probe, demo, doctor, completion):
        app.command(rich_help_panel=SERVER)(command)
    app.add_typer(database.app, name="db", rich_help_panel=SERVER)
    app.add_typer(fleet.app, name="fleet", rich_help_panel=SERVER)
    app.add_typer(bench.app, name="bench", rich_help_panel=SERVER)
    app.command(rich_help_panel=SERVER)(plan)
    app.add_typer(model.app, name="model", rich_help_panel=SERVER)
    admin = {
        "organisations": organisations,
        "tenants": tenants,
        "keys": keys,
        "people": people,
        "quotas": quotas,
        "webhooks": webhooks,
        "prices": prices,
        "modes": modes,
        "replicas": replicas,
    }
    for name, group in admin.items():
        app.add_typer(group.app, name=name, rich_help_panel=ADMIN)
    app.command(rich_help_panel=ADMIN)(audit)
    app.command(rich_help_panel=ADMIN)(top)
    for own in (login, logout, whoami, people.members):
        app.command(rich_help_panel=TENANT)(own)
    app.command(rich_help_panel=TENANT)(ask)
    app.command(rich_help_panel=TENANT)(models)
    app.add_typer(adapters.app, name="adapters", rich_help_panel=TENANT)
    app.add_typer(sessions.app, name="sessions", rich_help_panel=TENANT)
    app.add_typer(batches.app, name="batches", rich_help_panel=TENANT)
    app.add_typer(usage.app, name="usage", rich_help_panel=TENANT)
    app.command(rich_help_panel=TENANT)(trace)
    return app


def main() -> None:
    """Runs the command line. The installed program starts here."""
    if COMPLETE_VARIABLE in os.environ:  # a shell asks what could follow
        from typer.completion import completion_init  # type: ignore[attr-defined]  # Typer re-exports it

        completion_init()
    build_app()(prog_name="graftwork")


if __name__ == "__main__":
    main()
