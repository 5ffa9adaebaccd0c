"""Copies of adapters to the device: their order on fake streams, and what the pool allows while they run."""

from queue import SimpleQueue

import pytest
import torch

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.index.page_store import NoDisk, PageStore
from graftwork.engine.kv.transfer.device_memory import DeviceMemory
from graftwork.engine.kv.transfer.system_memory import PinnedBlock
from graftwork.engine.lora.adapter_copies import AdapterCopied, Event, StreamedCopies
from graftwork.engine.lora.device_pool import DeviceAdapterPool, PlacementResult
from graftwork.engine.lora.loader import AdapterLoaded, AdapterLoader
from graftwork.engine.lora.pool import LoraPool, LoraPoolLimits
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InternalFailure
from tests.engine.kv.transfer.test_system_memory import FakeRegistry
from tests.engine.lora.test_pool import GatedAdapterSource, OneLayerBase, prober
from tests.engine.tagged_kv_cache import RecordingLoraBackend, adapter_of

BLOCK = 256


class FakeEvent:
    """A point in the queue of a stream: the number of copies before it."""

    def __init__(self, stream: "LazyStream", point: int) -> None:
        self.stream = stream
        self.point = point

    def synchronize(self) -> None:
        self.stream.run_until(self.point)


class LazyStream:
    """A stream that copies as late as CUDA may: only when somebody waits for an event."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_done = 0
        self.fails_at: int | None = None

    def event_of_compute(self) -> FakeEvent:
        self.log.append("compute")
        return FakeEvent(self, 0)

    def wait(self, event: Event) -> None:
        self.log.append("wait")

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if len(self.queue) == self.fails_at:
            raise RuntimeError("no device")
        self.log.append(f"copy {len(source)}")
        self.queue.append((source, target))

    def event(self) -> FakeEvent:
        return FakeEvent(self, len(self.queue))

    def run_until(self, point: int) -> None:
        for source, target in self.queue[self.num_done : point]:
            target.copy_(source)
        self.num_done = max(self.num_done, point)


@pytest.fixture
def stream() -> LazyStream:
    return LazyStream()


@pytest.fixture
def inbox() -> SimpleQueue[AdapterCopied]:
    return SimpleQueue()


@pytest.fixture
def copies(stream: LazyStream, inbox: SimpleQueue[AdapterCopied]) -> StreamedCopies:
    registry = FakeRegistry()
    return StreamedCopies(stream, [PinnedBlock(BLOCK, registry) for _ in range(2)], inbox.put)


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK, BLOCK + 1, 5 * BLOCK - 7])
def test_every_byte_arrives_before_the_loop_is_told(
    copies: StreamedCopies, stream: LazyStream, inbox: SimpleQueue[AdapterCopied], num_bytes: int
) -> None:
    """On a stream that copies as late as it may, no block is filled again before it was read, and the message comes last."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros(num_bytes, dtype=torch.uint8)

    assert not copies.begin("one", source, target)

    assert inbox.get(timeout=60) == AdapterCopied("one")
    assert torch.equal(target, source)
    assert stream.log[:2] == ["compute", "wait"]
    assert all(int(entry.split()[1]) <= BLOCK for entry in stream.log[2:])


def test_a_failed_copy_leaves_no_copy_behind(
    copies: StreamedCopies, stream: LazyStream, inbox: SimpleQueue[AdapterCopied]
) -> None:
    """The loop hears of the failure only after the blocks that were queued before it have been copied."""
    stream.fails_at = 2
    copies.begin("one", torch.ones(4 * BLOCK, dtype=torch.uint8), torch.zeros(4 * BLOCK, dtype=torch.uint8))

    copied = inbox.get(timeout=60)

    assert copied.failure is not None
    assert stream.num_done == len(stream.queue) == 2


def test_closing_waits_for_copies_and_unpins_the_blocks(stream: LazyStream, inbox: SimpleQueue[AdapterCopied]) -> None:
    """After closing, all copies have ended and no memory is pinned."""
    registry = FakeRegistry()
    copies = StreamedCopies(stream, [PinnedBlock(BLOCK, registry)], inbox.put)
    target = torch.zeros(3 * BLOCK, dtype=torch.uint8)
    copies.begin("one", torch.ones(3 * BLOCK, dtype=torch.uint8), target)

    copies.close()

    assert target.all()
    assert registry.pinned == {}


class PendingCopies:
    """Copies that end when the test says so."""

    def __init__(self) -> None:
        self.begun: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, digest: str, source: torch.Tensor, target: torch.Tensor) -> bool:
        self.begun[digest] = (source, target)
        return False

    def end(self, digest: str) -> None:
        source, target = self.begun.pop(digest)
        target.copy_(source)

    def close(self) -> None:
        """No thread runs."""


