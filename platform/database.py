"""Manages the SQL database: its connections, its transactions and its schema.

Owns the pool of connections, and the differences between transactions on SQLite and on PostgreSQL. Contains no
statements over the tables: the repositories contain them.
Invariant: a `write()` block is committed at its end, or changes nothing if it fails. A `read()` block changes nothing.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.resources import files
from typing import Any, NewType, TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, MetaData, NullPool, event, text
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase

from graftwork.platform.database_address import split_address
from graftwork.platform.errors import InvalidRequest, Unavailable
from graftwork.platform.sqlite import MustWait, SqliteReads, SqliteThread, is_file, may_wait, prepare_sqlite

__all__ = ["Base", "Database", "MustWait", "ReadSession", "WriteSession", "may_wait"]

Value = TypeVar("Value")
ReadSession = NewType("ReadSession", AsyncSession)
"""Permission to read, in one transaction. If code makes changes with it, they are rolled back."""
WriteSession = NewType("WriteSession", ReadSession)
"""Permission to read and write, in one transaction."""

_TRY_MIGRATION_LOCK = text(f"SELECT pg_try_advisory_lock({0x67726166})")  # any number that every gateway agrees on
_LOCK_POLL_S = 0.1
_APPLICATION = "graftwork"  # the name of connections whose address has no `application_name`
_END_STOPPED = text(
    "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND usename = current_user"
    " AND application_name = current_setting('application_name') AND state = 'active' AND wait_event_type = 'Client'"
    " AND state_change < clock_timestamp() - make_interval(secs => :idle_s)"
)
"""Only connections of this program: a backup with the same user may wait for its client for long. The function stands
before WHERE, because PostgreSQL may evaluate the conditions after WHERE in any order."""

_log = logging.getLogger(__name__)


class Base(DeclarativeBase):
    """The base class of all SQL tables. It gives each constraint a predictable name, so that migrations can name it."""

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
    """One SQL database. `url` is its address with an async driver, such as `sqlite+aiosqlite:///…`.

    All calls must come from the same event loop.
    """

    def __init__(self, url: str, max_idle_s: float = 30.0) -> None:
        """Opens no connection. Raises InvalidRequest for an address that cannot be used.

        PostgreSQL rolls a transaction back if this process does nothing in it for `max_idle_s` seconds. Otherwise a
        process that is stopped, or cut off, would keep its locks. See also `end_stopped_transactions`.
        """
        self._url, self._connect_args = split_address(url)
        self._max_idle_s = max_idle_s
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        self._engine = self._make_engine()
        self._here = SqliteReads.of(self._url)
        self._whole = SqliteThread(self._url, writes=True) if is_file(self._url) else None
        self._whole_reads = SqliteThread(self._url, writes=False) if is_file(self._url) else None
        # A ping, a BEGIN and a ROLLBACK around one statement take seven more round trips than the statement itself.
        self._few = None if self._is_sqlite else self._make_engine(False, isolation_level="AUTOCOMMIT", max_overflow=0)
        reading = self._engine.execution_options(sqlite_begin="BEGIN")
        writing = self._engine.execution_options(sqlite_begin="BEGIN IMMEDIATE")
        self.session_info: dict[str, Any] = {}  # what repositories find in `session.info`
        self._read_sessions = async_sessionmaker(reading, expire_on_commit=False, info=self.session_info)
        self._write_sessions = async_sessionmaker(writing, expire_on_commit=False, info=self.session_info)
        # SQLite has one writer. This lock serves writers in order and at once; SQLite's own busy loop does neither.
        self._writer = asyncio.Lock()
        self._writing_task: asyncio.Task[Any] | None = None

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[ReadSession]:
        """Opens a read-only session for an `async with` block, in one transaction.

        On SQLite, all reads in the block see the same state. On PostgreSQL, each statement sees the state at its own
        start. Raises Unavailable if the database does not answer.
        """
        with _database_errors():
            async with self._read_sessions() as session:
                await _begin(session)
                yield ReadSession(session)

    async def read_few(self, read: Callable[[ReadSession], Awaitable[Value]]) -> Value:
        """Returns what `read` finds with one statement, for a few rows by an index (see `sqlite.py`).

        Raises Unavailable if the database does not answer.
        """
        if self._here is not None:
            with suppress(DBAPIError):  # such as a lock, for which another thread may wait
                return self._here.read(read)
        if self._few is not None:
            with suppress(Unavailable), _database_errors():  # such as a connection that was cut while it was idle
                async with AsyncSession(self._few) as few:
                    return await read(ReadSession(few))
        async with self.read() as session:
            return await read(session)

    async def read_whole(self, work: Callable[[ReadSession], Awaitable[Value]]) -> Value:
        """Returns what `work` finds in one transaction. `work` may await nothing but its session.

        Is for what every turn reads: on a SQLite file, all of `work` runs on another thread, as that of `write_whole`
        does. All else is as in a `read()` block.
        """
        if self._whole_reads is not None:
            with suppress(MustWait), _database_errors():
                return await self._whole_reads.run(work, self.session_info)
        async with self.read() as session:
            return await work(session)

    @asynccontextmanager
    async def write(self) -> AsyncGenerator[WriteSession]:
        """Opens a transaction for an `async with` block. It is committed at the end of the block, or rolled back if the
        block fails.

        Raises Unavailable if the database does not answer, or cannot store anything. If the connection is lost during
        the commit, the caller cannot know whether the changes are stored. So a caller that tries again must make
        changes that are harmless the second time. Never open a second `write()` inside the block: on SQLite, the second
        would wait for the first for ever.
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

    async def write_whole(self, work: Callable[[WriteSession], Awaitable[Value]]) -> Value:
        """Calls `work` in a transaction, commits it, and returns the result. `work` may await nothing but its session.

        Is for the small transactions that every request makes: on a SQLite file, all of `work` runs on another thread,
        without a step between threads for each statement (see `sqlite.py`). So what `work` uses must not change
        meanwhile. What is attached to the session may have to wait, such as for a key: then `work` is rolled back, and
        called again in a `write()` block. All else is as in such a block.
        """
        if self._whole is not None:
            assert self._writing_task is not asyncio.current_task(), "a write inside a write would wait for itself"
            async with self._writer:
                with suppress(MustWait), _database_errors():
                    return await self._whole.run(work, self.session_info)
        async with self.write() as session:
            return await work(session)

    async def close(self) -> None:
        """Closes all connections."""
        if self._here is not None:
            self._here.close()
        for thread in (self._whole, self._whole_reads):
            if thread is not None:
                thread.close()
        if self._few is not None:
            await self._few.dispose()
        await self._engine.dispose()

    async def upgrade_to_head(self) -> None:
        """Changes the schema to the revision that this code needs. Several processes may call this at the same time.

        Raises Unavailable if the database cannot be used, and InvalidRequest if this code does not know the schema's
        revision.
        """
        await self._migrate(command.upgrade, "head")

    async def downgrade(self, revision: str) -> None:
        """Changes the schema back to an older `revision`; `base` removes all tables, with their rows.

        Raises Unavailable if the database cannot be used, and InvalidRequest for an unknown revision.
        """
        await self._migrate(command.downgrade, revision)

    async def current_revision(self) -> str | None:
        """Returns the schema revision that the database has; None if the schema was never created."""
        async with self.read() as session:
            connection = await session.connection()
            return await connection.run_sync(lambda sync: MigrationContext.configure(sync).get_current_revision())

    async def check_schema(self) -> None:
        """Checks that the schema is as new as this code needs.

        Raises Unavailable if it is older, or was never created: a gateway that starts changes it. A schema that a newer
        version has made is left to that version to judge.
        """
        current, script = await self.current_revision(), ScriptDirectory.from_config(_alembic_config())
        older = {one.revision for one in script.walk_revisions()} - set(script.get_heads())
        if current is None or current in older:
            raise Unavailable(
                f"The database {self._shown} has {current or 'no schema'}, and {script.get_current_head()} is needed: start "
                "a gateway of this version, or run `graftwork db upgrade`.",
                code="database_unavailable",
                retry_after_s=1.0,
            )

    async def check_writable(self) -> None:
        """Checks that the database can store changes: writes one row without changing its values, and commits.

        Raises Unavailable if the database does not answer, or cannot store anything.
        """
        async with self.write() as session:
            await session.execute(text("UPDATE alembic_version SET version_num = version_num"))

    async def end_stopped_transactions(self) -> int:
        """Ends the connections of processes that stopped in the middle of a statement, so that they keep no locks.

        A statement is sent to PostgreSQL in two steps, its text and its values. While PostgreSQL waits for the second
        step, none of its own time limits counts. So another process must call this, several times in `max_idle_s`
        seconds. Uses a connection of its own, because those of the pool may all wait for the locks. Does nothing on
        SQLite. Returns the number of ended connections. Raises Unavailable if the database does not answer.
        """
        if self._is_sqlite:
            return 0
        engine = self._make_engine(poolclass=NullPool)
        try:
            with _database_errors():
                async with AsyncSession(engine) as session:
                    await _begin(session)
                    ended = (await session.scalars(_END_STOPPED, {"idle_s": self._max_idle_s})).all()
        finally:
            await engine.dispose()
        if ended:
            _log.warning("stopped_transactions_ended", extra={"process_ids": list(ended)})
        return len(ended)

    def head_revision(self) -> str | None:
        """Returns the schema revision that this code needs."""
        return ScriptDirectory.from_config(_alembic_config()).get_current_head()

    @asynccontextmanager
    async def _transaction(self) -> AsyncGenerator[WriteSession]:
        with _database_errors():
            async with self._write_sessions() as session:
                await _begin(session)
                yield WriteSession(ReadSession(session))
                await session.commit()

    async def _migrate(self, verb: Callable[[Config, str], None], revision: str) -> None:
        """Runs one Alembic command. On PostgreSQL, each revision is a transaction, and a lock keeps other processes out."""

        def run(connection: Connection) -> None:
            config = _alembic_config()
            config.attributes["connection"] = connection
            verb(config, revision)

        # SQLite alters a table by copying it. With foreign keys on, that would delete the rows that refer to it.
        engine = self._make_engine(foreign_keys=False, poolclass=NullPool)
        begin = engine.execution_options(sqlite_begin="BEGIN IMMEDIATE").begin if self._is_sqlite else engine.connect
        try:
            async with begin() as connection:
                is_ours = self._is_sqlite
                while not is_ours:  # a statement that waited would hold up the build of an index, as a transaction
                    is_ours = await connection.scalar(_TRY_MIGRATION_LOCK)
                    await connection.rollback()  # keeps the lock, which ends with the connection
                    await asyncio.sleep(0.0 if is_ours else _LOCK_POLL_S)
                await connection.run_sync(run)
        except CommandError as error:
            raise InvalidRequest(
                f"The database {self._shown} cannot be moved to revision {revision} ({error}). "
                "If a newer version of Graftwork made it, run that version."
            ) from error
        except (SQLAlchemyError, OSError) as error:
            reason = str(getattr(error, "orig", None) or error).partition("\n")[0]  # the driver's own message
            raise Unavailable(
                f"The database {self._shown} cannot be used ({reason}): start it, or correct --database-url.",
                code="database_unavailable",
            ) from error
        finally:
            await engine.dispose()

    @property
    def _shown(self) -> str:
        """The address without its password."""
        return self._url.render_as_string(hide_password=True)

    def _make_engine(self, pings: bool = True, *, foreign_keys: bool = True, **options: Any) -> AsyncEngine:
        if self._is_sqlite:
            engine = create_async_engine(self._url, **options)
            prepare_sqlite(engine, foreign_keys)
            return engine
        engine = create_async_engine(self._url, pool_pre_ping=pings, connect_args=self._connect_args, **options)
        _prepare_postgres(engine, self._max_idle_s)
        return engine


