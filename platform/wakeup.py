"""A signal for one waiting task."""

import asyncio


class Wakeup:
    """Wakes the one task that waits; a call of `wake` that nobody waits for is forgotten.

    asyncio.Event does more and costs several times as much, and the gateway waits twice for every token of every stream.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Until the next `wake`. Whoever calls this has just looked for what it waits for."""
        self._waiter = self._loop.create_future()
        await self._waiter

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
