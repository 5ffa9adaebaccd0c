"""A bounded way from producing tasks to one reader, which learns how the production ended.

A slow reader makes the producers wait, so a client that does not read holds no more than `limit` items in memory.
The reader gets every item that was put before the end, then the end: plain, or the error it came with.
"""

import asyncio
from typing import Generic, TypeVar

from graftwork.platform.wakeup import Wakeup

Item = TypeVar("Item")


class Channel(Generic[Item]):
    """One reader, one event loop."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._items: list[Item] = []
        self._news = Wakeup()
        self._room = asyncio.Event()
        self._finished = False
        self._error: BaseException | None = None

    async def put(self, item: Item) -> None:
        while len(self._items) >= self._limit:
            self._room.clear()
            await self._room.wait()
        self._items.append(item)
        self._news.wake()

    def finish(self, error: BaseException | None = None) -> None:
        """No more items; the first call counts."""
        if not self._finished:
            self._finished, self._error = True, error
            self._news.wake()

    async def wait_for_first(self) -> None:
        """Return once there is something to read, without reading it. Raises the error of a fruitless end."""
        while not self._items and not self._finished:
            await self._news.wait()
        if not self._items and self._error is not None:
            raise self._error

    async def get(self) -> list[Item]:
        """All items that have come, at least one; none once there are no more. Raises the error of the end."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._finished:
                return []
            await self._news.wait()
        items, self._items = self._items, []
        self._room.set()
        return items
