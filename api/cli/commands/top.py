"""Defines `graftwork top`, which shows what a server does now."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.api.cli.console.connect import connect
from graftwork.api.cli.console.output import JsonFlag, show_json, show_table
from graftwork.api.sdk.transport.errors import ConfigurationError

if TYPE_CHECKING:
    from graftwork.platform.answers.overview import Overview


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and end. Needs no terminal.")] = False,
    as_json: JsonFlag = False,
    sort: Annotated[
        str,
        typer.Option(
            help="The order of tenants and adapters: activity, running, waiting, requests, tokens, ttft, inter_token, "
            "refusals, burn or name."
        ),
    ] = "activity",
    find: Annotated[str, typer.Option(metavar="TEXT", help="Only rows whose name or id has this text.")] = "",
    rows: Annotated[int, typer.Option(help="The most rows of each table.", min=1, max=200)] = 50,
) -> None:
    """Watch engines, tenants, adapters and sessions. With a tenant's key: its own.

    Keys: 1 to 4 choose a table, s its order, / finds rows, n and b turn pages, enter shows a row, p pauses, q quits.

    Example: graftwork top
    """
    if once or as_json:
        return _print(sort, find, rows, as_json=as_json)
    try:
        from graftwork.api.cli.top.screen import Top, View
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "textual":
            raise
        raise ConfigurationError(
            "`graftwork top` needs Textual: pip install 'graftwork[top]'; --once does not."
        ) from error
    from graftwork.api.sdk.client import AsyncGraftwork

    client = AsyncGraftwork(max_retries=0)

    async def follow(query: dict[str, Any]) -> "AsyncGenerator[Overview, None]":
        watch = client.admin.watch_overview if client.has_admin_key else client.overview.watch
        async with watch(**query) as snapshots:
            async for overview in snapshots:
                yield overview

    screen = Top(follow, client.base_url, View(sort, find, rows))
    screen.run()
    if screen.refusal is not None:
        raise screen.refusal
    return None


def _print(sort: str, find: str, rows: int, *, as_json: bool) -> None:
    from graftwork.api.cli.top.panes import PANES, totals

    query: dict[str, Any] = {"sort": sort, "find": find or None, "rows": rows}
    with connect() as client:
        overview = client.admin.overview(**query) if client.has_admin_key else client.overview.get(**query)
    if as_json:
        return show_json(overview.raw)
    typer.echo(totals(overview))
    for pane in PANES:
        shown = pane.rows(overview)
        if shown:
            typer.echo()
            columns = [column.title for column in pane.columns]
            cells = [tuple(text.strip() for text in pane.cells(row, overview)) for row in shown]
            show_table(columns, cells, "")
    return None
