"""Asks the C library to return freed memory to the system. Does nothing if the library has no such function.

glibc maps large blocks on their own, and returns them when they are freed. But each such free raises the size that
counts as large, up to 32 MB. Smaller blocks stay in the heap when they are freed, so the process stays large.
"""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 256 * 1024


def free_large_blocks_at_once() -> None:
    """Makes the C library return each block above 256 KiB when it is freed, until this process ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def give_memory_back() -> None:
    """Returns all freed memory to the system. Takes milliseconds."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes. Returns 0 on systems without /proc."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
