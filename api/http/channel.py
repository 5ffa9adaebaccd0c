"""A bounded way from producing tasks to one reader, which learns how the production ended.

A slow reader makes the producers wait, so a client that does not read holds no more than `limit` items in memory.
The reader sees every item that was put before the end, then the end: plain, or the error it came with.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from graftwork.platform.wakeup import Wakeup

Item = TypeVar("Item")


class Channel(Generic[Item]):
    """One reader, one event loop."""

    def __init__(self, limit: int = 64, on_left: Callable[[], None] = lambda: None) -> None:
        """`on_left` is called when the reader has left `items`, at their end or before."""
        self._limit = limit
        self._on_left = on_left
        self._items: deque[Item] = deque()
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

    async def items(self) -> AsyncGenerator[Item, None]:
        """Every item. Raises the error of the end."""
        try:
            while True:
                while self._items:
                    item = self._items.popleft()
                    self._room.set()
                    yield item
                if self._finished:
                    break
                await self._news.wait()
            if self._error is not None:
                raise self._error
        finally:
            self._on_left()
