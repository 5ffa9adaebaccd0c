"""Tests of transactions on both databases."""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from graftwork.platform.database import Database, ReadSession
from graftwork.platform.errors import InvalidRequest, Unavailable
from tests.platform.ending_proxy import EndingProxy

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


async def test_a_write_cancelled_in_a_statement_keeps_no_lock(database: Database) -> None:
    """A write that is cancelled while the database computes is undone, and the next write need not wait for it."""
    long = text(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000000) SELECT i FROM n WHERE i > 1999990"
    )

    async def write() -> None:
        async with asyncio.timeout(0.2), database.write() as session:
            await session.execute(INSERT, {"id": "cancelled", "weight": 1})
            await session.execute(long)

    with pytest.raises(TimeoutError) as kept:  # the error keeps the statement's cursor
        await write()

    async with asyncio.timeout(20), database.write() as session:  # SQLite waits for a lock for 30 seconds
        await session.execute(INSERT, {"id": "next", "weight": 1})

    assert await count_tenants(database) == 1
    del kept


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


on_postgres = pytest.mark.parametrize(
    "database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True
)


BACKEND, END = text("SELECT pg_backend_pid()"), text("SELECT pg_terminate_backend(:id, 5000)")


async def cut_connection(database: Database, session: ReadSession) -> None:
    """Ends the session's connection from outside, as an operator or a restart of PostgreSQL does."""
    process_id = await session.scalar(BACKEND)
    async with database.read() as other:
        await other.execute(END, {"id": process_id})


async def write_tenants(database: Database, ids: Sequence[str], *, cut_after: int | None = None) -> None:
    """Adds tenants in one transaction. After `cut_after` of them, its connection is cut."""
    async with database.write() as session:
        for number, tenant_id in enumerate(ids, start=1):
            await session.execute(INSERT, {"id": tenant_id, "weight": 1.0})
            if number == cut_after:
                await cut_connection(database, session)


@on_postgres
@pytest.mark.parametrize("cut_after", [pytest.param(1, id="in a statement"), pytest.param(2, id="before the commit")])
async def test_a_connection_that_is_cut_in_a_write(database: Database, cut_after: int) -> None:
    """A cut connection is a 503, nothing is stored, and the next transaction gets a connection of its own."""
    with pytest.raises(Unavailable) as caught:
        await write_tenants(database, ["ten_1", "ten_2"], cut_after=cut_after)

    assert (caught.value.code, caught.value.should_retry) == ("database_unavailable", True)
    assert await count_tenants(database) == 0


@on_postgres
async def test_a_connection_that_is_cut_at_any_point(database: Database, database_url: str) -> None:
    """Wherever the end of a connection comes, also while it is made, a transaction is a 503 or done, and the next one
    gets a connection of its own."""
    proxy = EndingProxy()
    cut = Database(await proxy.start(database_url))
    written = list[str]()
    await write_tenants(cut, [])  # the first connection of all takes more steps
    await cut.close()

    for most_ready in itertools.count(1):
        proxy.most_ready, proxy.num_told = most_ready, 0
        for tenant_id in (f"ten_{most_ready}_new", f"ten_{most_ready}_pooled"):
            with suppress(Unavailable):
                await write_tenants(cut, [tenant_id])
                written.append(tenant_id)
        if not proxy.num_told:
            break
        proxy.most_ready = 0
        await write_tenants(cut, [f"ten_{most_ready}"])
        written.append(f"ten_{most_ready}")
        await cut.close()

    await cut.close()
    await proxy.close()
    assert most_ready > 5
    assert await count_tenants(database) == len(written)


async def tenant_ids(session: ReadSession) -> list[str]:
    return [row[0] for row in (await session.execute(text("SELECT id FROM tenants"))).all()]


@on_postgres
async def test_a_read_of_a_few_rows_takes_one_round_trip(database_url: str) -> None:
    """PostgreSQL answers it once; a read whose idle connection was cut is made again over another one."""
    proxy = EndingProxy()
    near = Database(await proxy.start(database_url))
    await write_tenants(near, ["ten_1"])
    assert await near.read_few(tenant_ids) == ["ten_1"]

    before = proxy.num_ready
    assert await near.read_few(tenant_ids) == ["ten_1"]
    assert proxy.num_ready == before + 1
    async with near.write() as session:
        others = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
        await session.execute(text(f"{others} AND pid <> pg_backend_pid()"))
    assert await near.read_few(tenant_ids) == ["ten_1"]

    await near.close()
    await proxy.close()


@on_postgres
async def test_a_connection_that_is_cut_in_a_read(database: Database) -> None:
    """A cut connection is a 503 for a reader too."""

    async def read() -> None:
        async with database.read() as session:
            await cut_connection(database, session)
            await session.scalar(text("SELECT 1"))

    with pytest.raises(Unavailable):
        await read()


