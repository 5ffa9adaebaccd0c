"""Tests that indexes of large tables are built while others write, on PostgreSQL."""

import asyncio

import pytest
from sqlalchemy import text

from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable

pytestmark = pytest.mark.postgres

BEFORE, INDEX = "0030_event_retention", "ix_turns_finished_at_id"
ADD_SESSION = text(
    "INSERT INTO sessions (id, tenant_id, kind, status, model, settings, labels, epoch, cancel_requested, last_seq,"
    " created_at, updated_at) VALUES ('ses_1', 'ten_1', 'session', 'idle', '{}', '{}', '{}', 0, false, 0, 0, 0)"
)
ADD_TURN = text(
    "INSERT INTO turns (id, tenant_id, session_id, status, first_seq, input, created_at, finished_at)"
    " VALUES (:id, 'ten_1', 'ses_1', 'completed', 1, '[]', 0, 0)"
)
IS_COMPLETE = text(
    "SELECT i.indisvalid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE c.relname = :name"
)
IS_BUILT = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'CREATE INDEX%'"
    " AND wait_event_type = 'Lock'"
)


@pytest.fixture
async def old_database(postgres_url: str) -> Database:
    """A database right before the revision that adds the index, with a session."""
    database = Database(postgres_url)
    await database.upgrade_to_head()
    await database.downgrade(BEFORE)
    async with database.write() as session:
        await session.execute(ADD_SESSION)
    return database


async def is_complete(database: Database) -> bool | None:
    """Returns whether the index is complete; None if there is none."""
    async with database.read() as session:
        found: bool | None = await session.scalar(IS_COMPLETE, {"name": INDEX})
    return found


async def until_it_waits(database: Database) -> None:
    """Returns once the build of an index waits for a transaction."""
    async with asyncio.timeout(30):
        while True:
            async with database.read() as session:
                if await session.scalar(IS_BUILT):
                    return


async def test_a_writer_does_not_wait_for_an_index(old_database: Database) -> None:
    """While the build of an index waits for a long transaction, others write to the table at once."""
    try:
        async with old_database.write() as long:
            await long.execute(ADD_TURN, {"id": "turn_1"})
            upgrade = asyncio.create_task(old_database.upgrade_to_head())
            await until_it_waits(old_database)

            async with old_database.write() as short:
                await short.execute(text("SET LOCAL lock_timeout = '2s'"))
                await short.execute(ADD_TURN, {"id": "turn_2"})

            assert not upgrade.done()
        await upgrade

        assert await is_complete(old_database)
        assert await old_database.current_revision() == old_database.head_revision()
    finally:
        await old_database.close()


async def test_an_interrupted_build_is_done_again(old_database: Database) -> None:
    """A build that ends in the middle leaves an index that is not complete; the next upgrade builds it again."""
    try:
        async with old_database.write() as long:
            await long.execute(ADD_TURN, {"id": "turn_1"})
            upgrade = asyncio.create_task(old_database.upgrade_to_head())
            await until_it_waits(old_database)
            async with old_database.read() as other:
                await other.execute(
                    text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                        " AND query LIKE 'CREATE INDEX%'"
                    )
                )
            with pytest.raises(Unavailable):
                await upgrade
        interrupted = await is_complete(old_database), await old_database.current_revision()

        await old_database.upgrade_to_head()

        assert interrupted == (False, BEFORE)
        assert await is_complete(old_database)
    finally:
        await old_database.close()


async def test_gateways_that_start_at_once_build_one_index(old_database: Database) -> None:
    """A gateway that waits for its turn to upgrade is no transaction for which the build in another one waits."""
    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*(old_database.upgrade_to_head() for _ in range(4)))

        assert await is_complete(old_database)
    finally:
        await old_database.close()
