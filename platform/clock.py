"""Defines how code tells the time and waits: clocks that are passed as arguments, and a signal for one waiting task.

Owns every reading of the machine's clocks behind these interfaces. With a ManualClock, tests never sleep.
"""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Three clocks: `now` for stored and shown times, `monotonic` for durations, `worked` for processor time."""

    def now(self) -> float:
        """Returns the seconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Returns the seconds since an arbitrary start; they never go back."""
        ...

    def worked(self) -> float:
        """Returns the seconds of processor time that this thread has used. Other processes do not change this time."""
        ...


class SystemClock:
    """Reads the machine's own clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def worked(self) -> float:
        return time.thread_time()


class ManualClock:
    """A clock that moves only when it is told to."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def worked(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves all clocks forward by `seconds`."""
        self._now += seconds


class Wakeup:
    """Wakes the only task that waits. If no task waits, a call of `wake` has no effect, now or later.

    An asyncio.Event costs several times as much, and the gateway waits for every token of every stream.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def wait(self) -> asyncio.Future[None]:
        """Returns a future that the next `wake` completes. Await it at once.

        Check first whether the event has already happened, because an earlier `wake` is not remembered.
        """
        self._waiter = self._loop.create_future()
        return self._waiter

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
