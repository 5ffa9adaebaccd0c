"""Defines how code reads the time and how one task waits for a signal.

Code gets a `Clock` as an argument, and never reads the machine's clocks itself. So a test can use a ManualClock and
needs no sleep.
"""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Three clocks: `now` for times that are stored or shown, `monotonic` for durations, and `worked` for processor
    time.
    """

    def now(self) -> float:
        """Returns the present time in seconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Returns the seconds since an arbitrary moment. The value never decreases."""
        ...

    def worked(self) -> float:
        """Returns the processor time that the calling thread has used, in seconds. The work of other processes does not
        count.
        """
        ...


class SystemClock:
    """Implements `Clock` with the machine's clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def worked(self) -> float:
        return time.thread_time()


class ManualClock:
    """Implements `Clock` for tests. Its time changes only when the test calls `advance`."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def worked(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Adds `seconds` to all three clocks."""
        self._now += seconds


class Wakeup:
    """Lets one task wait for a signal. `wake` wakes the task that waits; if no task waits, the call of `wake` is lost.

    This replaces asyncio.Event, which costs several times as much. The gateway waits for every token of every stream.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def wait(self) -> asyncio.Future[None]:
        """Returns a future that the next call of `wake` completes. Await the future at once.

        A `wake` before this call is lost. So check before this call whether there is anything to wait for.
        """
        self._waiter = self._loop.create_future()
        return self._waiter

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
