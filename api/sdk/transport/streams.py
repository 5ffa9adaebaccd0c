"""Defines streams of events for `for` loops and for `async for` loops. Never parses an event.

Invariant: a stream releases its connection when the stream ends, fails or is closed.
"""

from collections.abc import AsyncIterator, Generator, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from graftwork.api.sdk.transport.effects import Connection, Emit, Steps
from graftwork.api.sdk.transport.errors import APIError
from graftwork.api.sdk.transport.runtimes import AsyncRuntime, Runtime, SyncRuntime

E = TypeVar("E")


class Stream(Iterator[E]):
    """Yields events as they arrive, for a `for` loop. To stop early, close the stream or leave its `with` block."""

    def __init__(self, runtime: SyncRuntime, steps: Steps[None], connection: Connection) -> None:
        self._runtime = runtime
        self._steps = steps
        self._connection = connection

    def open(self) -> Self:
        """Sends the request and waits for the start of the answer.

        Raises the server's error if the server refuses the request.
        """
        self._runtime.advance(self._steps)
        return self

    def __next__(self) -> E:
        try:
            handed = self._runtime.advance(self._steps)
        except APIError:
            self.close()
            raise
        if isinstance(handed, Emit):
            event: E = handed.event
            return event
        self.close()
        raise StopIteration

    def close(self) -> None:
        self._steps.close()
        self._runtime.close_connection(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream(AsyncIterator[E]):
    """Yields events as they arrive, for an `async for` loop. Sends the request when the loop asks for the first event.

    To learn earlier whether the server accepts the request, `await` the stream.
    """

    def __init__(self, runtime: AsyncRuntime, steps: Steps[None], connection: Connection) -> None:
        self._runtime = runtime
        self._steps = steps
        self._connection = connection
        self._is_open = False

    async def open(self) -> Self:
        """Sends the request, unless it was already sent.

        Raises the server's error if the server refuses the request.
        """
        if not self._is_open:
            self._is_open = True
            await self._runtime.advance(self._steps)
        return self

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.open().__await__()

    async def __anext__(self) -> E:
        await self.open()
        try:
            handed = await self._runtime.advance(self._steps)
        except APIError:
            await self.close()
            raise
        if isinstance(handed, Emit):
            event: E = handed.event
            return event
        await self.close()
        raise StopAsyncIteration

    async def close(self) -> None:
        self._steps.close()
        await self._runtime.close_connection(self._connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def start_stream(runtime: Runtime, steps: Steps[None], connection: Connection) -> Stream[Any] | AsyncStream[Any]:
    """Returns a stream of the events that the generator `steps` emits.

    A synchronous stream sends its request at once. `steps` must yield Opened when the server has accepted the request.
    """
    if isinstance(runtime, SyncRuntime):
        return Stream[Any](runtime, steps, connection).open()
    return AsyncStream[Any](runtime, steps, connection)
