"""Defines `graftwork db encrypt`, which encrypts the content of rows from before encryption was switched on."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.database import open_database
from graftwork.api.cli.console.flags import DatabaseUrl, DataDir
from graftwork.api.cli.console.output import JsonFlag, show_json

if TYPE_CHECKING:
    from graftwork.platform.database import Database
    from graftwork.platform.encryption.older_rows import EncryptedTable


def encrypt(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file of master keys that the gateways use.")],
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    as_json: JsonFlag = False,
) -> None:
    """Encrypt transcripts and all other content from before encryption was on. Can be stopped, and run again.

    Start all gateways with the master keys first: what they write without them is not encrypted.

    Example: graftwork db encrypt /etc/graftwork/master.key
    """
    done = asyncio.run(_encrypted(open_database(data_dir, database_url), file))
    if as_json:
        return show_json([{"table": one.name, "encrypted": one.encrypted, "left": one.left} for one in done])
    left = sum(one.left for one in done)
    typer.echo(f"Encrypted the content of {sum(one.encrypted for one in done)} rows.")
    if left:
        typer.echo(f"{left} rows stay plain: those of deleted tenants, which are erased, and answers to operators.")
    return typer.echo("Next: VACUUM the database (PostgreSQL: VACUUM FULL), for free pages keep what was plain.")


async def _encrypted(database: "Database", file: Path) -> "list[EncryptedTable]":
    import graftwork.platform.batches.tables
    import graftwork.platform.tenancy.tables
    import graftwork.sessions.store.tables  # noqa: F401
    from graftwork.api.cli.bench.progress import LiveProgress
    from graftwork.platform.clock import SystemClock
    from graftwork.platform.encryption.older_rows import encrypt_older_rows, tables_with_content
    from graftwork.platform.encryption.row_keys import encrypt_rows
    from graftwork.platform.encryption.tenant_keys import open_tenant_keys

    try:
        await database.check_schema()
        clock = SystemClock()
        encrypt_rows(database, await open_tenant_keys(file, database, clock), clock)
        with LiveProgress() as progress:

            def show(table: str, done: int, total: int) -> None:
                progress.update(table, f"{done} of {total} rows")

            return await encrypt_older_rows(database, tables_with_content(), show)
    finally:
        await database.close()