@on_postgres
async def test_one_of_two_in_a_deadlock_is_told_to_try_again(database: Database) -> None:
    """PostgreSQL rolls one of two transactions back that wait for each other; it is a 503, and the other is stored."""
    await write_tenants(database, ["ten_1", "ten_2"])
    change = text("UPDATE tenants SET weight = weight + 1 WHERE id = :id")
    both_hold_one = asyncio.Barrier(2)

    async def change_both(*ids: str) -> None:
        async with database.write() as session:
            await session.execute(change, {"id": ids[0]})
            await both_hold_one.wait()
            await session.execute(change, {"id": ids[1]})

    outcomes = await asyncio.gather(
        change_both("ten_1", "ten_2"), change_both("ten_2", "ten_1"), return_exceptions=True
    )

    failed = [outcome for outcome in outcomes if outcome is not None]
    assert [type(error) for error in failed] == [Unavailable]
    async with database.read() as session:
        assert list(await session.scalars(text("SELECT weight FROM tenants ORDER BY id"))) == [2.0, 2.0]


@pytest.mark.postgres
async def test_a_stopped_process_keeps_no_lock(postgres_url: str) -> None:
    """A transaction in which its process does nothing loses its locks and is rolled back."""
    stopped, other = Database(postgres_url, max_idle_s=0.2), Database(postgres_url)
    await other.upgrade_to_head()
    async with other.write() as session:
        await session.execute(INSERT, {"id": "ten_1", "weight": 1.0})
    change = text("UPDATE tenants SET weight = weight + :more")

    async def stop_inside() -> None:
        async with stopped.write() as session:
            await session.execute(change, {"more": 10})
            async with other.write() as waiting:
                await waiting.execute(change, {"more": 1})

    with pytest.raises(Unavailable):
        await stop_inside()

    async with other.read() as reading:
        assert await reading.scalar(text("SELECT weight FROM tenants")) == 2.0
    await stopped.close()
    await other.close()


@pytest.mark.postgres
async def test_a_process_that_stops_inside_a_statement_keeps_no_lock(postgres_url: str) -> None:
    """A transaction whose process has sent the text of a statement, but not its values, is ended from outside. Others,
    such as one that only waits for a lock, go on."""
    stopped, other = Database(postgres_url, max_idle_s=0.2), Database(postgres_url)
    await other.upgrade_to_head()
    async with other.write() as session:
        await session.execute(INSERT, {"id": "ten_1", "weight": 1.0})
    change = text("UPDATE tenants SET weight = weight + :more")

    async def end_stopped() -> None:
        while not await stopped.end_stopped_transactions():
            continue

    async def stop_inside() -> None:
        async with stopped.write() as session:
            await session.execute(change, {"more": 10})
            driver = (await (await session.connection()).get_raw_connection()).driver_connection
            assert driver is not None
            await driver.prepare("SELECT weight FROM tenants WHERE id = $1")
            async with other.write() as waiting, asyncio.TaskGroup() as tasks:
                tasks.create_task(end_stopped())
                await waiting.execute(change, {"more": 1})

    with pytest.raises(Unavailable):
        async with asyncio.timeout(60):
            await stop_inside()

    async with other.read() as reading:
        assert await reading.scalar(text("SELECT weight FROM tenants")) == 2.0
    assert await stopped.end_stopped_transactions() == 0
    await stopped.close()
    await other.close()


async def test_a_broken_constraint_is_no_outage(database: Database) -> None:
    """An error of the caller stays what it is."""
    with pytest.raises(IntegrityError):
        await write_tenants(database, ["ten_1", "ten_1"])


@pytest.mark.parametrize("url", ["postgresql+asyncpg://nobody:secret@127.0.0.1:1/none", "sqlite+aiosqlite:///{file}"])
async def test_a_database_that_cannot_be_upgraded_says_why(url: str, tmp_path: Path) -> None:
    """At start, the reason and the address are told, without the password."""
    (tmp_path / "text.db").write_text("this is no database" * 100)
    database = Database(url.format(file=tmp_path / "text.db"))

    with pytest.raises(Unavailable, match="correct --database-url") as caught:
        await database.upgrade_to_head()
    await database.close()
    await asyncio.to_thread(join_connection_threads)

    assert "secret" not in caught.value.message
    assert "Connect call failed" in caught.value.message or "file is not a database" in caught.value.message


async def test_a_schema_of_a_newer_version_is_refused(sqlite_database: Database) -> None:
    """A revision that this code does not have is named, with what to do."""
    async with sqlite_database.write() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999_future'"))

    with pytest.raises(InvalidRequest, match=r"9999_future.*newer version"):
        await sqlite_database.upgrade_to_head()
