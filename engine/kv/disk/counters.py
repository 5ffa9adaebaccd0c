"""Counts what the disk store does, and logs failures at most once a minute."""

import logging
import threading
from collections import Counter
from dataclasses import astuple, dataclass

from graftwork.platform.clock import Clock

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 60.0


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """Totals since the store was created."""

    written: int = 0
    """Pages written."""
    read: int = 0
    """Pages read with a correct checksum."""
    evicted: int = 0
    """Pages removed to make room or to enforce a limit."""
    corrupt: int = 0
    """Files removed because a checksum or a length was wrong."""
    foreign: int = 0
    """Files ignored at start: they have another layout, or other programs made them."""
    failed: int = 0
    """Operations that the file system refused, for example because the disk was full."""


class DiskMonitor:
    """Owns the counters. Every method may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._last_line_at: float | None = None

    def snapshot(self) -> DiskCounters:
        with self._lock:
            return DiskCounters(**self._counts)

    def add(self, counter: str, amount: int = 1) -> None:
        """Adds to a counter. `counter` is the name of a field of DiskCounters."""
        with self._lock:
            self._counts[counter] += amount

    def record_corrupt(self, name: str, reason: str) -> None:
        """Counts a file whose content was wrong."""
        self.add("corrupt")
        self._log_failure("disk_tier_corrupt", name, reason)

    def record_failure(self, name: str, error: OSError) -> None:
        """Counts an operation that the file system refused."""
        self.add("failed")
        self._log_failure("disk_tier_failed", name, str(error))

    def check_integrity(self) -> None:
        """Checks that every counter is known and none is negative."""
        assert all(count >= 0 for count in astuple(self.snapshot())), "a counter is negative"

    def _log_failure(self, event: str, name: str, reason: str) -> None:
        with self._lock:
            now = self._clock.monotonic()
            if self._last_line_at is not None and now - self._last_line_at < _SECONDS_BETWEEN_LINES:
                return
            self._last_line_at = now
            totals = {counter: self._counts[counter] for counter in ("corrupt", "failed")}
        _log.warning(event, extra={"file": name, "reason": reason, **totals})