def _prepare_postgres(engine: AsyncEngine, max_idle_s: float) -> None:
    """Names each connection. PostgreSQL ends one whose transaction does nothing for `max_idle_s` seconds."""

    @event.listens_for(engine.sync_engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(
            f"SELECT set_config('idle_in_transaction_session_timeout', '{max(1, round(max_idle_s * 1000))}', false),"
            " set_config('application_name',"
            f" coalesce(nullif(current_setting('application_name'), ''), '{_APPLICATION}'), false)"
        )
        cursor.close()
        connection.commit()


async def _begin(session: AsyncSession) -> None:
    """Begins the transaction at once, so that a database that is away is noticed before any statement is sent."""
    try:
        await session.connection()
    except (OperationalError, InterfaceError, OSError) as error:
        raise _away() from error


@contextmanager
def _database_errors() -> Iterator[None]:
    """Converts the errors of a database that does not answer, or cannot store anything, to Unavailable.

    Other errors pass, such as a broken constraint.
    """
    try:
        yield
    except (DBAPIError, PoolTimeoutError, ConnectionError) as error:
        converted = _as_unavailable(error)
        if converted is None:
            raise
        raise converted from error


_CUT_STATES = ("08", "25P03", "57P01", "57P02", "57P03")
"""PostgreSQL's codes for connections that were lost, idle transactions, and a server that stops or starts."""
_UNDONE_STATES = ("40",)
"""PostgreSQL's codes for transactions that it rolled back itself, such as one of two in a deadlock."""
_FULL_STATES = ("53100",)
"""PostgreSQL's code for a full disk."""
_BUSY_STATES = ("53", "25006", "58030")
"""PostgreSQL's codes for a lack of memory or connections, a server that only reads, and a disk that fails."""
_FULL_NAMES = ("SQLITE_FULL",)
_BUSY_NAMES = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")
"""The beginnings of SQLite's names for errors of the disk, and for a lock that another process holds too long."""


def _as_unavailable(error: DBAPIError | PoolTimeoutError | ConnectionError) -> Unavailable | None:
    if not isinstance(error, DBAPIError):
        return _away()
    state = str(getattr(error.orig, "sqlstate", None) or "")
    name = str(getattr(error.orig, "sqlite_errorname", None) or "")
    if state.startswith(_FULL_STATES) or name.startswith(_FULL_NAMES):
        return Unavailable(
            "The database's disk is full, so nothing can be stored: tell the operator to make room on it.",
            code="storage_full",
            retry_after_s=10.0,
        )
    # asyncpg fails without a state if a connection is cut before it has sent its first statement.
    is_cut_while_new = isinstance(error, InternalError) and not state and not name
    is_away = error.connection_invalidated or is_cut_while_new or state.startswith(_CUT_STATES)
    if is_away or state.startswith(_UNDONE_STATES) or state.startswith(_BUSY_STATES) or name.startswith(_BUSY_NAMES):
        return _away()
    return None


def _away() -> Unavailable:
    return Unavailable(
        "The database does not answer, or cannot store anything; send the request again shortly.",
        code="database_unavailable",
        retry_after_s=1.0,
    )


def _alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(files("graftwork").joinpath("migrations")).replace("%", "%%"))
    return config
