"""Ends the work for a client when the client leaves.

    with while_connected(request.scope, request.receive):
        await work()                # is cancelled when the client leaves; then the block raises ClientDisconnect

A connection of this server says itself that its client has left (`WATCH_CLIENT`). Behind any other server a task reads the
messages of the request until one says so, which costs ten times as much.
Never closes a connection, and never decides what happens to work that other tasks do for the request.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

Watch = Callable[[Callable[[], None]], Callable[[], Any]]
"""A function that calls the given function once the client has left, but never at once. Returns a function that ends the
watch.
"""

WATCH_CLIENT = "watch_client"
"""The key in a request's state for the connection's own `Watch`. A server that has one puts it there."""


class WhileConnected:
    """Runs the block of a `with` as long as the client is there.

    Works as `asyncio.timeout` does: cancels the task that runs the block, and replaces the CancelledError. A cancel that
    comes from elsewhere stays one.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._has_left = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._earlier_cancels = task, task.cancelling()
        self._end_watch = self._watch(self._leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_watch()
        del self._end_watch, self._watch  # they refer to this object, and to the request
        if self._has_left and self._task.uncancel() <= self._earlier_cancels and kind is asyncio.CancelledError:
            raise ClientDisconnect from error

    def _leave(self) -> None:
        self._has_left = True
        self._task.cancel()


def while_connected(scope: Scope, receive: Receive) -> WhileConnected:
    """Returns a context manager that raises ClientDisconnect if the client of the request leaves during the block.

    The request's body must have been read to its end.
    """
    watch: Watch | None = scope.get("state", {}).get(WATCH_CLIENT)
    return WhileConnected(watch or partial(_watch_messages, receive))


def _watch_messages(receive: Receive, leave: Callable[[], None]) -> Callable[[], Any]:
    async def read() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    return asyncio.create_task(read()).cancel
