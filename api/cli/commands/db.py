"""Defines `graftwork db`, which upgrades or downgrades the database's schema, and shows its revision."""

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.admin import erasures, master_keys, older_rows
from graftwork.api.cli.console.database import open_database
from graftwork.api.cli.console.flags import DatabaseUrl, DataDir
from graftwork.api.cli.console.output import JsonFlag, YesFlag, confirm, show_facts, show_json

if TYPE_CHECKING:
    from graftwork.platform.database import Database

app = typer.Typer(no_args_is_help=True, help="The database's schema. `serve` brings its own database forward itself.")


app.add_typer(erasures.app, name="erasures")
app.add_typer(master_keys.app, name="master-key")
app.command()(older_rows.encrypt)


@app.command()
def upgrade(data_dir: DataDir = None, database_url: DatabaseUrl = None) -> None:
    """Bring the database to the newest schema. If the database has no schema yet, create one.

    Example: graftwork db upgrade --database-url postgresql://graftwork@db/graftwork
    """
    asyncio.run(_upgrade(open_database(data_dir, database_url)))


@app.command()
def downgrade(
    revision: Annotated[str, typer.Argument(help="The revision to go back to, such as 0001_tenancy, or base.")],
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    yes: YesFlag = False,
) -> None:
    """Take the database's schema back to a revision. The rows of tables that are newer than this revision are lost.

    Example: graftwork db downgrade 0001_tenancy --yes
    """
    confirm(f"Go back to {revision}, and lose what newer tables hold?", yes)
    asyncio.run(_downgrade(open_database(data_dir, database_url), revision))


@app.command()
def current(data_dir: DataDir = None, database_url: DatabaseUrl = None, as_json: JsonFlag = False) -> None:
    """Show which schema the database has, and which is the newest.

    Example: graftwork db current
    """
    revision, head = asyncio.run(_revisions(open_database(data_dir, database_url)))
    if as_json:
        return show_json({"current": revision, "head": head, "up_to_date": revision == head})
    return show_facts([("current", revision or "nothing yet"), ("head", head)])


async def _upgrade(database: "Database") -> None:
    try:
        await database.upgrade_to_head()
        typer.echo(f"The database is at {await database.current_revision()}.")
    finally:
        await database.close()


async def _downgrade(database: "Database", revision: str) -> None:
    try:
        await database.downgrade(revision)
        typer.echo(f"The database is at {await database.current_revision() or 'nothing'}.")
    finally:
        await database.close()


async def _revisions(database: "Database") -> tuple[str | None, str | None]:
    try:
        return await database.current_revision(), database.head_revision()
    finally:
        await database.close()


@app.command(name="export-usage")
def export_usage(
    output: Annotated[
        Path, typer.Argument(help="The file to write; its end says the format: .csv, .jsonl or .parquet.")
    ],
    start: Annotated[str | None, typer.Option("--from", help="First moment, ISO 8601 or unix seconds.")] = None,
    end: Annotated[
        str | None, typer.Option("--to", help="Last moment, ISO 8601 or unix seconds (default: now).")
    ] = None,
    tenant_id: Annotated[str | None, typer.Option(help="The id of one tenant (default: all).")] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Write the usage of each request to a file, one row a request. By default of the last 30 days.

    Example: graftwork db export-usage november.parquet --from 2026-11-01 --to 2026-12-01
    """
    asyncio.run(_export_usage(open_database(data_dir, database_url), output, (start, end), tenant_id))


async def _export_usage(
    database: "Database", output: Path, times: tuple[str | None, str | None], tenant_id: str | None
) -> None:
    from graftwork.api.cli.bench.progress import LiveProgress
    from graftwork.api.schemas.usage import span
    from graftwork.platform.clock import SystemClock
    from graftwork.platform.errors import InvalidRequest
    from graftwork.platform.ids import TenantId
    from graftwork.platform.ledger.upkeep.export import export_usage
    from graftwork.platform.ledger.upkeep.export_files import ExportForm

    forms = {".csv": ExportForm.CSV, ".jsonl": ExportForm.JSON, ".parquet": ExportForm.PARQUET}
    if output.suffix not in forms:
        raise InvalidRequest(f"{output}: name a file that ends with {', '.join(forms)}.", param="output")
    try:
        await database.check_schema()
        within, tenant = span(*times, SystemClock().now()), None if tenant_id is None else TenantId(tenant_id)
        unfinished = output.with_name(f"{output.name}.part")
        with unfinished.open("wb") as file, LiveProgress() as progress:
            show = partial(progress.update, "export")
            total = await export_usage(database, file, forms[output.suffix], within, tenant, show)
        unfinished.rename(output)
    finally:
        await database.close()
    typer.echo(f"{total} requests written to {output}.")
