"""Tests of what only a SQLite file can do: open for the first time, be full, or be read-only."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import text

from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from tests.platform.test_database import count_tenants, write_tenants


async def test_gateways_that_open_a_new_file_at_once(tmp_path: Path) -> None:
    """SQLite fails at once, without a wait, where two connections switch a new file to a write-ahead log."""
    for number in range(40):
        databases = [Database(f"sqlite+aiosqlite:///{tmp_path}/{number}.db") for _ in range(4)]
        try:
            assert await asyncio.gather(*(one.current_revision() for one in databases)) == [None] * 4
        finally:
            for one in databases:
                await one.close()


async def test_a_full_disk(sqlite_database: Database) -> None:
    """A database that cannot grow is a 503 that names the cause; once there is room, it works again."""
    async with sqlite_database.read() as session:
        num_pages = int(await session.scalar(text("PRAGMA page_count")) or 0)
        await session.execute(text(f"PRAGMA max_page_count = {num_pages}"))

    with pytest.raises(Unavailable) as caught:
        await write_tenants(sqlite_database, [f"ten_{number}" for number in range(1000)])
    async with sqlite_database.read() as session:
        await session.execute(text("PRAGMA max_page_count = 1000000"))
    await write_tenants(sqlite_database, ["ten_1"])

    assert caught.value.code == "storage_full"
    assert await count_tenants(sqlite_database) == 1


async def test_a_database_that_only_reads(sqlite_database: Database) -> None:
    """A file system that became read-only is a 503."""
    async with sqlite_database.read() as session:
        await session.execute(text("PRAGMA query_only = ON"))

    with pytest.raises(Unavailable):
        await write_tenants(sqlite_database, ["ten_1"])
