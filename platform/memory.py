"""Asks the C library to give freed memory back to the system. Does nothing where the library has no such function.

glibc raises its limit for blocks of their own up to 32 MB once such a block is freed. After that, freed bodies of
megabytes stay in its heaps, among small blocks that live on, and a process never becomes small again.
"""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 256 * 1024


def free_large_blocks_at_once() -> None:
    """Makes each block above 256 KiB return to the system when it is freed, for the rest of this process's life."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def give_memory_back() -> None:
    """Returns all freed memory to the system. Takes milliseconds."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Returns the memory that this process holds; 0 where the system does not tell it."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
