"""What the disk tier has done and what has failed, with a line in the log at most once a minute."""

import logging
import threading
from collections import Counter
from dataclasses import dataclass

from graftwork.platform.clock import Clock

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 60.0


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """Totals since the tier was made."""

    written: int = 0
    """Pages brought to the disk."""
    read: int = 0
    """Pages read and found right."""
    evicted: int = 0
    """Pages removed for room or for a limit."""
    corrupt: int = 0
    """Files dropped because a checksum or a length was wrong."""
    foreign: int = 0
    """Files passed over at start: another layout's, or not ours at all."""
    failed: int = 0
    """Operations that the file system refused: a full disk, a lost device, missing permission."""


class DiskMonitor:
    """Counts from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._last_line_at: float | None = None

    def snapshot(self) -> DiskCounters:
        with self._lock:
            return DiskCounters(**self._counts)

    def add(self, counter: str, amount: int = 1) -> None:
        """`counter` is the name of a field of DiskCounters."""
        with self._lock:
            self._counts[counter] += amount

    def record_corrupt(self, name: str, reason: str) -> None:
        """A file was not what it said it was."""
        self.add("corrupt")
        self._write_line("disk_tier_corrupt", name, reason)

    def record_failure(self, name: str, error: OSError) -> None:
        """The file system refused an operation."""
        self.add("failed")
        self._write_line("disk_tier_failed", name, str(error))

    def _write_line(self, event: str, name: str, reason: str) -> None:
        with self._lock:
            now = self._clock.monotonic()
            if self._last_line_at is not None and now - self._last_line_at < _SECONDS_BETWEEN_LINES:
                return
            self._last_line_at = now
            totals = {counter: self._counts[counter] for counter in ("corrupt", "failed")}
        _log.warning(event, extra={"file": name, "reason": reason, **totals})
