"""Asks the C library to return freed memory to the system, the system how much memory this process has, and Python to
collect garbage in short pauses.

What asks the C library or the system does nothing, or returns 0, on systems without these functions.

glibc maps large blocks on their own, and returns them when they are freed. But each such free raises the size that
counts as large, up to 32 MB. Smaller blocks stay in the heap when they are freed, so the process stays large.
"""

import ctypes
import gc
import mmap
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 256 * 1024
_MUCH_BYTES = 16 << 20
_MIDDLE_PER_FULL = 100
"""Collections of the middle generation from one full collection to the next. Python's default is 10."""


def free_large_blocks_at_once() -> None:
    """Makes the C library return each block above 256 KiB when it is freed, until this process ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def give_memory_back() -> None:
    """Returns all freed memory to the system. Takes milliseconds."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class FreedMemory:
    """Returns to the system what this process frees, once it is much. A crowd of clients that has left leaves so much."""

    def __init__(self) -> None:
        self._kept = 0
        """The freed bytes that stayed after the last return, because they lie between others."""

    def give_back(self) -> None:
        """Returns the freed memory if there are `_MUCH_BYTES` more than the last return left. Takes milliseconds."""
        freed = freed_bytes()
        if freed < self._kept + _MUCH_BYTES:
            self._kept = min(self._kept, freed)
            return
        give_memory_back()
        self._kept = freed_bytes()


@contextmanager
def without_collections() -> Generator[None]:
    """Makes Python collect no garbage in the block, which imports code: that makes objects by the hundred thousand and hardly
    any garbage, and looking for it takes a fifth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_full_collections_rare() -> None:
    """Makes Python's full garbage collections short, and ten times rarer than by default. Call it when a process begins to serve.

    A full collection visits every object, and stops all threads meanwhile: 0.1 s with what start-up makes. So this
    collects what start-up left behind, and exempts the rest, which lives to the end of the process. Afterwards a full
    collection visits only newer objects: 0.1 s still where 900 streams wait. Garbage in cycles waits for it, so a request
    should leave none.
    """
    gc.collect()
    gc.freeze()
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(youngest, middle, _MIDDLE_PER_FULL)


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes. Returns 0 on systems without /proc."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def resident_bytes_at(address: int, num_bytes: int) -> int:
    """Returns how many bytes of the memory from `address` on are resident, in whole pages of the system.

    The system gives a process a page of a large block when the process first writes to it. `num_bytes` must be above 0,
    and all of this memory must belong to this process. Returns `num_bytes` on systems that cannot tell.
    """
    first = address - address % mmap.PAGESIZE
    num_pages = -(-(address + num_bytes - first) // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * num_pages)()
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is None or mincore(ctypes.c_void_p(first), ctypes.c_size_t(num_pages * mmap.PAGESIZE), states):
        return num_bytes
    return bytes(states).count(1) * mmap.PAGESIZE


def freed_bytes() -> int:
    """Returns the bytes that this process has freed, and that the C library keeps for later allocations."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    return int(mallinfo().fordblks)


class _Mallinfo(ctypes.Structure):
    """The struct mallinfo2 of glibc, with sizes in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )
