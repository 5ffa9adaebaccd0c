"""Memory from the system: it comes in huge pages, and only when it is used or soon will be. Pinned memory takes the bytes that
were asked for, and is pinned from its making to its closing.
"""

import gc
import mmap
import threading
from pathlib import Path
from platform import release

import pytest
import torch

from graftwork.engine.kv.transfer.device_memory import DeviceMemory
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.kv.transfer.system_memory import ClearedAhead, PinnedBlock, mapped_memory
from graftwork.platform.memory import resident_bytes_at


class FakeRegistry:
    """The CUDA runtime's record of pinned memory: sizes by address."""

    def __init__(self, most_bytes: int = 2**40) -> None:
        self.most_bytes = most_bytes
        self.pinned: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> None:
        if num_bytes > self.most_bytes:
            raise RuntimeError("cudaHostRegister failed with CUDA error 2")
        assert address not in self.pinned
        self.pinned[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]


@pytest.mark.parametrize("num_bytes", [1, 4096, 5 * 2**20 + 3])
def test_a_block_pins_its_own_bytes_and_no_more(num_bytes: int) -> None:
    """No size is rounded up to a power of two, and the block begins at a page of the system, as CUDA demands."""
    registry = FakeRegistry()

    block = PinnedBlock(num_bytes, registry)

    assert registry.pinned == {block.data.data_ptr(): num_bytes}
    assert block.data.shape == (num_bytes,)
    assert block.data.data_ptr() % mmap.PAGESIZE == 0


def test_the_host_tier_is_pinned_until_it_is_closed() -> None:
    """Pages that are written are read back from the pinned block, and closing unpins it once."""
    registry = FakeRegistry()
    host = HostMemory(3, (2, 5), torch.float32, registry)
    host.page(1).copy_(torch.arange(10.0).view(2, 5))

    assert list(registry.pinned.values()) == [3 * 40]
    assert torch.equal(torch.frombuffer(host.bytes_of(1), dtype=torch.float32), torch.arange(10.0))
    host.close()
    host.close()
    assert registry.pinned == {}


def test_memory_that_nothing_refers_to_is_unpinned_before_it_is_freed() -> None:
    """CUDA forgets a block that was dropped without being closed, so that its address can be pinned again."""
    registry = FakeRegistry()
    host = HostMemory(3, (2, 5), torch.float32, registry)

    del host

    assert registry.pinned == {}


@pytest.mark.parametrize(("num_pages", "registry"), [(3, None), (0, FakeRegistry())])
def test_a_cpu_and_a_tier_that_is_off_pin_nothing(num_pages: int, registry: FakeRegistry | None) -> None:
    """Without a registry the memory is plain, and a tier without pages asks the system for nothing."""
    host = HostMemory(num_pages, (2, 5), torch.float32, registry)

    host.close()
    assert host.block.shape == (num_pages, 40)
    assert registry is None or registry.pinned == {}


def test_memory_that_cannot_be_pinned_is_an_error_of_the_caller() -> None:
    """A failed registration is raised, so that the engine's start can refuse the size."""
    with pytest.raises(RuntimeError, match="cudaHostRegister"):
        PinnedBlock(4096, FakeRegistry(most_bytes=10))


def _smaps(address: int) -> dict[str, str]:
    """Returns what Linux says of the mapping that contains an address: values by name."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if "-" in name.split(" ")[0] and not name.startswith("VmFlags"):
            start, end = (int(part, 16) for part in line.split(" ")[0].split("-"))
            found = {} if start <= address < end else {"other": ""}
        elif "other" not in found:
            found[name] = value.strip()
            if name == "VmFlags":
                return found
    raise AssertionError("no mapping contains the address")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what a mapping is")
def test_mapped_memory_is_zero_resident_only_where_written_and_in_huge_pages() -> None:
    """A block of 64 MiB takes no memory until a byte is written; then it takes one page, huge or not, around that byte. Linux
    is asked for huge pages, if it has them at all.
    """
    block = mapped_memory(64 * 2**20)
    before = _smaps(block.data_ptr() + 32 * 2**20)

    block[32 * 2**20] = 7

    after = _smaps(block.data_ptr() + 32 * 2**20)
    assert before["Rss"] == "0 kB"
    assert after["Rss"] in ("4 kB", "2048 kB")
    assert ("hg" in after["VmFlags"].split()) == Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert int(block.sum()) == 7


HAS_POPULATE = Path("/proc/self/smaps").exists() and tuple(map(int, release().split(".")[:2])) >= (5, 14)
needs_populate = pytest.mark.skipif(not HAS_POPULATE, reason="only Linux 5.14 and later clear memory ahead")
MIB = 2**20


def resident_mib(block: torch.Tensor) -> int:
    """Returns how much of a block takes memory, in MiB."""
    return resident_bytes_at(block.data_ptr(), block.nbytes) // MIB


@needs_populate
def test_what_is_cleared_ahead_follows_use_and_keeps_what_was_written() -> None:
    """Of 64 MiB, 8 are ready when nothing is used, and 8 more than the most that was announced later, up to a huge page more or
    less; never more than the block has. Bytes that were written before stay.
    """
    block = mapped_memory(64 * MIB)
    block[5 * MIB], block[39 * MIB] = 7, 9
    memory = ClearedAhead(block, 8 * MIB)

    for announced, ready in (((0,), 8), ((20, 10), 28), ((63,), 64)):
        for used in announced:
            memory.used_up_to(used * MIB)
        while memory.clear_chunk():
            pass
        other = 2 if ready < 39 else 0  # the page of the byte that was written further on
        assert ready - 2 <= resident_mib(block) <= ready + 2 + other
    assert not memory.clear_chunk()
    assert (int(block[5 * MIB]), int(block[39 * MIB]), int(block.sum())) == (7, 9, 16)


def clearing_threads() -> set[threading.Thread]:
    """Returns the threads that clear memory ahead."""
    return {one for one in threading.enumerate() if one.name == "clear-memory"}


@needs_populate
@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_memory_of_a_tier_is_cleared_by_a_thread_that_ends_with_it(tier: str) -> None:
    """The thread makes ready what the tier's pages are said to reach, and ends when the tier has gone."""
    before = clearing_threads()
    num_pages, page_bytes = 96, MIB
    pages: DeviceMemory | HostMemory
    if tier == "device":
        pages = DeviceMemory(num_pages, page_bytes, torch.device("cpu"))
        block = pages.frames
    else:
        pages = HostMemory(num_pages, (page_bytes,), torch.uint8)
        block = pages.block
    [thread] = clearing_threads() - before
    pages.used_up_to(num_pages - 1)
    while resident_mib(block) < num_pages - 2:
        thread.join(timeout=0.01)
        assert thread.is_alive()
    del pages
    gc.collect()
    thread.join()


def test_a_small_block_has_no_thread() -> None:
    """What two huge pages hold is cleared as it is written: a thread for each small engine of a test would be too many."""
    before = clearing_threads()
    HostMemory(4, (MIB,), torch.uint8).used_up_to(3)
    assert clearing_threads() == before


def test_mapped_memory_of_no_bytes_is_empty() -> None:
    """A tier that is off asks the system for nothing."""
    assert mapped_memory(0).shape == (0,)
