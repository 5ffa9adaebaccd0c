"""A process with a session service, on a fresh database. Each test runs with plain rows, and with encrypted ones."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from graftwork.platform.database import Database
from tests.encrypted_rows import with_encrypted_rows
from tests.sessions.session_process import SessionProcess, UnreliableDatabase


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def rows_are_encrypted(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
async def sqlite_database(sqlite_database: Database, rows_are_encrypted: bool, tmp_path: Path) -> Database:
    return _in_mode(sqlite_database, rows_are_encrypted, tmp_path)


@pytest.fixture
async def database(database: Database, rows_are_encrypted: bool, tmp_path: Path) -> Database:
    return _in_mode(database, rows_are_encrypted, tmp_path)


@pytest.fixture
async def process(sqlite_database: Database) -> SessionProcess:
    return SessionProcess(sqlite_database)


@pytest.fixture
async def process_on_either(database: Database) -> SessionProcess:
    """A process on SQLite, then one on PostgreSQL."""
    return SessionProcess(database)


@pytest.fixture
async def unreliable(database_url: str, rows_are_encrypted: bool, tmp_path: Path) -> AsyncIterator[UnreliableDatabase]:
    """A database that a test can delay or refuse: SQLite, then PostgreSQL."""
    database = UnreliableDatabase(database_url)
    _in_mode(database, rows_are_encrypted, tmp_path)
    yield database
    await database.close()


def _in_mode(database: Database, encrypts: bool, folder: Path) -> Database:
    if encrypts:
        with_encrypted_rows(database, folder)
    return database
