"""Tests of the memory that a process returns to the system, each in a process of its own."""

import platform
import subprocess
import sys

import psutil  # type: ignore[import-untyped]
import pytest

from graftwork.platform.memory import resident_bytes

FREES = """
from graftwork.platform.memory import free_large_blocks_at_once, give_memory_back
import psutil

def fill_and_free(num_blocks, size):
    "Frees all large blocks and keeps the small blocks between them. Returns the bytes that were used and are kept."
    before = psutil.Process().memory_info().rss
    blocks, small = [], []
    for _ in range(num_blocks):
        blocks.append(b"x" * size)
        small.append(bytes(4000))
    used = psutil.Process().memory_info().rss - before
    blocks.clear()
    give_back()
    print(used, psutil.Process().memory_info().rss - before)
"""
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such functions")


def bytes_used_and_kept(*lines: str) -> tuple[int, int]:
    """Returns the two numbers that a fresh interpreter prints for a program."""
    program = "\n".join([FREES, *lines])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    used, kept = map(int, done.stdout.split())
    return used, kept


@needs_glibc
def test_large_blocks_return_when_they_are_freed() -> None:
    """After a block of 24 MiB was freed, blocks of 1 MiB between live small blocks still return to the system."""
    used, kept = bytes_used_and_kept(
        "free_large_blocks_at_once()", "give_back = lambda: None", "bytearray(24 << 20)", "fill_and_free(64, 1 << 20)"
    )

    assert used >= 64 << 20
    assert kept < used / 4


@needs_glibc
def test_freed_memory_is_given_back() -> None:
    """Blocks of 100 KB that were freed in the heap return to the system."""
    used, kept = bytes_used_and_kept("give_back = give_memory_back", "fill_and_free(640, 100_000)")

    assert used >= 64_000_000
    assert kept < used / 4


@needs_glibc
def test_much_freed_memory_is_given_back_once() -> None:
    """What was freed since the last return goes back if it is much. What stays, because it is little, is no reason for more."""
    program = """
from graftwork.platform import memory
import psutil

returns = []
give_back, memory.give_memory_back = memory.give_memory_back, lambda: (returns.append(1), give_back())
freed = memory.FreedMemory()
freed.give_back()
before = psutil.Process().memory_info().rss
blocks, small = [], []
for _ in range(640):
    blocks.append(b"x" * 100_000)
    small.append(bytes(4000))
blocks.clear()
for _ in range(3):
    freed.give_back()
kept = psutil.Process().memory_info().rss - before
little = [bytes(100_000) for _ in range(20)]
little.clear()
freed.give_back()
print(len(returns), kept)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    returns, kept = map(int, done.stdout.split())

    assert returns == 1
    assert kept < 16_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_resident_bytes() -> None:
    """The number is that of psutil, but for what was allocated between the two."""
    assert resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


def test_a_serving_process_visits_its_new_objects_alone() -> None:
    """Garbage from before is gone, and old objects are exempt. There is no full collection for 300,000 new objects, where
    Python makes several.
    """
    program = """
import gc, sys, weakref
from graftwork.platform.memory import make_full_collections_rare

class Link: pass

link = Link()
link.itself = link
seen = weakref.ref(link)
del link
full = []
gc.callbacks.append(lambda phase, found: full.append(1) if phase == "start" and found["generation"] == 2 else None)
if sys.argv[1] == "rare":
    make_full_collections_rare()
    assert seen() is None
    assert len(gc.get_objects()) < 100 < gc.get_freeze_count()
full.clear()
kept = [[number] for number in range(300_000)]
print(len(full))
"""
    rare, default = (
        int(subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True).stdout)
        for how in ("rare", "default")
    )

    assert rare == 0 < default


def test_collections_come_back_after_the_imports() -> None:
    """In the block Python collects no garbage, however much there is; after it, also by an error, it does as before."""
    program = """
import gc
from graftwork.platform.memory import without_collections

seen = []
gc.callbacks.append(lambda phase, found: seen.append(phase))
try:
    with without_collections():
        seen.clear()
        kept = [[number] for number in range(100_000)]
        inside = len(seen)
        raise ImportError
except ImportError:
    pass
kept = [[number] for number in range(100_000)]
after = len(seen)
gc.disable()
with without_collections():
    pass
print(inside, after > 0, gc.isenabled())
"""

    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert shown.split() == ["0", "True", "False"]
