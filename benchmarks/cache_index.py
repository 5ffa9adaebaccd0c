"""How much memory does the engine's index of cached KV take for a page, and how long do its operations take?

    python -m benchmarks.cache_index [--pages 100000] [--rounds 3] [--json OUT]

Fills the prefix tree, the eviction queues, the page pools and the records of files as an engine does, without a model, a
device or a disk: a page has 16 tokens, and each prompt has bytes and numbers of its own, as requests from the network
do. There are five indexes:

    short       prompts of one page, on the device
    chains      prompts of 256 pages, on the device
    both        prompts of 256 pages, on the device and on the host
    files of 1  records of files of one page
    files of 8  records of files of eight pages

An insertion is of prompts that are not cached, from the search for them to their release. A lookup is that of requests
whose whole prompts are cached, with the allocation of their pages. A miss is the search for other prompts, for each page
of them. Bytes are those that Python has allocated (tracemalloc), with the parts of an index that grow with the size of a tier.
Times
are the processor's, the medians of the rounds, without tracing.
"""

import argparse
import gc
import hashlib
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.machine import describe_machine
from rich.console import Console
from rich.table import Table

from graftwork.engine.core.prefix_keys import CacheScope, PageKey, PrefixScope, child_key, root_key
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.disk.files import Buffer, FileEntry
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.engine.kv.index.cost_model import UNMEASURED, CostTracker
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.index.page_store import NoDisk
from graftwork.engine.kv.manager import KvCacheManager, LowerTiers
from graftwork.engine.kv.transfer.loader import TokenPath
from graftwork.engine.kv.transfer.plan import TransferDone, TransferPlan
from graftwork.platform.clock import SystemClock

_PAGE_TOKENS = 16
_LONG = 256
"""Pages of a long prompt: 4,096 tokens."""
_PREFIX = 64
_SHARERS = 4
"""The first `_PREFIX` pages of a long prompt are the same in so many prompts."""
_DOMAINS = 7
_OTHERS = 10**9
"""The numbers of prompts that are in no index start here."""
_VOCABULARY = (1_000, 100_000)
_SHAPES = {"short": (1, False), "chains": (_LONG, False), "both": (_LONG, True)}
_FILES = {"files of 1": 1, "files of 8": 8}


@dataclass
class _Copies:
    """Stands for the threads that copy: a copy has ended when the index asks."""

    begun: list[TransferPlan] = field(default_factory=list)

    def begin(self, plan: TransferPlan) -> None:
        self.begun.append(plan)

    def sweep(self) -> None:
        """Removes nothing, because there are no files."""

    def close(self) -> None:
        """Has no threads to end."""


class _NoFiles:
    """A file system that writes nothing."""

    def entries(self) -> list[FileEntry]:
        return []

    def create(self, name: str, contents: Sequence[Buffer], used_at_ns: int) -> None: ...

    def rename(self, name: str, new_name: str) -> None: ...

    def remove(self, name: str) -> None: ...

    def read(self, name: str, offset: int, into: memoryview) -> int:
        raise FileNotFoundError(name)

    def stamp(self, name: str, used_at_ns: int) -> None: ...

    def sync(self) -> None: ...


class TreeIndex:
    """The index of pages on the device, and of their copies on the host."""

    def __init__(self, num_pages: int, shape: str) -> None:
        self._length, self._saves = _SHAPES[shape]
        new_pages = self._length if self._length < _PREFIX else self._length - _PREFIX + _PREFIX // _SHARERS
        self._num_prompts = num_pages // new_pages
        sizes = KvSizes(
            _PAGE_TOKENS, 2**14, num_pages, num_pages if self._saves else 0, context_pages=1, reserve_share=0
        )
        self._copies = _Copies()
        lower = LowerTiers(self._copies, CostTracker(UNMEASURED), NoDisk())
        self._cache = KvCacheManager(sizes, lower, SystemClock())

    @property
    def num_pages(self) -> int:
        return self._cache.page_store.tree.num_copies(Tier.DEVICE)

    def fill(self, prompts: Iterable[TokenPath]) -> None:
        """Computes prompts, one after another."""
        for path in prompts:
            allocation = self._cache.allocate_path(path, self._cache.match(path), len(path.token_ids))
            assert allocation is not None
            nodes = self._cache.insert(path, allocation.pages, None)
            self._cache.release(allocation.pages)
            if self._saves:
                self._cache.offloader.save(nodes)
                self._finish_copies()

    def look_up(self, prompts: Iterable[TokenPath]) -> int:
        """Looks for each prompt, and allocates its pages if it finds them. Returns how many pages it finds."""
        found = 0
        for path in prompts:
            match = self._cache.match(path)
            found += len(match)
            if len(match):
                allocation = self._cache.allocate_path(path, match, len(path.token_ids))
                assert allocation is not None
                self._cache.release(allocation.pages)
        return found

    def evict(self) -> None:
        """Evicts all pages, first from the device, then from the host."""
        store = self._cache.page_store
        for tier in (Tier.DEVICE, Tier.HOST):
            pool = store.pool(tier)
            assert store.make_room(tier, pool.num_pages, b"another") == pool.num_pages

    def prompts(self, first: int = 0) -> Iterator[TokenPath]:
        """Yields prompts, in objects of their own. Four long prompts in a row begin with the same pages."""
        for number in range(first, first + self._num_prompts):
            family = number if self._length < _PREFIX else number // _SHARERS
            shared, own = random.Random(family), random.Random(f"own {number}")
            domain = hashlib.sha256(b"%d" % (family % _DOMAINS)).digest()
            tokens = [
                (shared if place < _PREFIX * _PAGE_TOKENS else own).randrange(*_VOCABULARY)
                for place in range(self._length * _PAGE_TOKENS)
            ]
            yield TokenPath(PrefixScope(CacheScope(domain)), tokens, domain)

    def _finish_copies(self) -> None:
        while self._copies.begun:
            plan = self._copies.begun.pop(0)
            self._cache.finish_transfer(TransferDone(plan, len(plan.moves), 0.001))


