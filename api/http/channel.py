"""Defines `Channel`, a bounded queue from several tasks to one reader.

If the reader is slow, the tasks that put items wait. So a client that does not read keeps at most `limit` items in
memory.
Invariant: the reader gets every item that was put before the end. Then the channel ends, or raises its error.
"""

import asyncio
from typing import Generic, TypeVar

from graftwork.platform.wakeup import Wakeup

Item = TypeVar("Item")


class Channel(Generic[Item]):
    """A bounded queue for one reader. All users run on one event loop."""

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
        """End the channel, with an error if one is given. Later calls have no effect."""
        if not self._finished:
            self._finished, self._error = True, error
            self._news.wake()

    async def wait_for_first(self) -> None:
        """Wait until the reader can read an item. Raises the channel's error if it ended without any item to read."""
        while not self._items and not self._finished:
            await self._news.wait()
        if not self._items and self._error is not None:
            raise self._error

    async def get(self) -> list[Item]:
        """Wait for items and return all that have come. An empty list is the end. Raises the channel's error."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._finished:
                return []
            await self._news.wait()
        items, self._items = self._items, []
        self._room.set()
        return items
