"""Runs migrations for Alembic, on a connection that the caller gives or on one from the settings.

`Database.upgrade_to_head` gives a connection. Then only the files in `versions/` are needed, and no models.
The `alembic` program gives no connection, so this module opens one. That program can also compare the models with the
database, so all tables are imported for it. Never writes a row itself.
Without a transaction of the caller, each revision is one of its own, because an index of a large table is built outside
of transactions (`online_indexes.py`). The caller must keep other processes out.
"""

import asyncio

from alembic import context
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine

from graftwork.platform.database import Base
from graftwork.platform.settings.settings import Settings


def run_on(connection: Connection) -> None:
    """Runs the requested migrations: in the connection's transaction, if one has begun, or else each in its own."""
    context.configure(
        connection=connection, target_metadata=Base.metadata, render_as_batch=True, transaction_per_migration=True
    )
    with context.begin_transaction():
        context.run_migrations()


async def run_on_the_settings_database() -> None:
    """Runs the requested migrations on the database of the settings.

    This is the database that `GRAFTWORK_DATABASE_URL` names, or else the one in the data folder.
    """
    import graftwork.adapters.registry.tables
    import graftwork.adapters.uploads.tables
    import graftwork.platform.alerts.tables
    import graftwork.platform.batches.tables
    import graftwork.platform.encryption.tables
    import graftwork.platform.exports.tables
    import graftwork.platform.ledger.tables
    import graftwork.platform.modes.tables
    import graftwork.platform.people.tables
    import graftwork.platform.retention.tables
    import graftwork.platform.tenancy.tables
    import graftwork.platform.tracing.tables
    import graftwork.sessions.store.tables  # noqa: F401

    engine = create_async_engine(Settings.from_environment().resolved_database_url)
    opened = engine.begin() if engine.dialect.name == "sqlite" else engine.connect()
    async with opened as connection:
        await connection.run_sync(run_on)
    await engine.dispose()


given: Connection | None = context.config.attributes.get("connection")
if given is not None:
    run_on(given)
else:
    asyncio.run(run_on_the_settings_database())
