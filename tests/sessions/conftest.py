"""A process with a session service, on a fresh database."""

from collections.abc import AsyncIterator

import pytest

from graftwork.platform.database import Database
from tests.sessions.session_process import SessionProcess, UnreliableDatabase


@pytest.fixture
async def process(sqlite_database: Database) -> SessionProcess:
    return SessionProcess(sqlite_database)


@pytest.fixture
async def process_on_either(database: Database) -> SessionProcess:
    """A process on SQLite, then one on PostgreSQL."""
    return SessionProcess(database)


@pytest.fixture
async def unreliable(database_url: str) -> AsyncIterator[UnreliableDatabase]:
    """A database that a test can delay or refuse: SQLite, then PostgreSQL."""
    database = UnreliableDatabase(database_url)
    yield database
    await database.close()
