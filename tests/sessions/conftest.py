"""A process with a session service, on a fresh database."""

import pytest

from graftwork.platform.database import Database
from tests.sessions.session_process import SessionProcess


@pytest.fixture
async def process(sqlite_database: Database) -> SessionProcess:
    return SessionProcess(sqlite_database)


@pytest.fixture
async def process_on_either(database: Database) -> SessionProcess:
    """A process on SQLite, then one on PostgreSQL."""
    return SessionProcess(database)
