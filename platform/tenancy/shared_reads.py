"""Lets requests that wait at the same time share their reads of the database, without a cache.

    get("a") ──► read(a)                  the first caller's read begins at once
    get("a"), get("a") ──► read(a)        these wait for the end of that read, and then share the next one
    get("b"), get("c") ──► read(b, c)     different keys that wait share one read as well

Invariant: a call gets the result of a read that began after the call. So each caller sees every change that was
committed before its call. A read that is already in progress never serves a new caller.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Generic, TypeVar

Value = TypeVar("Value")

_MAX_READS = 4
"""Reads in progress at once. One that hangs on a lost connection does not stop the others."""
_KEYS_PER_READ = 500


class SharedReads(Generic[Value]):
    """Reads values by key. Each key has at most one read in progress and one that waits.

    `read` returns the values of some keys from the database, without the keys that it does not have.
    All calls must come from the same event loop.
    """

    def __init__(self, read: Callable[[Collection[str]], Awaitable[Mapping[str, Value]]]) -> None:
        self._read = read
        self._waiting: dict[str, asyncio.Future[Value | None]] = {}
        """What the next read of each key will give, oldest first."""
        self._in_progress: set[str] = set()
        self._reads: set[asyncio.Task[None]] = set()

    async def get(self, key: str) -> Value | None:
        """Returns the key's value, or None if there is none. Raises the error of `read`, if it fails.

        The read goes on for the other callers if this one is cancelled.
        """
        future = self._waiting.get(key)
        if future is None:
            future = self._waiting[key] = asyncio.get_running_loop().create_future()
            future.add_done_callback(_take_error)
            self._begin_read()
        return await asyncio.shield(future)

    def _begin_read(self) -> None:
        """Begins a read of the keys that wait and have no read in progress, if one more read is allowed."""
        keys = [key for key in self._waiting if key not in self._in_progress][:_KEYS_PER_READ]
        if not keys or len(self._reads) >= _MAX_READS:
            return
        self._in_progress.update(keys)
        futures = {key: self._waiting.pop(key) for key in keys}
        task = asyncio.get_running_loop().create_task(self._answer(futures), name="shared-read")
        self._reads.add(task)
        task.add_done_callback(self._end_read)

    async def _answer(self, futures: Mapping[str, "asyncio.Future[Value | None]"]) -> None:
        try:
            values = await self._read(futures.keys())
        except BaseException as error:
            for future in futures.values():
                if isinstance(error, Exception):
                    future.set_exception(error)
                else:
                    future.cancel()
            if not isinstance(error, Exception):
                raise
        else:
            for key, future in futures.items():
                future.set_result(values.get(key))
        finally:
            self._in_progress.difference_update(futures)

    def _end_read(self, task: "asyncio.Task[None]") -> None:
        self._reads.discard(task)
        self._begin_read()


def _take_error(future: "asyncio.Future[Value | None]") -> None:
    """Marks the error as seen: every caller may have been cancelled."""
    if not future.cancelled():
        future.exception()
