"""Runs background tasks of the server: single ones, and work that is repeated.

When a client leaves, the server cancels the handler of the client's request and everything that the handler awaits.
Work that must finish, such as settling a quota reservation, is a background task instead. Never knows what a task does.
Invariant: a reference to each background task is kept until the task ends, and the failure of a task is logged.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

logger = logging.getLogger(__name__)


class ServerTasks:
    """Starts background tasks of the server, and keeps them until they end. `close` waits for the running tasks."""

    def __init__(self, patience_s: float = 5.0) -> None:
        self._patience_s = patience_s
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._retire)
        return task

    async def close(self) -> None:
        """Waits at most `patience_s` seconds until the running tasks end.

        Then cancels the tasks that still run, and waits at most `patience_s` seconds again.
        """
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
"""A function that waits for a number of seconds. Tests replace the default, `asyncio.sleep`."""


@asynccontextmanager
async def repeating(
    work: Callable[[], Awaitable[Any]], interval_s: float, name: str, pause: Pause = asyncio.sleep
) -> AsyncGenerator[None, None]:
    """Runs `work` again and again while the `async with` block runs. Waits `interval_s` seconds before each run.

    If a run fails, logs the error and continues.
    """
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
