"""Work that belongs to the server, not to the connection that asked for it.

A handler is cancelled when its client leaves, with everything that it awaits. Work that must finish, such as settling
a reservation, runs here. Each task is referenced until it ends, and its failure is logged.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

logger = logging.getLogger(__name__)


class ServerTasks:
    """Owns the tasks that it starts. `close` waits for them."""

    def __init__(self, patience_s: float = 5.0) -> None:
        self._patience_s = patience_s
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._retire)
        return task

    async def close(self) -> None:
        """Wait at most `patience_s` seconds for running tasks, then cancel them and wait for their clean-up."""
        if not self._running:
            return
        _, late = await asyncio.wait(self._running, timeout=self._patience_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=self._patience_s)

    def _retire(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("server task failed: %s", task.get_name(), exc_info=error)


Pause = Callable[[float], Awaitable[None]]
"""Waits for that many seconds. It is `asyncio.sleep` outside tests."""


@asynccontextmanager
async def repeating(
    work: Callable[[], Awaitable[Any]], interval_s: float, name: str, pause: Pause = asyncio.sleep
) -> AsyncGenerator[None, None]:
    """Run `work` every `interval_s` seconds while the block runs, first after one interval."""
    task = asyncio.create_task(_repeat(work, interval_s, name, pause), name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _repeat(work: Callable[[], Awaitable[Any]], interval_s: float, name: str, pause: Pause) -> None:
    while True:
        await pause(interval_s)
        try:
            await work()
        except Exception:
            logger.exception("%s failed; the next round is in %g s", name, interval_s)
