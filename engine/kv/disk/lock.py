"""Locks a folder for one process. The operating system removes the lock when the process ends, even after a crash."""

import fcntl
import os
import time
from pathlib import Path

from graftwork.platform.errors import InvalidRequest

_POLL_S = 0.05


class FolderLock:
    """Locks a folder for this process. The lock lasts from `acquire` to `release`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def acquire(self, timeout_s: float = 0.0) -> None:
        """Waits up to `timeout_s` seconds for the lock on the folder. Creates a missing folder, which only this user
        may read.

        Raises InvalidRequest if another process keeps the lock or the folder cannot be used.
        """
        if not self.try_acquire(timeout_s):
            raise InvalidRequest(
                f"Another engine keeps its KV pages in {self._folder}: give each its own with --kv-dir.", param="kv_dir"
            )

    def try_acquire(self, timeout_s: float = 0.0) -> bool:
        """Does what `acquire` does. Returns False if another process keeps the lock."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self._folder, os.O_RDONLY)
            self._lock(self._descriptor, time.monotonic() + timeout_s)
        except BlockingIOError:
            self.release()
            return False
        except OSError as error:
            self.release()
            raise InvalidRequest(f"KV pages cannot be kept in {self._folder}: {error.strerror}.") from error
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, descriptor: int, until: float) -> None:
        """Locks the folder. Waits for another process until `until`, in seconds on the monotonic clock.

        Raises BlockingIOError if that process still has the lock then.
        """
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_POLL_S)
            else:
                return