class CopyingPool:
    """A LoraPool over a few frames of 64 bytes whose copies the test ends."""

    def __init__(self, frames: int, lora_floor_share: float = 0.0) -> None:
        clock = ManualClock()
        self.copies, self.backend = PendingCopies(), RecordingLoraBackend()
        sizes = KvSizes(1, 64, frames, 0, 0, reserve_share=0.0, lora_floor_share=lora_floor_share)
        self.page_store = PageStore(sizes, lambda node, tier: (0, 0.0, node.last_used), NoDisk(), clock)
        memory = DeviceMemory(frames, 64, torch.device("cpu"))
        self.device = DeviceAdapterPool(memory, self.page_store, self.backend, copies=self.copies)
        self.page_store.frame_users[Tier.DEVICE] = self.device
        loader = AdapterLoader(GatedAdapterSource(), OneLayerBase(), torch.float32, prober(), lambda loaded: None)
        self.pool = LoraPool(loader, LoraPoolLimits(10**6), self.device, clock)

    def load(self, *numbers: int) -> list[str]:
        """Puts adapters on the host, and asks for them. Returns their digests."""
        adapters = [adapter_of(number) for number in numbers]
        self.pool.want([(adapter.digest,) for adapter in adapters], may_place=False)
        for adapter in adapters:
            assert self.pool.absorb(AdapterLoaded(adapter.digest, adapter)) is None
        digests = [adapter.digest for adapter in adapters]
        self.want(*digests)
        return digests

    def want(self, *digests: str, may_place: bool = True) -> bool:
        asks = self.pool.want([(digest,) for digest in digests], may_place=may_place)
        self.pool.check_integrity()
        return asks

    def arrive(self, digest: str) -> None:
        self.copies.end(digest)
        assert self.pool.absorb_copy(AdapterCopied(digest)) is None


def test_an_adapter_is_usable_only_after_its_copy_has_ended_and_between_steps() -> None:
    """While the copy runs, and while a step uses the device, the adapter is not ready and the backend has not seen it."""
    pool = CopyingPool(frames=6)
    (digest,) = pool.load(2)
    before = pool.pool.is_ready(digest), dict(pool.backend.shown)
    pool.arrive(digest)

    asks_to_land = pool.want(digest, may_place=False)
    during_a_step = pool.pool.is_ready(digest)
    pool.want(digest)

    assert before == (False, {})
    assert (asks_to_land, during_a_step) == (True, False)
    assert pool.pool.is_ready(digest)
    assert torch.equal(pool.backend.shown[digest].buffer, adapter_of(2).buffer)


def test_frames_that_are_being_written_are_not_evicted() -> None:
    """Neither pages nor other adapters take the frames of an adapter before its copy has ended."""
    pool = CopyingPool(frames=8)
    (digest,) = pool.load(2)  # five frames
    pool.device.wanted = ()

    assert not pool.page_store.could_allocate(Tier.DEVICE, 4)
    assert pool.device.place([adapter_of(5)], spared=()) is PlacementResult.SHARE_IN_USE
    pool.arrive(digest)
    pool.want()
    assert pool.page_store.could_allocate(Tier.DEVICE, 8)
    assert pool.device.place([adapter_of(5)], spared=()) is PlacementResult.DONE


def test_frames_that_are_being_written_are_not_moved() -> None:
    """A gap behind an adapter is closed only when its copy has ended; then its bytes move with it."""
    pool = CopyingPool(frames=6)
    (last,) = pool.load(0)
    pool.arrive(last)
    (moved,) = pool.load(3)  # in the frame before
    pool.device.evict(last)
    target = pool.copies.begun[moved][1].data_ptr()

    assert pool.device.place([adapter_of(2)], spared=(moved,)) is PlacementResult.FRAMES_IN_USE
    assert pool.copies.begun[moved][1].data_ptr() == target
    pool.arrive(moved)
    pool.want()
    assert pool.device.place([adapter_of(2)], spared=(moved,)) is PlacementResult.DONE
    assert pool.backend.shown[moved].buffer.data_ptr() == target + 64
    assert torch.equal(pool.backend.shown[moved].buffer, adapter_of(3).buffer)


def test_an_adapter_that_is_forgotten_during_its_copy_leaves_when_it_arrives() -> None:
    """Its frames stay taken until the copy has ended, and are free afterwards."""
    pool = CopyingPool(frames=6)
    (digest,) = pool.load(2)

    pool.pool.forget(digest)
    during = pool.device.num_frames
    pool.arrive(digest)
    pool.want()

    assert (during, pool.device.num_frames) == (5, 0)
    assert pool.backend.shown == {}


def test_a_copy_that_fails_frees_its_frames_and_can_be_tried_again() -> None:
    """The error goes to those that wait for the adapter; the next request copies it anew."""
    pool = CopyingPool(frames=6)
    (digest,) = pool.load(2)

    error = pool.pool.absorb_copy(AdapterCopied(digest, InternalFailure("no device")))
    after = pool.device.num_frames
    del pool.copies.begun[digest]
    pool.want(digest)
    pool.arrive(digest)
    pool.want(digest)

    assert isinstance(error, InternalFailure)
    assert after == 0
    assert pool.pool.is_ready(digest)
