"""Defines `graftwork db master-key`, which makes and rotates the master keys of tenants' encrypted data."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.api.cli.console.database import open_database
from graftwork.api.cli.console.flags import DatabaseUrl, DataDir

if TYPE_CHECKING:
    from graftwork.platform.database import Database

app = typer.Typer(
    no_args_is_help=True, help="The file of master keys, which encrypt the keys of tenants' files and rows."
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The file of master keys, with mode 0600.")]


@app.command()
def create(file: FileArgument) -> None:
    """Make a file with one master key. Whoever loses it loses all that is encrypted: keep a copy elsewhere.

    Example: graftwork db master-key create /etc/graftwork/master.key
    """
    from graftwork.platform.encryption.master_keys import MasterKeyFile

    made = MasterKeyFile.create(file)
    typer.echo(f"{file} has the master key {made.current_id}. Keep a copy of the file apart from the backups.")
    typer.echo(f"Next: export GRAFTWORK_MASTER_KEY_FILE={file}, start the server again, and run graftwork db encrypt.")


@app.command()
def rotate(file: FileArgument) -> None:
    """Add a master key to a file, for all that is wrapped from now on. The older ones stay, for backups need them.

    Example: graftwork db master-key rotate /etc/graftwork/master.key
    """
    from graftwork.platform.encryption.master_keys import MasterKeyFile

    made = MasterKeyFile.load(file).rotate()
    typer.echo(f"{file} has the new master key {made}. Give the file to all gateways and keep a copy.")
    typer.echo(f"Next: graftwork db master-key rewrap {file}")


@app.command()
def rewrap(file: FileArgument, data_dir: DataDir = None, database_url: DatabaseUrl = None) -> None:
    """Wrap the data keys of all tenants with the newest master key. What is encrypted stays as it is.

    Example: graftwork db master-key rewrap /etc/graftwork/master.key
    """
    number = asyncio.run(_rewrapped(open_database(data_dir, database_url), file))
    typer.echo(f"Wrapped {number} data keys anew.")


async def _rewrapped(database: "Database", file: Path) -> int:
    from graftwork.platform.clock import SystemClock
    from graftwork.platform.encryption.tenant_keys import open_tenant_keys

    try:
        await database.check_schema()
        return await (await open_tenant_keys(file, database, SystemClock())).rewrap()
    finally:
        await database.close()
