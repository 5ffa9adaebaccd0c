"""Manages the SQL database: connections, transactions and the schema's revision.

Owns the pool of connections, and how transactions work on SQLite and on PostgreSQL. Contains no statement over the
tables: the repositories contain them.

Invariant: a `write()` block commits once at its end, or changes nothing; a `read()` block changes nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, NewType

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, NullPool, event, make_url, text
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase

from graftwork.platform.errors import Unavailable

ReadSession = NewType("ReadSession", AsyncSession)
"""Permission to read. Changes that are made through it are rolled back."""
WriteSession = NewType("WriteSession", ReadSession)
"""Permission to read and write, in one transaction."""

_BUSY_MS = 30_000  # how long SQLite waits for another process's lock
_MIGRATION_LOCK = 0x67726166  # any number that every gateway agrees on


class Base(DeclarativeBase):
    """The base class of every table. It gives each constraint a fixed name, which migrations need."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class Database:
    """Opens sessions and transactions on one database, which is given by its async address.

    Only the event loop that uses it first may use it.
    """

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        self._engine = self._make_engine()
        reading = self._engine.execution_options(sqlite_begin="BEGIN")
        writing = self._engine.execution_options(sqlite_begin="BEGIN IMMEDIATE")
        self._read_sessions = async_sessionmaker(reading, expire_on_commit=False)
        self._write_sessions = async_sessionmaker(writing, expire_on_commit=False)
        # SQLite has one writer. This lock serves writers in order and at once; SQLite's own busy loop does neither.
        self._writer = asyncio.Lock()
        self._writing_task: asyncio.Task[Any] | None = None

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[ReadSession]:
        """Opens a session that reads one consistent state. Raises Unavailable if the database cannot be reached."""
        async with self._read_sessions() as session:
            await _connect(session)
            yield ReadSession(session)

    @asynccontextmanager
    async def write(self) -> AsyncGenerator[WriteSession]:
        """Opens a transaction that is committed when its block ends without an error.

        Raises Unavailable if the database cannot be reached. Never open a second transaction inside the block: on
        SQLite the second would wait for the first for ever.
        """
        if not self._is_sqlite:
            async with self._transaction() as session:
                yield session
            return
        assert self._writing_task is not asyncio.current_task(), "a write inside a write would wait for itself"
        async with self._writer:
            self._writing_task = asyncio.current_task()
            try:
                async with self._transaction() as session:
                    yield session
            finally:
                self._writing_task = None

    async def close(self) -> None:
        """Closes every pooled connection."""
        await self._engine.dispose()

    async def upgrade_to_head(self) -> None:
        """Brings the schema to this code's revision. Several processes may call this at once."""
        await self._migrate(command.upgrade, "head")

    async def downgrade(self, revision: str) -> None:
        """Takes the schema back to `revision`; `base` is an empty database. Rows of dropped tables are lost."""
        await self._migrate(command.downgrade, revision)

    async def current_revision(self) -> str | None:
        """Returns the revision of the database's schema; None before the first upgrade."""
        async with self.read() as session:
            connection = await session.connection()
            return await connection.run_sync(lambda sync: MigrationContext.configure(sync).get_current_revision())

    def head_revision(self) -> str | None:
        """Returns the revision of the schema that this code expects."""
        return ScriptDirectory.from_config(_alembic_config()).get_current_head()

    @asynccontextmanager
    async def _transaction(self) -> AsyncGenerator[WriteSession]:
        async with self._write_sessions() as session:
            await _connect(session)
            yield WriteSession(ReadSession(session))
            await session.commit()

    async def _migrate(self, verb: Callable[[Config, str], None], revision: str) -> None:
        """Runs one Alembic command in one transaction. A lock keeps other processes out."""

        def run(connection: Connection) -> None:
            config = _alembic_config()
            config.attributes["connection"] = connection
            verb(config, revision)

        # SQLite alters a table by copying it. With foreign keys on, that would delete the rows that refer to it.
        engine = self._make_engine(foreign_keys=False, poolclass=NullPool)
        try:
            async with engine.execution_options(sqlite_begin="BEGIN IMMEDIATE").begin() as connection:
                if not self._is_sqlite:
                    await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
                await connection.run_sync(run)
        finally:
            await engine.dispose()

    def _make_engine(self, foreign_keys: bool = True, **options: Any) -> AsyncEngine:
        if self._is_sqlite:
            engine = create_async_engine(self._url, **options)
            _prepare_sqlite(engine, foreign_keys)
            return engine
        return create_async_engine(self._url, pool_pre_ping=True, **options)


def _prepare_sqlite(engine: AsyncEngine, foreign_keys: bool) -> None:
    """Gives SQLite real transactions, a write-ahead log and enforced foreign keys."""

    @event.listens_for(engine.sync_engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself; `on_begin` does
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute(
            "PRAGMA synchronous = NORMAL"
        )  # a killed process loses nothing; a power cut may lose the last commits
        cursor.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        cursor.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("sqlite_begin", "BEGIN"))


async def _connect(session: AsyncSession) -> None:
    """Begins the transaction at once.

    Raises Unavailable if the database does not answer, before any statement is sent.
    """
    try:
        await session.connection()
    except (OperationalError, InterfaceError, PoolTimeoutError, OSError) as error:
        raise Unavailable(
            "The database cannot be reached; send the request again shortly.",
            code="database_unavailable",
            retry_after_s=1.0,
        ) from error


def _alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(files("graftwork").joinpath("migrations")).replace("%", "%%"))
    return config
