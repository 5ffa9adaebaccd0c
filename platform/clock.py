"""Defines how code reads the time.

Code gets a `Clock` as an argument, and never reads the machine's clocks itself. So a test can use a ManualClock and
needs no sleep.
"""

import os
import time
from pathlib import Path
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

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    worked = staticmethod(time.thread_time)


def process_age_s() -> float:
    """Returns the seconds since this process started. Returns 0 where the system does not say."""
    try:
        started = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return 0.0


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