class FileIndex:
    """The records of files of pages."""

    def __init__(self, num_pages: int, shape: str, folder: Path) -> None:
        self._store = DiskStore(folder, 2**50, bytes(32), _NoFiles())
        self._store.open()
        self._length, self._num_files = _FILES[shape], num_pages // _FILES[shape]

    @property
    def num_pages(self) -> int:
        return self._store.num_pages

    def fill(self, prompts: Iterable[list[PageKey]]) -> None:
        """Writes one file for each prompt."""
        for number, keys in enumerate(prompts):
            domain = hashlib.sha256(b"%d" % (number % _DOMAINS)).digest()
            assert self._store.write(domain, keys, [memoryview(b"a page")] * len(keys)) == len(keys)

    def look_up(self, prompts: Iterable[list[PageKey]]) -> int:
        """Looks for each page. Returns how many it finds."""
        return sum(self._store.holds(key) for keys in prompts for key in keys)

    def evict(self) -> None:
        """Removes all files."""
        for number in range(_DOMAINS):
            self._store.set_limit(hashlib.sha256(b"%d" % number).digest(), 0)
        assert self._store.enforce_limits() == self._num_files * self._length

    def prompts(self, first: int = 0) -> Iterator[list[PageKey]]:
        """Yields the keys of the pages of each file, in objects of their own."""
        for number in range(first, first + self._num_files):
            keys = [root_key(b"%d" % number)]
            for page in range(self._length):
                keys.append(child_key(keys[-1], [page]))
            yield keys[1:]


def make_index(shape: str, num_pages: int, folder: Path) -> Any:
    """Returns an empty TreeIndex or FileIndex."""
    return FileIndex(num_pages, shape, folder) if shape in _FILES else TreeIndex(num_pages, shape)


def bytes_per_page(shape: str, num_pages: int) -> float:
    """Returns how many bytes an index of about `num_pages` pages has allocated for each of them."""
    with TemporaryDirectory() as folder:
        first = make_index(shape, 4 * _LONG, Path(folder) / "first")
        first.fill(first.prompts())  # what is made once
        gc.collect()
        tracemalloc.start()
        try:
            index = make_index(shape, num_pages, Path(folder) / "second")
            index.fill(index.prompts())
            gc.collect()
            return tracemalloc.get_traced_memory()[0] / int(index.num_pages)
        finally:
            tracemalloc.stop()


def times(shape: str, num_pages: int) -> dict[str, float]:
    """Returns the microseconds of each operation for a page, and the milliseconds of a full collection of garbage."""
    with TemporaryDirectory() as folder:
        index = make_index(shape, num_pages, Path(folder) / "kv")
        seconds = {}
        prompts = list(index.prompts())
        gc.collect()
        seconds["insert"] = timed(lambda: index.fill(prompts))
        prompts = list(index.prompts())
        seconds["lookup"] = timed(lambda: index.look_up(prompts))
        prompts = list(index.prompts(_OTHERS))
        assert not index.look_up(prompts)
        prompts = list(index.prompts(_OTHERS))
        seconds["miss"] = timed(lambda: index.look_up(prompts))
        prompts.clear()
        before_ms = 1e3 * timed(gc.collect)
        count = index.num_pages
        seconds["evict"] = timed(index.evict)
        after_ms = 1e3 * timed(gc.collect)
        per_page = {f"{name}_us": 1e6 * one / count for name, one in seconds.items()}
        return per_page | {"gc_ms": before_ms - after_ms}


def timed(action: Callable[[], Any]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=100_000, help="of each index")
    parser.add_argument("--rounds", type=int, default=3, help="of the times")
    parser.add_argument("--shape", choices=[*_SHAPES, *_FILES], action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    machine, found = describe_machine(), dict[str, Any]()
    for shape in options.shape or [*_SHAPES, *_FILES]:
        rounds = [times(shape, options.pages) for _ in range(options.rounds)]
        found[shape] = {"bytes": bytes_per_page(shape, options.pages), "rounds": rounds}
    columns = ["insert_us", "lookup_us", "miss_us", "evict_us", "gc_ms"]
    table = Table("index", "bytes a page", *columns)
    for shape, one in found.items():
        medians = [statistics.median(round_[name] for round_ in one["rounds"]) for name in columns]
        table.add_row(shape, f"{one['bytes']:.0f}", *(f"{median:.2f}" for median in medians))
    Console().print(table)
    if options.json:
        record = {"machine": machine, "pages": options.pages, "indexes": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
