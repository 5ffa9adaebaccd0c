"""What tests of several rooms share: a clock moved by hand, and databases that begin upgraded and empty."""

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.settings.settings import async_database_url
from tests.hypothesis_profiles import register_profiles

pytest_plugins = ("tests.wall_limits",)

POSTGRES_URL = os.environ.get("GRAFTWORK_TEST_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
REDIS_URL = os.environ.get("GRAFTWORK_TEST_REDIS_URL", "redis://127.0.0.1:6379/0")

register_profiles()


EMPTY_EVERY_TABLE = """
    DO $$ BEGIN
        PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid();
        EXECUTE (SELECT 'TRUNCATE ' || string_agg(quote_ident(tablename), ', ')
            FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'alembic_version');
    END $$
"""


@pytest.fixture
def manual_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="session")
def postgres_server() -> str:
    """The address of a PostgreSQL where databases may be made."""

    async def ask() -> None:
        connection = await asyncpg.connect(POSTGRES_URL, timeout=5)
        await connection.close()

    try:
        _run(ask())
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        _skip_or_fail(f"no PostgreSQL answers at {POSTGRES_URL}: {error}")
    return POSTGRES_URL


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The async address of a fresh, empty PostgreSQL database."""
    name = _database_name()
    _in_postgres(f'CREATE DATABASE "{name}"')
    yield _postgres_database_url(name)
    _in_postgres(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An upgraded, empty SQLite file, to be copied."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    _run(_upgrade(f"sqlite+aiosqlite:///{path}"))
    return path


@pytest.fixture(scope="session")
def upgraded_postgres(postgres_server: str) -> Iterator[str]:
    """The name of an upgraded PostgreSQL database, which tests take one after another and leave empty."""
    name = _database_name()
    _in_postgres(f'CREATE DATABASE "{name}"')
    _run(_upgrade(_postgres_database_url(name)))
    yield name
    _in_postgres(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
async def sqlite_database(sqlite_template: Path, tmp_path: Path) -> AsyncIterator[Database]:
    """An upgraded, empty `Database` on SQLite."""
    path = tmp_path / "graftwork.db"
    shutil.copy(sqlite_template, path)
    database = Database(f"sqlite+aiosqlite:///{path}")
    yield database
    await database.close()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of an upgraded, empty database: of SQLite, then of PostgreSQL."""
    if request.param == "sqlite":
        path = request.getfixturevalue("tmp_path") / "graftwork.db"
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite+aiosqlite:///{path}"
        return
    name = request.getfixturevalue("upgraded_postgres")
    yield _postgres_database_url(name)
    _in_postgres(EMPTY_EVERY_TABLE, name)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """An upgraded, empty `Database`: every test that takes it runs on SQLite and on PostgreSQL."""
    database = Database(database_url)
    yield database
    await database.close()


@pytest.fixture(scope="session")
def redis_server() -> str:
    """The address of a Redis that answers."""

    async def ask() -> None:
        async with Redis.from_url(REDIS_URL, socket_connect_timeout=5) as redis:
            await redis.ping()

    try:
        _run(ask())
    except (OSError, RedisError) as error:
        _skip_or_fail(f"no Redis answers at {REDIS_URL}: {error}")
    return REDIS_URL


@pytest.fixture
def redis_url(redis_server: str) -> str:
    return redis_server


@pytest.fixture
def redis_prefix(redis_url: str) -> Iterator[str]:
    """What a test's keys begin with; they are deleted afterwards."""
    prefix = f"graftwork-test-{secrets.token_hex(8)}:"

    async def delete_keys() -> None:
        async with Redis.from_url(redis_url) as redis:
            async for key in redis.scan_iter(match=f"{prefix}*", count=1000):
                await redis.delete(key)

    yield prefix
    _run(delete_keys())


def _skip_or_fail(reason: str) -> None:
    """Skips a test whose server is missing, but fails in CI."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason)
    pytest.skip(reason)


def _database_name() -> str:
    return f"graftwork_test_{secrets.token_hex(8)}"


def _postgres_database_url(name: str) -> str:
    return async_database_url(POSTGRES_URL.rsplit("/", 1)[0] + f"/{name}")


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine on a loop and thread of its own."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(asyncio.run, work).result()


def _in_postgres(statement: str, database: str = "") -> None:
    """Runs one statement in a database, or in the one where databases are made."""
    url = POSTGRES_URL.rsplit("/", 1)[0] + f"/{database}" if database else POSTGRES_URL

    async def run() -> None:
        connection = await asyncpg.connect(url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    _run(run())


async def _upgrade(url: str) -> None:
    database = Database(url)
    await database.upgrade_to_head()
    await database.close()
