"""Work that the server does again and again while it runs.

One of the places that may catch everything: a round that failed is logged, and the next one comes all the same.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

logger = logging.getLogger(__name__)

Pause = Callable[[float], Awaitable[None]]
"""Waits that many seconds; `asyncio.sleep` outside tests."""


@asynccontextmanager
async def repeating(
    work: Callable[[], Awaitable[Any]], interval_s: float, name: str, pause: Pause = asyncio.sleep
) -> AsyncGenerator[None, None]:
    """While the block runs, `work` is done every `interval_s`, the first time after that long; its end cancels it."""
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
