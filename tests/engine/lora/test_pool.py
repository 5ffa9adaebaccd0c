"""Tests of the LoRA pool: bytes on device and host, pins, loads, failures, and the order of waiting."""

import threading
from queue import SimpleQueue

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.index.page_store import NoDisk, PageStore
from graftwork.engine.kv.transfer.device_memory import DeviceMemory
from graftwork.engine.lora.device_pool import DeviceAdapterPool
from graftwork.engine.lora.loader import AdapterLoaded, AdapterLoader
from graftwork.engine.lora.packs import PackCache
from graftwork.engine.lora.pool import LoraPool, LoraPoolLimits
from graftwork.engine.lora.torch_backend import TorchLora
from graftwork.engine.lora.verify import AdapterTester, ProbeDevice
from graftwork.engine.lora.weights import AdapterWeights, LoraPair
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.projections import GROUPS, ProjectionGroup
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import GraftworkError, InternalFailure, NotFound, ValidationFailed
from tests.hypothesis_profiles import examples

WIDTH = 16
UNIT = (WIDTH + WIDTH) * 16 * 4
"""Bytes of sixteen ranks of o_proj in fp32: rows of A and columns of B."""
PATIENCE_S = 1.0


class OneLayerBase:
    """One linear layer of zeros."""

    def groups(self, layer: int) -> tuple[ProjectionGroup, ...]:
        return GROUPS

    def module(self, layer: int, target: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.zeros(WIDTH, WIDTH), None

    def shape(self, layer: int, target: str) -> tuple[int, int]:
        return WIDTH, WIDTH


def prober() -> AdapterTester:
    """Tests adapters of the one layer."""
    where = ProbeDevice.of(torch.device("cpu"), lambda: TorchLora(PackCache(0, 1), BatchInvariance(1, 1)))
    return AdapterTester(OneLayerBase(), torch.float32, where)


class GatedAdapterSource:
    """A source of adapters named `sha256:<units>…`. A gate can delay its loads."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def load(self, digest: str) -> AdapterWeights:
        self.gate.wait(60)
        self.loads.append(digest)
        if digest == "sha256:missing":
            raise NotFound("There is no such adapter.")
        if digest == "sha256:broken":
            raise OSError("disk on fire")
        rank = 16 * int(digest.split(":")[1].split("-")[0])
        value = torch.inf if digest.endswith("huge") else 1.0
        pair = LoraPair(torch.full((rank, WIDTH), value), torch.ones(WIDTH, rank), 2.0)
        return AdapterWeights(digest, {(0, "o_proj"): pair})


class LoraPoolDriver:
    """A pool with room for some units on device and host, and the inbox of its finished loads."""

    def __init__(self, units: int, host_units: int = 1000) -> None:
        self.clock = ManualClock()
        self.source = GatedAdapterSource()
        self.inbox: SimpleQueue[AdapterLoaded] = SimpleQueue()
        self.loader = AdapterLoader(self.source, OneLayerBase(), torch.float32, prober(), self.inbox.put)
        sizes = KvSizes(1, UNIT, units, host_pages=0, context_pages=0, reserve_share=0.0)
        page_store = PageStore(sizes, lambda node, tier: (0, 0.0, node.last_used), NoDisk(), self.clock)
        device_memory = DeviceMemory(units, UNIT, torch.device("cpu"))
        device = DeviceAdapterPool(device_memory, page_store, TorchLora(PackCache(0, 1), BatchInvariance(1, 1)))
        self.pool = LoraPool(self.loader, LoraPoolLimits(host_units * UNIT, PATIENCE_S), device, self.clock)

    def want(self, *digests: str) -> list[GraftworkError]:
        """Ask until every load that this begins has come back, or one has failed: its error."""
        return self.want_groups(*((digest,) for digest in digests))

    def want_groups(self, *groups: tuple[str, ...]) -> list[GraftworkError]:
        """The same for requests that need several at once."""
        self.pool.want(groups)
        for _ in range(100):
            if not self.loader.loading:
                break
            error = self.pool.absorb(self.inbox.get(timeout=60))
            if error is not None:
                return [error]
            self.pool.want(groups)
            self.pool.check_integrity()
        return []

    def use(self, digest: str) -> None:
        """A request that runs with an adapter that is ready."""
        assert self.pool.is_ready(digest)
        self.pool.pin(digest)

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)


def test_bytes_are_counted_at_real_rank() -> None:
    """An adapter of rank 16 takes an eighth of the bytes of one of rank 128."""
    driver = LoraPoolDriver(units=9)
    driver.want("sha256:1", "sha256:8")

    assert driver.pool.is_ready("sha256:1")
    assert driver.pool.is_ready("sha256:8")
    assert driver.pool.num_bytes == 9 * UNIT


def test_the_time_of_loads_is_measured() -> None:
    """The first load sets the time, later ones move it by a fifth; a failed one and one that nobody waits for do not."""
    driver = LoraPoolDriver(units=9)
    loaded: list[float | None] = [driver.pool.load_s]
    for number, seconds in enumerate((0.5, 1.0)):
        driver.pool.want([(f"sha256:1-{number}",)])
        driver.wait(seconds)
        driver.pool.absorb(driver.inbox.get(timeout=60))
        loaded.append(driver.pool.load_s)
    driver.pool.want([("sha256:broken",)])
    driver.wait(9.0)
    driver.pool.absorb(driver.inbox.get(timeout=60))

    assert loaded == [None, 0.5, pytest.approx(0.6)]
    assert driver.pool.load_s == pytest.approx(0.6)


def test_each_copy_to_the_device_is_told_once_with_its_bytes() -> None:
    """An adapter that stays on the device is told once, and one that was evicted and comes back is told again."""
    driver = LoraPoolDriver(units=2)
    driver.want("sha256:1-a", "sha256:1-b")
    driver.want("sha256:1-a")
    first, again = driver.pool.take_placed(), driver.pool.take_placed()
    driver.want("sha256:2-c")
    driver.want("sha256:1-a")

    assert sorted(first) == [("sha256:1-a", UNIT), ("sha256:1-b", UNIT)]
    assert again == []
    assert driver.pool.take_placed() == [("sha256:2-c", 2 * UNIT), ("sha256:1-a", UNIT)]


def test_the_least_recently_used_makes_room_and_pinned_ones_do_not() -> None:
    """The least recently used adapter is evicted, and a pinned adapter is not."""
    driver = LoraPoolDriver(units=3)
    for name in ("old", "mid", "new"):
        driver.want(f"sha256:1-{name}")
    driver.use("sha256:1-old")

    driver.want("sha256:1-more")

    assert set(driver.pool.resident_digests) == {"sha256:1-old", "sha256:1-new", "sha256:1-more"}


def test_what_was_evicted_comes_back_from_the_host_without_another_read() -> None:
    """An evicted adapter that is still on the host is placed again without another read."""
    driver = LoraPoolDriver(units=1, host_units=2)
    for name in ("a", "b", "a", "c", "b"):
        driver.want(f"sha256:1-{name}")
        assert driver.pool.is_ready(f"sha256:1-{name}")

    assert driver.source.loads == [f"sha256:1-{name}" for name in ("a", "b", "c", "b")]
    assert driver.pool.host_bytes == 2 * UNIT


def test_many_first_uses_read_once() -> None:
    """A hundred requests during one load cause one read."""
    driver = LoraPoolDriver(units=1)
    driver.source.gate.clear()
    for _ in range(100):
        driver.pool.want([("sha256:1",)])
        assert not driver.pool.is_ready("sha256:1")
    driver.source.gate.set()
    driver.pool.absorb(driver.inbox.get(timeout=60))
    driver.pool.want([("sha256:1",)])

    assert driver.pool.is_ready("sha256:1")
    assert driver.source.loads == ["sha256:1"]


@pytest.mark.parametrize(
    ("digest", "error"),
    [
        ("sha256:missing", NotFound),
        ("sha256:broken", InternalFailure),
        ("sha256:99", ValidationFailed),
        ("sha256:1-huge", ValidationFailed),
    ],
)
def test_a_failed_load_is_an_error_for_those_who_wait(digest: str, error: type[GraftworkError]) -> None:
    """A load that fails for any reason is an error for the waiting requests, and the pool continues."""
    driver = LoraPoolDriver(units=2)

    (found,) = driver.want(digest)

    assert isinstance(found, error)
    assert driver.want("sha256:2") == []
    assert driver.pool.is_ready("sha256:2")


def test_forgetting_waits_for_the_last_user() -> None:
    """A forgotten adapter takes no new request and is freed at its last unpin, or at once if idle."""
    driver = LoraPoolDriver(units=2)
    driver.want("sha256:1-a", "sha256:1-b")
    driver.use("sha256:1-a")

    driver.pool.forget("sha256:1-a")
    driver.pool.forget("sha256:1-b")
    assert list(driver.pool.resident_digests) == ["sha256:1-a"]
    assert not driver.pool.is_ready("sha256:1-a")
    driver.pool.unpin("sha256:1-a")

    assert not driver.pool.resident_digests
    assert driver.pool.num_bytes == driver.pool.host_bytes == 0


def test_a_flood_of_hot_adapters_does_not_keep_a_cold_one_out() -> None:
    """An adapter that has waited for its patience is placed before newer requests of resident adapters."""
    driver = LoraPoolDriver(units=2)
    hot = ("sha256:1-a", "sha256:1-b")
    driver.want(*hot)
    for digest in hot:
        driver.use(digest)
    waited = 0
    while not driver.pool.is_ready("sha256:1-cold"):
        driver.want(*hot, "sha256:1-cold")
        for digest in hot:  # a new request of each begins before the old one ends, wherever that is allowed
            if driver.pool.is_ready(digest):
                driver.pool.pin(digest)
                driver.pool.unpin(digest)
            elif digest in driver.pool.resident_digests:
                driver.pool.unpin(digest)
        driver.wait(0.25)
        waited += 1
        assert waited < 100

    assert waited * 0.25 <= PATIENCE_S + 0.5
    driver.use("sha256:1-cold")
    driver.want(*hot)
    assert sum(driver.pool.is_ready(digest) for digest in hot) == 1


def test_who_waits_longest_for_room_is_not_overtaken_by_smaller_ones() -> None:
    """A large adapter at the head of the queue keeps freed room for itself."""
    driver = LoraPoolDriver(units=4)
    driver.want("sha256:2-a", "sha256:2-b")
    driver.use("sha256:2-a")
    driver.use("sha256:2-b")
    driver.want("sha256:4-large")
    driver.wait(0.1)
    driver.pool.unpin("sha256:2-a")

    driver.want("sha256:4-large", "sha256:2-small")
    assert not driver.pool.is_ready("sha256:2-small")
    driver.pool.unpin("sha256:2-b")
    driver.want("sha256:4-large", "sha256:2-small")

    assert driver.pool.is_ready("sha256:4-large")


def test_draining_ends_when_nobody_waits_any_more() -> None:
    """If the waiting request is cancelled, the adapter that was to be evicted stays usable."""
    driver = LoraPoolDriver(units=1)
    driver.want("sha256:1-hot")
    driver.use("sha256:1-hot")
    driver.want("sha256:1-hot", "sha256:1-cold")
    driver.wait(2 * PATIENCE_S)
    driver.want("sha256:1-hot", "sha256:1-cold")
    assert not driver.pool.is_ready("sha256:1-hot")

    driver.want("sha256:1-hot")

    assert driver.pool.is_ready("sha256:1-hot")


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from(["want", "use", "end", "forget", "wait"]), st.integers(0, 7)), max_size=60))
def test_whatever_happens_bytes_add_up_and_everyone_is_served(steps: list[tuple[str, int]]) -> None:
    """After random requests for adapters of several sizes, the bytes add up and every request was served."""
    driver = LoraPoolDriver(units=4, host_units=6)
    names = [f"sha256:{1 + number % 3}-{number}" for number in range(8)]
    running: list[str] = []
    for action, number in steps:
        match action:
            case "want":
                driver.want(*names[: number + 1])
            case "use" if driver.pool.is_ready(names[number]):
                driver.use(names[number])
                running.append(names[number])
            case "end" if running:
                driver.pool.unpin(running.pop(number % len(running)))
            case "forget":
                driver.pool.forget(names[number])
            case "wait":
                driver.wait(0.3)
        driver.pool.check_integrity()
        assert set(running) <= set(driver.pool.resident_digests)

    for digest in running:
        driver.pool.unpin(digest)
    waiting = list(names)
    for _ in range(20 * len(names)):
        driver.want(*waiting)
        for digest in [digest for digest in waiting if driver.pool.is_ready(digest)]:
            driver.use(digest)
            driver.pool.unpin(digest)
            waiting.remove(digest)
        driver.wait(0.3)
    assert not waiting


@settings(max_examples=examples(40))
@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True), min_size=1, max_size=12),
    st.integers(1, 3),
)
def test_mixtures_that_share_and_compete_are_all_served(requests: list[list[int]], host_units: int) -> None:
    """Mixtures that need up to three adapters at once in a pool of three are all served."""
    driver = LoraPoolDriver(units=3, host_units=2 + host_units)
    waiting = [tuple(f"sha256:1-{number}" for number in numbers) for numbers in requests]
    running: list[tuple[str, ...]] = []
    for _ in range(40 * len(waiting)):
        driver.want_groups(*waiting)
        for group in list(waiting):
            if all(driver.pool.is_ready(digest) for digest in group):
                for digest in group:
                    driver.use(digest)
                waiting.remove(group)
                running.append(group)
        if running:
            for digest in running.pop(0):
                driver.pool.unpin(digest)
        driver.pool.check_integrity()
        driver.wait(0.3)
    assert not waiting
