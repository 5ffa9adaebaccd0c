"""Reads a few rows of a SQLite file on the caller's own thread.

A driver for asyncio sends each step of a statement to another thread and back: a millisecond, of which a tenth is the
reading. While other threads are busy, each of the steps waits for them. So the reads that each request makes before
its first token, of a row or two by an index, run here.
Never writes, never waits for a lock, and never reads what may be large: the event loop stands still meanwhile.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar, cast

from sqlalchemy import URL, Connection, Result, create_engine, event

Value = TypeVar("Value")


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
        is_file = url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")
        return cls(url) if is_file else None

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
