"""Watches whether an engine's loop advances while requests wait for it.

Owns the verdict "stuck", and the task that asks the engine: only if no outputs of a step have arrived since the last
look, because a loop that sends outputs advances. Never ends a request or a process: its owner does. Pings of
the connection tell whether the engine's process lives; this watch is for a process that lives and does nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable

from graftwork.platform.errors import Unavailable


class LoopWatch:
    """Asks how long an engine's loop has stalled, as long as requests run, and while the loop is stuck."""

    def __init__(
        self,
        read_stall: Callable[[], Awaitable[float]],
        limit_s: float,
        has_requests: Callable[[], bool],
        on_stuck: Callable[[], None],
    ) -> None:
        """`read_stall` returns the seconds since the loop last advanced, or raises Unavailable. `on_stuck` is called
        when the loop has stalled for more than `limit_s` seconds: once, until the loop advances again.
        """
        self._read_stall = read_stall
        self._limit_s = limit_s
        self._has_requests = has_requests
        self._on_stuck = on_stuck
        self._task: asyncio.Task[None] | None = None
        self._has_advanced = False
        """Whether the loop has advanced since the last look."""
        self.is_stuck = False

    def note_advance(self) -> None:
        """Tells the watch that the loop has advanced, so that the next look need not ask the engine."""
        self._has_advanced = True

    def start(self) -> None:
        """Starts to watch, if the watch does not run already. It ends by itself after the last request."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="engine-loop-watch")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while self.is_stuck or self._has_requests():
            await asyncio.sleep(look_every_s(self._limit_s))
            was_stuck = self.is_stuck
            if self._has_advanced:
                self._has_advanced = self.is_stuck = False
                continue
            try:
                self.is_stuck = await self._read_stall() > self._limit_s
            except Unavailable:
                self.is_stuck = False  # there is no loop now; the connection's errors end the requests
            if self.is_stuck and not was_stuck:
                self._on_stuck()


def look_every_s(limit_s: float) -> float:
    """Returns the seconds between two looks at a loop that may stall for `limit_s` seconds."""
    return min(limit_s / 4, 1.0)
