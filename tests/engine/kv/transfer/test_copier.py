"""Tests copies between real memory and real files."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import pytest
import torch

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.disk.file_format import file_bytes
from graftwork.engine.kv.disk.files import Buffer
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.engine.kv.index.radix_tree import PUBLIC, Domain, Node
from graftwork.engine.kv.transfer.copier import PageCopier
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.kv.transfer.plan import LoadReadable, PageMove, TransferDone, TransferKind, TransferPlan
from graftwork.engine.model.config import read_model_config
from graftwork.platform.clock import SystemClock
from tests.engine.conftest import RandomModels
from tests.engine.faulty_disk import LAYOUT, chain

ALICE, BOB = b"alice", b"bob"


class WatchedDiskStore(DiskStore):
    """A disk store that records how many pages are read at once."""

    most_at_once = 0

    def read_pages(self, keys: Sequence[PageKey], into: memoryview) -> int:
        self.most_at_once = max(self.most_at_once, len(keys))
        return super().read_pages(keys, into)


class GatedDiskStore(WatchedDiskStore):
    """A disk store that writes only when the test allows it."""

    def __init__(self, folder: Path, max_bytes: int, layout: bytes) -> None:
        super().__init__(folder, max_bytes, layout)
        self.writes_once = Event()

    def write(
        self, domain: bytes, keys: Sequence[PageKey], pages: Sequence[Buffer], above: Sequence[PageKey] = ()
    ) -> int:
        assert self.writes_once.wait(timeout=60)
        return super().write(domain, keys, pages, above)


class CopierDriver:
    """A copier over a few pages of device, host and disk, and its reports."""

    def __init__(self, models: RandomModels, folder: Path, num_pages: int, page_tokens: int, num_files: int) -> None:
        """The disk has room for `num_files` files of one page."""
        model, device = read_model_config(models.base), torch.device("cpu")
        device_memory = DeviceMemory(num_pages, bytes_per_page(model, page_tokens, torch.float32), device)
        self.cache = KvCache(model, device_memory, page_tokens, torch.float32)
        self.host = HostMemory(num_pages, self.cache.page_shape, torch.float32)
        self.one_file = file_bytes(1, self.host.page_bytes)
        self.files = GatedDiskStore(folder, num_files * self.one_file, LAYOUT)
        self.files.open()
        self.reports: SimpleQueue[TransferDone | LoadReadable] = SimpleQueue()
        self.copier = PageCopier(self.cache, self.host, self.files, self.reports.put, SystemClock())

    def carry_out(self, kind: TransferKind, nodes: Sequence[Node]) -> int:
        """Copies the page of each node between equal page numbers. Returns how many moves succeeded."""
        self.files.writes_once.set()
        self.begin(kind, nodes)
        done = self.reports.get(timeout=60)
        assert isinstance(done, TransferDone)
        return done.num_good

    def begin(self, kind: TransferKind, nodes: Sequence[Node]) -> None:
        """Begins the same without waiting for its end."""
        source, target = kind is not TransferKind.FETCH, kind is not TransferKind.STORE
        moves = [
            PageMove(node.key, PageId(number) if source else None, PageId(number) if target else None)
            for number, node in enumerate(nodes)
        ]
        self.copier.begin(TransferPlan(kind, nodes[-1].domain, tuple(moves), tuple(nodes)))

    def bytes_of(self, domain: Domain) -> int:
        """Returns the bytes of a domain's files."""
        return self.files.bytes_of(hashlib.sha256(domain).digest())


@pytest.fixture
def small(models: RandomModels, tmp_path: Path) -> Iterator[CopierDriver]:
    """Pages of four tokens, and a disk with room for twelve files."""
    driver = CopierDriver(models, tmp_path / "kv", num_pages=4, page_tokens=4, num_files=12)
    yield driver
    driver.copier.close()


def path_of(name: str, *domains: Domain) -> list[Node]:
    """Returns the nodes of one path with one page for each domain."""
    nodes: list[Node] = []
    for depth, (key, domain) in enumerate(zip(chain(name, len(domains)), domains, strict=True)):
        nodes.append(Node(nodes[-1] if nodes else None, key, depth, domain, 0))
    return nodes


def test_pages_after_public_ones_are_charged_to_their_domain(small: CopierDriver) -> None:
    """In a path of one public page and two of a tenant, each domain pays for its own pages."""
    nodes = path_of("prompt", PUBLIC, ALICE, ALICE)

    assert small.carry_out(TransferKind.STORE, nodes) == 3

    assert small.bytes_of(PUBLIC) == small.one_file
    assert small.bytes_of(ALICE) == file_bytes(2, small.host.page_bytes)


def test_a_history_written_turn_by_turn_loses_its_end_first(small: CopierDriver) -> None:
    """If each turn wrote one file of a history and others need room, the last files are evicted first."""
    history = path_of("history", *[ALICE] * 6)
    for turn in range(6):
        small.carry_out(TransferKind.STORE, history[turn : turn + 1])

    for number in range(9):
        small.carry_out(TransferKind.STORE, path_of(f"other {number}", BOB))

    held = [small.files.holds(node.key) for node in history]
    assert held == sorted(held, reverse=True)
    assert 0 < sum(held) < 6


def test_a_long_fetch_reads_a_bounded_part_at_a_time(models: RandomModels, tmp_path: Path) -> None:
    """Twenty pages of 1 MiB are fetched in two reads; if page 18 is missing, the fetch ends there."""
    page_tokens = 2**20 // bytes_per_page(read_model_config(models.base), 1, torch.float32)
    big = CopierDriver(models, tmp_path / "kv", num_pages=20, page_tokens=page_tokens, num_files=60)
    nodes = path_of("long", *[ALICE] * 20)
    for number in range(20):
        big.host.page(number).fill_(number + 1)
    big.carry_out(TransferKind.STORE, nodes)

    assert big.carry_out(TransferKind.FETCH, nodes) == 20
    read = torch.empty(big.cache.page_shape)
    for number in range(20):
        big.cache.read_page(number, read)
        assert bool((read == number + 1).all())
    assert big.files.most_at_once == 16
    big.files.forget(nodes[18].key)
    assert big.carry_out(TransferKind.FETCH, nodes) == 18
    big.copier.close()


def test_urgent_copies_overtake_background_copies(small: CopierDriver) -> None:
    """A fetch overtakes queued writes but not a running one, and writes keep their order."""
    wanted = path_of("wanted", ALICE)
    small.carry_out(TransferKind.STORE, wanted)
    small.files.writes_once.clear()

    for number in range(3):
        small.begin(TransferKind.STORE, path_of(f"old {number}", BOB))
    small.begin(TransferKind.FETCH, wanted)
    small.copier.sweep()
    small.files.writes_once.set()

    reports = [small.reports.get(timeout=60).plan for _ in range(4)]
    kinds = [plan.kind for plan in reports]
    assert TransferKind.FETCH in kinds[:2]
    assert [plan.moves[0].key for plan in reports if plan.kind is TransferKind.STORE] == [
        chain(f"old {number}", 1)[0] for number in range(3)
    ]
