"""Tests of transactions on both databases."""

import asyncio
import threading
from pathlib import Path

import pytest
from sqlalchemy import text

from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable

INSERT = text(
    "INSERT INTO tenants (id, name, status, weight, service_tier_ceiling, created_at)"
    " VALUES (:id, 'a', 'active', :weight, 'default', 0)"
)


class Interrupted(Exception):
    """Any error inside a block."""


def join_connection_threads() -> None:
    """aiosqlite does not wait for the thread of a connection that failed; it must not outlive the test's loop."""
    for thread in threading.enumerate():
        if "_connection_worker_thread" in thread.name:
            thread.join(timeout=60)


async def count_tenants(database: Database) -> int:
    async with database.read() as session:
        return int((await session.scalar(text("SELECT count(*) FROM tenants"))) or 0)


async def test_a_write_is_kept_when_its_block_ends_well(database: Database) -> None:
    """A block that ends commits all of it; a block that raises leaves nothing."""
    async with database.write() as session:
        await session.execute(INSERT, {"id": "ten_1", "weight": 1.0})

    async def interrupted_write() -> None:
        async with database.write() as session:
            await session.execute(INSERT, {"id": "ten_2", "weight": 1.0})
            raise Interrupted

    with pytest.raises(Interrupted):
        await interrupted_write()
    assert await count_tenants(database) == 1


async def test_a_cancelled_write_leaves_nothing(database: Database) -> None:
    """Cancelling a task inside its block rolls back, and the next writer gets in."""
    inside = asyncio.Event()

    async def write_and_wait() -> None:
        async with database.write() as session:
            await session.execute(INSERT, {"id": "ten_1", "weight": 1.0})
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(write_and_wait())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async with database.write() as session:
        await session.execute(INSERT, {"id": "ten_2", "weight": 1.0})
    assert await count_tenants(database) == 1


async def test_what_is_written_in_a_read_is_undone(database: Database) -> None:
    """A read block rolls back everything written in it."""
    async with database.read() as session:
        await session.execute(INSERT, {"id": "ten_1", "weight": 1.0})

    assert await count_tenants(database) == 0


async def test_reads_do_not_wait_for_a_writer(database: Database) -> None:
    """During a write block another block reads what was committed before."""
    async with database.write() as session:
        await session.execute(INSERT, {"id": "ten_1", "weight": 1.0})
        assert await count_tenants(database) == 0

    assert await count_tenants(database) == 1


async def test_concurrent_writers_lose_no_update(sqlite_database: Database) -> None:
    """On SQLite no other write comes between the read and the write of one block."""
    async with sqlite_database.write() as session:
        await session.execute(INSERT, {"id": "ten_1", "weight": 0.0})

    async def add_one() -> None:
        async with sqlite_database.write() as session:
            weight = await session.scalar(text("SELECT weight FROM tenants"))
            await asyncio.sleep(0)
            await session.execute(text("UPDATE tenants SET weight = :weight"), {"weight": (weight or 0) + 1})

    await asyncio.gather(*(add_one() for _ in range(50)))

    async with sqlite_database.read() as reading:
        assert await reading.scalar(text("SELECT weight FROM tenants")) == 50


async def test_two_processes_lose_no_update(sqlite_database: Database, tmp_path: Path) -> None:
    """A write block takes SQLite's lock first, so two independent connections lose no update."""
    other = Database(f"sqlite+aiosqlite:///{tmp_path / 'graftwork.db'}")
    async with sqlite_database.write() as session:
        await session.execute(INSERT, {"id": "ten_1", "weight": 0.0})

    async def add_one(database: Database) -> None:
        async with database.write() as session:
            weight = await session.scalar(text("SELECT weight FROM tenants"))
            await session.execute(text("UPDATE tenants SET weight = :weight"), {"weight": (weight or 0) + 1})

    await asyncio.gather(*(add_one(database) for _ in range(10) for database in (sqlite_database, other)))

    async with other.read() as reading:
        assert await reading.scalar(text("SELECT weight FROM tenants")) == 20
    await other.close()


async def test_a_write_inside_a_write_is_caught(sqlite_database: Database) -> None:
    """On SQLite a write block within a write block fails at once."""
    async with sqlite_database.write():
        with pytest.raises(AssertionError, match="inside"):
            async with sqlite_database.write():
                pass


async def test_foreign_keys_are_enforced(sqlite_database: Database) -> None:
    """Deleting a row deletes the rows that refer to it, on SQLite too."""
    async with sqlite_database.write() as session:
        await session.execute(INSERT, {"id": "ten_1", "weight": 1.0})
        await session.execute(text("INSERT INTO quotas (tenant_id) VALUES ('ten_1')"))
        await session.execute(text("DELETE FROM tenants"))
        assert await session.scalar(text("SELECT count(*) FROM quotas")) == 0


@pytest.mark.parametrize(
    "url", ["postgresql+asyncpg://nobody@127.0.0.1:1/none", "sqlite+aiosqlite:////nowhere/at/all.db"]
)
async def test_a_database_that_is_away_is_not_our_bug(url: str) -> None:
    """A database that cannot be reached is a 503 with a retry-after."""
    database = Database(url)

    for block in (database.read, database.write):
        with pytest.raises(Unavailable) as caught:
            async with block():
                pass
        assert caught.value.should_retry
    await database.close()
    await asyncio.to_thread(join_connection_threads)
