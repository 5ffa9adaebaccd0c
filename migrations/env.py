"""How Alembic reaches the database: on the connection it is given, or on its own from the settings.

`Database.upgrade_to_head` gives a connection and runs what is written in `versions/`, which needs no models.
The `alembic` program gives none; it may be asked to compare, so every room's tables are loaded for it.
"""

import asyncio

from alembic import context
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine

from graftwork.platform.database import Base
from graftwork.platform.settings import Settings


def run_on(connection: Connection) -> None:
    """Run what was asked for in the connection's transaction."""
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


async def run_on_the_settings_database() -> None:
    """Connect to the database that `GRAFTWORK_DATABASE_URL` names, or to the one in the data folder."""
    import graftwork.adapters.registry.tables
    import graftwork.platform.tenancy.tables
    import graftwork.sessions.store.tables  # noqa: F401

    engine = create_async_engine(Settings.from_environment().resolved_database_url)
    async with engine.begin() as connection:
        await connection.run_sync(run_on)
    await engine.dispose()


given: Connection | None = context.config.attributes.get("connection")
if given is not None:
    run_on(given)
else:
    asyncio.run(run_on_the_settings_database())
