"""Tests of reads of a few rows, which run on the event loop's own thread where the database is a SQLite file."""

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, make_url, text
from sqlalchemy.exc import IntegrityError

from graftwork.platform.database import Database, MustWait, ReadSession, WriteSession, may_wait
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


async def test_a_whole_write_is_kept_or_undone(database: Database) -> None:
    """On both databases a whole write is there after its call, one that fails changes nothing, and results come back."""

    async def work(session: WriteSession) -> int:
        for number in range(3):
            await session.execute(INSERT, {"id": f"ten_{number}"})
        return len(await tenant_ids(session))

    async def failing(session: WriteSession) -> None:
        await session.execute(INSERT, {"id": "ten_lost"})
        raise InterruptedError

    found = await database.write_whole(work)
    with pytest.raises(InterruptedError):
        await database.write_whole(failing)
    with pytest.raises(IntegrityError):
        await database.write_whole(work)

    assert found == 3
    assert await database.read_few(tenant_ids) == ["ten_0", "ten_1", "ten_2"]


async def test_a_whole_write_on_sqlite_runs_on_one_other_thread(sqlite_database: Database) -> None:
    """All statements of a whole write, and its Python, run on one thread, which is not the event loop's."""
    threads: set[str] = set()

    async def work(session: WriteSession) -> None:
        threads.add(threading.current_thread().name)
        await session.execute(INSERT, {"id": "ten_0"})
        threads.add(threading.current_thread().name)

    await sqlite_database.write_whole(work)

    assert len(threads) == 1
    assert threading.current_thread().name not in threads


async def test_whole_writes_and_blocks_take_turns(sqlite_database: Database) -> None:
    """Whole writes beside blocks lose nothing, and all end before SQLite would give up waiting for a lock."""

    async def whole(number: int) -> None:
        async def work(session: WriteSession) -> None:
            await session.execute(INSERT, {"id": f"whole_{number:02}"})

        await sqlite_database.write_whole(work)

    async def block(number: int) -> None:
        async with sqlite_database.write() as session:
            await session.execute(INSERT, {"id": f"block_{number:02}"})

    async with asyncio.timeout(20):  # SQLite waits for a lock for 30 seconds
        await asyncio.gather(*(one(number) for number in range(20) for one in (whole, block)))

    assert len(await sqlite_database.read_few(tenant_ids)) == 40


async def test_a_cancelled_whole_write_has_ended_when_its_caller_has(sqlite_database: Database) -> None:
    """A caller that is cancelled waits for the end of its transaction, so the next writer finds the file free."""
    begun, goes_on = threading.Event(), threading.Event()

    async def work(session: WriteSession) -> None:
        await session.execute(INSERT, {"id": "ten_0"})
        begun.set()
        goes_on.wait(20)

    running = asyncio.create_task(sqlite_database.write_whole(work))
    assert await asyncio.to_thread(begun.wait, 20)
    running.cancel()
    await asyncio.sleep(0)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert await sqlite_database.read_few(tenant_ids) == ["ten_0"]
    async with asyncio.timeout(20), sqlite_database.write() as session:
        await session.execute(INSERT, {"id": "ten_1"})


async def test_a_whole_write_that_awaits_something_else_is_refused(sqlite_database: Database) -> None:
    """A whole write that waits for anything but its session fails, and is undone."""

    async def work(session: WriteSession) -> None:
        await session.execute(INSERT, {"id": "ten_0"})
        await asyncio.sleep(0)

    with pytest.raises(AssertionError, match="nothing but its session"):
        await sqlite_database.write_whole(work)

    assert await sqlite_database.read_few(tenant_ids) == []


async def test_a_whole_write_that_must_wait_begins_again(database: Database) -> None:
    """What must wait is undone, and its work is called again where it may: on the event loop's thread."""
    waits: list[tuple[bool, str]] = []

    async def work(session: WriteSession) -> str:
        waits.append((may_wait(session), threading.current_thread().name))
        await session.execute(INSERT, {"id": f"ten_{len(waits)}"})
        if not may_wait(session):
            raise MustWait
        await asyncio.sleep(0)
        return "done"

    found = await database.write_whole(work)

    assert found == "done"
    assert waits[-1] == (True, threading.current_thread().name)
    assert await database.read_few(tenant_ids) == [f"ten_{len(waits)}"]


async def test_a_whole_write_finds_what_is_attached(sqlite_database: Database) -> None:
    """What is attached to the sessions of a database is there in a whole write too, on its own thread."""
    sqlite_database.session_info["attached"] = "something"

    async def work(session: WriteSession) -> tuple[object, bool, str]:
        return session.info["attached"], may_wait(session), threading.current_thread().name

    found, waits, thread = await sqlite_database.write_whole(work)

    assert (found, waits) == ("something", False)
    assert thread != threading.current_thread().name
