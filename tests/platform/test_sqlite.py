"""Tests of reads of a few rows, which run on the event loop's own thread where the database is a SQLite file."""

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, make_url, text

from graftwork.platform.database import Database, ReadSession
from graftwork.platform.errors import Unavailable
from graftwork.platform.sqlite import SqliteReads

INSERT = text(
    "INSERT INTO tenants (id, name, status, weight, service_tier_ceiling, created_at)"
    " VALUES (:id, 'a', 'active', 1.0, 'default', 0)"
)


async def tenant_ids(session: ReadSession) -> list[str]:
    return [row[0] for row in (await session.execute(text("SELECT id FROM tenants ORDER BY id"))).all()]


async def test_a_read_sees_what_was_committed_before_it(database: Database) -> None:
    """On both databases a read of a few rows finds each committed row at once, and none that was rolled back."""
    for number in range(3):
        async with database.write() as session:
            await session.execute(INSERT, {"id": f"ten_{number}"})
        assert await database.read_few(tenant_ids) == [f"ten_{one}" for one in range(number + 1)]

    async def interrupted_write() -> None:
        async with database.write() as session:
            await session.execute(INSERT, {"id": "ten_lost"})
            raise InterruptedError

    with pytest.raises(InterruptedError):
        await interrupted_write()
    assert len(await database.read_few(tenant_ids)) == 3


async def test_a_sqlite_file_is_read_on_the_callers_thread(sqlite_database: Database) -> None:
    """A read of a few rows runs on this thread, and one in a block does not."""
    threads: list[str] = []

    def note(connection: Any, *_rest: Any) -> None:
        threads.append(type(connection.connection.dbapi_connection).__module__)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        await sqlite_database.read_few(tenant_ids)
    finally:
        event.remove(Engine, "before_cursor_execute", note)

    assert threads == ["sqlite3"]


async def test_a_locked_file_is_waited_for_on_another_thread(sqlite_database: Database, tmp_path: Path) -> None:
    """While another connection locks the file, the event loop goes on, and the read ends when the lock does."""
    locker = sqlite3.connect(tmp_path / "graftwork.db", isolation_level=None)
    locker.execute("PRAGMA locking_mode = EXCLUSIVE")
    locker.execute("BEGIN EXCLUSIVE")

    reading = asyncio.create_task(sqlite_database.read_few(tenant_ids))
    await asyncio.sleep(0)
    assert not reading.done()
    locker.execute("COMMIT")
    locker.close()

    assert await reading == []


async def test_no_lock_is_waited_for_on_the_callers_thread(sqlite_database: Database) -> None:
    """The connection of these reads gives up at once where the other connections wait for half a minute."""

    async def patience_ms(session: ReadSession) -> int:
        return int((await session.execute(text("PRAGMA busy_timeout"))).scalar_one())

    async with sqlite_database.read() as session:
        waits = await patience_ms(session)

    assert (await sqlite_database.read_few(patience_ms), waits) == (0, 30_000)


async def test_only_files_are_read_here() -> None:
    """A database in memory and one on a server have no such reads."""
    addresses = ["sqlite+aiosqlite://", "sqlite+aiosqlite:///:memory:", "postgresql+asyncpg://user@host/name"]

    assert [SqliteReads.of(make_url(address)) for address in addresses] == [None] * 3


async def test_a_read_that_waits_is_a_mistake(sqlite_database: Database) -> None:
    """A read that does more than one statement's work is refused, and not left unfinished."""

    async def wait(session: ReadSession) -> list[str]:
        await asyncio.sleep(0)
        return await tenant_ids(session)

    with pytest.raises(AssertionError, match="must not wait"):
        await sqlite_database.read_few(wait)


async def test_a_file_that_is_no_database_is_told_as_before(tmp_path: Path) -> None:
    """A file that cannot be opened is a 503, like every read."""
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/no/such/folder/file.db")

    with pytest.raises(Unavailable):
        await database.read_few(tenant_ids)
    await database.close()
    for thread in threading.enumerate():  # aiosqlite does not wait for the thread of a connection that failed to open
        if "_connection_worker_thread" in thread.name:
            await asyncio.to_thread(thread.join)
