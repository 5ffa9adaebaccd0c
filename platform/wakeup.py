"""A signal for one waiting task."""

import asyncio


class Wakeup:
    """Wakes the one task that waits; a call of `wake` that nobody waits for is forgotten.

    asyncio.Event does more and costs several times as much, and the gateway waits twice for every token of every stream.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def wait(self) -> asyncio.Future[None]:
        """To be awaited at once: done with the next `wake`. Look first for what you wait for."""
        self._waiter = self._loop.create_future()
        return self._waiter

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
