"""Defines `graftwork modes`, which shows and sets what all requests must do without while the server has too much to do."""

from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.connect import connect
from graftwork.api.cli.console.output import JsonFlag, moment, show_facts, show_json

if TYPE_CHECKING:
    from graftwork.platform.answers.admin import Modes

app = typer.Typer(no_args_is_help=True, help="Degraded modes of a busy server. Needs GRAFTWORK_ADMIN_KEY.")


@app.command()
def show(as_json: JsonFlag = False) -> None:
    """Show the modes that are in force.

    Example: graftwork modes show
    """
    with connect() as client:
        _show(client.admin.modes.get(), as_json)


@app.command(name="set")
def set_modes(
    max_output_tokens: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The most tokens of one answer; 0 lifts the limit.")
    ] = None,
    suspend_drafts: Annotated[
        bool | None, typer.Option("--suspend-drafts/--allow-drafts", help="Generate without lookup drafts.")
    ] = None,
    refuse_flex: Annotated[
        bool | None, typer.Option("--refuse-flex/--serve-flex", help="Refuse requests of the tier flex.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Change the named modes, and keep the others. All gateways follow within a second.

    Example: graftwork modes set --max-output-tokens 256 --refuse-flex
    """
    if max_output_tokens is None and suspend_drafts is None and refuse_flex is None:
        raise typer.BadParameter("name at least one mode, such as --refuse-flex")
    with connect() as client:
        present = client.admin.modes.get()
        modes = client.admin.modes.set(
            max_output_tokens=present.max_output_tokens if max_output_tokens is None else max_output_tokens or None,
            suspend_drafts=present.suspend_drafts if suspend_drafts is None else suspend_drafts,
            refuse_flex=present.refuse_flex if refuse_flex is None else refuse_flex,
        )
    _show(modes, as_json)


@app.command()
def clear(as_json: JsonFlag = False) -> None:
    """Switch all modes off.

    Example: graftwork modes clear
    """
    with connect() as client:
        _show(client.admin.modes.set(), as_json)


def _show(modes: "Modes", as_json: bool) -> None:
    if as_json:
        return show_json(modes.raw)
    limit = modes.max_output_tokens
    return show_facts(
        [
            ("output tokens", "no limit" if limit is None else f"at most {limit} an answer"),
            ("drafts", "suspended" if modes.suspend_drafts else "allowed"),
            ("tier flex", "refused" if modes.refuse_flex else "served"),
            ("changed", "never" if modes.changed_at is None else moment(modes.changed_at)),
        ]
    )
