"""How this program uses SQLite: prepared connections for asyncio, and two ways around them for what each request does.

A driver for asyncio sends each step of a statement to another thread and back: a millisecond, of which a tenth is the
work. While other threads are busy, each of the steps waits for them. So the reads that each request makes before its
first token, of a row or two by an index, run on the event loop's thread (`SqliteReads`). They never wait for a lock, and
never read what may be large: the event loop stands still meanwhile. And the transactions of each request run whole on a
thread of their own (`SqliteThread`): one for those that write, and one for those that read.
Invariant: a connection that is thrown away in the middle of a transaction keeps no lock on the file.
"""

import asyncio
import contextvars
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self, TypeVar, cast

from sqlalchemy import URL, Connection, Result, create_engine, event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

Value = TypeVar("Value")
_IS_WHOLE = "runs_whole"


class MustWait(Exception):
    """Raised in a transaction that runs whole on a thread of its own, by what would have to wait for something else."""


def may_wait(session: Any) -> bool:
    """Returns whether what is attached to a session may wait for anything but the session itself."""
    return _IS_WHOLE not in session.info


BUSY_MS = 30_000
"""How long SQLite waits for another process's lock."""


def prepare_sqlite(engine: AsyncEngine, foreign_keys: bool) -> None:
    """Gives SQLite real transactions, a write-ahead log and enforced foreign keys."""

    @event.listens_for(engine.sync_engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself; `on_begin` does
        cursor = connection.cursor()
        _use_write_ahead_log(cursor)
        _set_up(cursor, foreign_keys)
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("sqlite_begin", "BEGIN"))

    ending: set[asyncio.Task[None]] = set()

    @event.listens_for(engine.sync_engine, "invalidate")
    def on_invalidate(connection: Any, _record: Any, _error: BaseException | None) -> None:
        """Rolls back before SQLAlchemy closes a connection whose statement was cancelled.

        SQLite keeps a closed connection, its transaction and its lock for as long as a cursor lives, and the error of
        the cancelled statement keeps one. The task that closes is made later, so this one comes first in the queue.
        """
        with suppress(RuntimeError):  # no event loop: the process ends, and its locks with it
            task = asyncio.get_running_loop().create_task(_roll_back(connection.driver_connection))
            ending.add(task)
            task.add_done_callback(ending.discard)


def _set_up(cursor: Any, foreign_keys: bool) -> None:
    # A killed process loses nothing; a power cut may lose the last commits.
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    cursor.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")


async def _roll_back(connection: Any) -> None:
    with suppress(ValueError, sqlite3.Error):  # it is closed already, or its file cannot be used
        await connection.rollback()


def _use_write_ahead_log(cursor: Any) -> None:
    """Switches the file to a write-ahead log, if no connection has done so before.

    SQLite's busy timeout does not count for this one statement: where two connections to a new file try at the same
    time, one of them fails at once. So it tries again here, for as long as SQLite would wait for any other lock.
    """
    ends_at = time.monotonic() + BUSY_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > ends_at:
                raise
        await_only(asyncio.sleep(0.005))


def is_file(url: URL) -> bool:
    """Returns whether a database's address is that of a SQLite file."""
    return url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")


class SqliteReads:
    """A connection to one SQLite file, opened at first use. All calls must come from the same thread."""

    def __init__(self, url: URL) -> None:
        """`url` is the address of the file with its async driver."""
        self._engine = create_engine(url.set(drivername="sqlite"), connect_args={"timeout": 0})
        event.listen(self._engine, "connect", _begin_nothing)
        self._connection: Connection | None = None

    @classmethod
    def of(cls, url: URL) -> Self | None:
        """Returns the reads of the file at this address. None if the address is of another database, or of no file."""
        return cls(url) if is_file(url) else None

    def read(self, read: Callable[[Any], Awaitable[Value]]) -> Value:
        """Calls `read` with a session, and returns its result. `read` may only execute one statement.

        Raises DBAPIError, also if another connection has locked the file.
        """
        connection = self._connection = self._connection or self._engine.connect()
        coroutine = cast("Any", read(_InstantSession(connection)))
        try:
            coroutine.send(None)
        except StopIteration as end:
            return cast("Value", end.value)
        finally:
            coroutine.close()
            connection.rollback()  # the next read sees what is committed then
        raise AssertionError("a read on the caller's thread must not wait")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._engine.dispose()


class _InstantSession:
    """Has the method of an AsyncSession that a read of one statement needs. It never waits."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def execute(self, statement: Any, parameters: Any = None) -> Result[Any]:
        return self._connection.execute(statement, parameters)


def _begin_nothing(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # a single statement needs no transaction


class SqliteThread:
    """Runs whole transactions on one thread, over one connection to a SQLite file. All calls must come from one event loop.
    Only one transaction that writes may run at a time.
    """

    def __init__(self, url: URL, *, writes: bool) -> None:
        """`url` is the address of the file with its async driver. Opens the connection at first use."""
        self._engine = create_engine(url.set(drivername="sqlite"), connect_args={"check_same_thread": False})
        self._thread = ThreadPoolExecutor(1, "sqlite-writes" if writes else "sqlite-reads")
        begin = "BEGIN IMMEDIATE" if writes else "BEGIN"

        @event.listens_for(self._engine, "connect")
        def on_connect(connection: Any, _record: Any) -> None:
            connection.isolation_level = None
            cursor = connection.cursor()
            _set_up(cursor, foreign_keys=True)
            cursor.close()

        @event.listens_for(self._engine, "begin")
        def on_begin(connection: Connection) -> None:
            connection.exec_driver_sql(begin)

    async def run(self, work: Callable[[Any], Awaitable[Value]], info: Mapping[str, Any] | None = None) -> Value:
        """Calls `work` with a session, commits, and returns the result. `work` may await nothing but its session.

        `info` is what repositories find in `session.info`. It must not wait, but raise MustWait: see `may_wait`. If the
        caller is cancelled, waits until the transaction has ended: it may be committed or not. Raises DBAPIError.
        """
        context = contextvars.copy_context()
        found = {**(info or {}), _IS_WHOLE: True}
        running = asyncio.get_running_loop().run_in_executor(self._thread, context.run, self._run, work, found)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            running.exception()  # nobody asks for it any more
            raise

    def close(self) -> None:
        """Closes the connection. No transaction may run."""
        self._thread.shutdown()
        self._engine.dispose()

    def _run(self, work: Callable[[Any], Awaitable[Value]], info: dict[str, Any]) -> Value:
        with Session(self._engine, expire_on_commit=False, info=info) as session:
            session.connection()  # begins the transaction
            coroutine = cast("Any", work(_WholeSession(session)))
            try:
                coroutine.send(None)
            except StopIteration as end:
                session.commit()
                return cast("Value", end.value)
            finally:
                coroutine.close()
        raise AssertionError("a transaction on a thread of its own must await nothing but its session")


class _WholeSession:
    """Has the methods of an AsyncSession that repositories use. It never waits."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.info = session.info
        self.add = session.add
        self.add_all = session.add_all
        self.get_bind = session.get_bind

    async def execute(self, *arguments: Any, **options: Any) -> Any:
        return self._session.execute(*arguments, **options)

    async def scalar(self, *arguments: Any, **options: Any) -> Any:
        return self._session.scalar(*arguments, **options)

    async def scalars(self, *arguments: Any, **options: Any) -> Any:
        return self._session.scalars(*arguments, **options)

    async def get(self, *arguments: Any, **options: Any) -> Any:
        return self._session.get(*arguments, **options)

    async def flush(self) -> None:
        self._session.flush()
