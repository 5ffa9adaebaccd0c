"""Defines `graftwork db erasures`: the list of erased tenants, by which a restored backup is brought up to date."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.database import open_database
from graftwork.api.cli.console.flags import DatabaseUrl, DataDir
from graftwork.api.cli.console.output import JsonFlag, show_json

if TYPE_CHECKING:
    from graftwork.platform.database import Database
    from graftwork.platform.retention.erasure_list import AppliedErasures

app = typer.Typer(no_args_is_help=True, help="The list of deleted tenants, to erase them again in a restored backup.")


@app.command(name="list")
def write_list(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file (default: print).")
    ] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """List all deleted tenants. Keep the list apart from the backups: it is what they do not know.

    Example: graftwork db erasures list --output erasures.jsonl
    """
    text = asyncio.run(_listed(open_database(data_dir, database_url)))
    if output is None:
        return typer.echo(text, nl=False)
    draft = output.with_name(output.name + ".part")
    draft.write_text(text)
    draft.replace(output)
    return typer.echo(f"{output} has {text.count(chr(10)) - 1} deleted tenants.")


@app.command()
def apply(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A list that `db erasures list` has written."),
    ],
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete the tenants of a list again, in a restored backup, before a server starts. The server then erases them.

    Example: graftwork db erasures apply erasures.jsonl
    """
    applied = asyncio.run(_applied(open_database(data_dir, database_url), file))
    if as_json:
        return show_json({"deleted": applied.deleted, "again": applied.again, "unknown": applied.unknown})
    typer.echo(f"Deleted {applied.deleted} tenants that the backup still had; {applied.again} more are erased again.")
    typer.echo(f"{applied.unknown} tenants of the list are not in this database.")
    return typer.echo("Next: start the server; graftwork tenants erasure ID says when each is erased.")


async def _listed(database: "Database") -> str:
    from graftwork.platform.clock import SystemClock
    from graftwork.platform.retention.erasure_list import ErasureList

    try:
        return "".join([line async for line in ErasureList(database, SystemClock()).lines()])
    finally:
        await database.close()


async def _applied(database: "Database", file: Path) -> "AppliedErasures":
    from graftwork.platform.clock import SystemClock
    from graftwork.platform.retention.erasure_list import ErasureList

    try:
        await database.upgrade_to_head()
        with file.open() as lines:
            return await ErasureList(database, SystemClock()).apply(lines)
    finally:
        await database.close()
