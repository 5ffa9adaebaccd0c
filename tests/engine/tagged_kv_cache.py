"""A KV cache over small real memory, for tests.

A page contains its tag instead of KV. The tag is the page's key, so a test can check that a page holds the KV of
exactly its scope and prefix. Adapters of a few frames lie between the pages.
"""

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from graftwork.engine.core.prefix_keys import CacheScope, PageKey, PrefixScope, page_key
from graftwork.engine.core.requests import EngineRequest, KvFileKey, SessionKey, SessionUse
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.disk.index import NO_OBJECTS, DiskCounters, ObjectFigures
from graftwork.engine.kv.index.cost_model import CostTracker, LoadCost, PrefillCost, TransferCost
from graftwork.engine.kv.index.eviction_queue import Ranking
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.index.page_windows import PageWindows, window_key
from graftwork.engine.kv.index.window_pages import WindowPages
from graftwork.engine.kv.manager import KvCacheManager, LowerTiers
from graftwork.engine.kv.transfer.device_memory import DeviceMemory
from graftwork.engine.kv.transfer.loader import PageAllocation, TokenPath
from graftwork.engine.kv.transfer.plan import TransferDone, TransferKind, TransferPlan, domain_digest
from graftwork.engine.lora.adapter_copies import AdapterCopies
from graftwork.engine.lora.backend import StepLora
from graftwork.engine.lora.device_pool import DeviceAdapterPool
from graftwork.engine.lora.resident_adapter import GroupDelta, ResidentAdapter, compacted
from graftwork.engine.lora.segments import Segment
from graftwork.engine.lora.torch_backend import LoraRows
from graftwork.platform.clock import ManualClock
from graftwork.platform.ids import IsolationDomain, RequestId

Tag = PageKey
"""The key of a page. It depends on the same things as the page's KV."""


LOAD_ALL = LoadCost(TransferCost(0.0, 1e-6), TransferCost(0.0, 2e-6), PrefillCost(0.01, 0.0, 0.0))
"""Costs under which every load is worth it."""


def load_always() -> CostTracker:
    """Costs by which loading is always worth it, whatever the machine shows."""
    return CostTracker(LOAD_ALL, smoothing=0.0)


@dataclass
class FakeDisk:
    """A disk without files: tags by key."""

    pages: dict[PageKey, Tag] = field(default_factory=dict)
    max_pages: int = 1_000_000
    domains: dict[PageKey, bytes] = field(default_factory=dict)

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def bytes_used(self) -> int:
        return len(self.pages)

    @property
    def counters(self) -> DiskCounters:
        return DiskCounters()

    @property
    def objects(self) -> ObjectFigures:
        return NO_OBJECTS

    def holds(self, key: PageKey) -> bool:
        return key in self.pages

    def unlock(self, domain: bytes, key: KvFileKey) -> bool:
        raise NotImplementedError("tags are not encrypted")

    def forget(self, key: PageKey) -> None:
        self.pages.pop(key, None)

    def forget_domain(self, domain: bytes) -> int:
        lost = [key for key in self.pages if self.domains.get(key) == domain]
        for key in lost:
            self.forget(key)
        return len(lost)


class DeviceTags(MutableMapping[PageId, Tag | None]):
    """The tags of device pages, stored in their frames: one byte of length, then the tag."""

    def __init__(self, device_memory: DeviceMemory) -> None:
        device_memory.frames.zero_()
        self._frames = device_memory.frames.numpy()

    def __getitem__(self, page: PageId) -> Tag | None:
        content = self._frames[page].tobytes()
        return Tag(content[1 : 1 + content[0]]) if content[0] else None

    def __setitem__(self, page: PageId, tag: Tag | None) -> None:
        content = b"" if tag is None else tag
        self._frames[page, : len(content) + 1] = [len(content), *content]

    def write_part(self, page: PageId, tag: bytes, start: int, end: int) -> None:
        """Writes the bytes from `start` to `end` of a tag, as if the others had not arrived yet."""
        self._frames[page, 0] = len(tag)
        self._frames[page, 1 + start : 1 + end] = list(tag[start:end])

    def __delitem__(self, page: PageId) -> None:
        self[page] = None

    def __iter__(self) -> Iterator[PageId]:
        return map(PageId, range(len(self)))

    def __len__(self) -> int:
        return len(self._frames) - 2


class ManualCopyEngine:
    """A CopyEngine whose plans end when and in the order that the test says."""

    def __init__(self, disk: FakeDisk, device: DeviceTags) -> None:
        self.tags: dict[Tier, MutableMapping[PageId, Tag | None]] = {Tier.DEVICE: device, Tier.HOST: {}}
        self.disk = disk
        self.under_way: list[tuple[TransferPlan, list[Tag | None]]] = []
        self.moved: dict[TransferKind, int] = dict.fromkeys(TransferKind, 0)

    def begin(self, plan: TransferPlan) -> None:
        moving = {(other.kind, node) for other, _ in self.under_way for node in other.nodes}
        assert all((plan.kind, node) not in moving for node in plan.nodes), "a page is on its way twice"
        self.under_way.append((plan, [self._source(plan, index) for index in range(len(plan.moves))]))

    def fire(self, index: int = 0, num_good: int | None = None) -> TransferDone:
        """Carries out one plan, of which the first `num_good` moves succeed. Returns its report."""
        plan, sources = self.under_way.pop(index)
        good = len(plan.moves) if num_good is None else min(num_good, len(plan.moves))
        for number, (move, tag) in enumerate(zip(plan.moves, sources, strict=True)):
            if plan.kind is TransferKind.FETCH and not self.disk.holds(move.key):
                good = min(good, number)
            elif plan.kind is not TransferKind.FETCH:
                assert self._source(plan, number) == tag, "a page was rewritten while it was copied"
            if number >= good:
                break
            self._put(plan, number, tag)
        self.moved[plan.kind] += good
        return TransferDone(plan, good, seconds=1e-6 * len(plan.moves))

    def sweep(self) -> None:
        """Has nothing to do: forgotten pages are gone at once."""

    def close(self) -> None:
        """Has nothing to end."""

    def _source(self, plan: TransferPlan, index: int) -> Tag | None:
        move = plan.moves[index]
        if plan.kind is TransferKind.FETCH:
            return self.disk.pages.get(move.key)
        assert move.source is not None
        return self.tags[plan.kind.source].get(move.source)

    def _put(self, plan: TransferPlan, index: int, tag: Tag | None) -> None:
        move = plan.moves[index]
        if plan.kind is TransferKind.STORE:
            if tag is not None and len(self.disk.pages) < self.disk.max_pages:
                self.disk.pages[move.key] = tag
                self.disk.domains[move.key] = domain_digest(plan.nodes[index].domain)
            return
        assert move.target is not None
        self.tags[Tier.HOST if plan.kind is TransferKind.SAVE else Tier.DEVICE][move.target] = tag


class FixedLeases:
    """A lease model in which every lease lasts ten seconds."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def lease_s(self, domain: str, tools: Mapping[str, float | None]) -> float:
        return 10.0

    def return_probability(self, domain: str, tools: Collection[str], waited_s: float, within_s: float) -> float:
        return 0.9

    def observe(self, domain: str, tool: str, seconds: float) -> None:
        self.seen.append((tool, seconds))

    def forget_domain(self, domain: str) -> None:
        """Nothing was learned."""


class RecordingLoraBackend:
    """A LoraBackend that records which adapters it was given."""

    def __init__(self) -> None:
        self.shown: dict[str, ResidentAdapter] = {}
        self.rows = LoraRows()

    def place(self, adapter: ResidentAdapter) -> None:
        assert adapter.digest not in self.shown, "an adapter was placed twice"
        self.shown[adapter.digest] = adapter

    @property
    def copied_bytes(self) -> int:
        return 0

    def forget(self, digest: str) -> None:
        del self.shown[digest]

    def check_integrity(self) -> None:
        assert all(digest == adapter.digest for digest, adapter in self.shown.items())

    def step(self, segments: Sequence[Segment], num_rows: int) -> StepLora:
        raise NotImplementedError


@cache
def adapter_of(number: int) -> ResidentAdapter:
    """Returns an adapter of one, two or five frames, from number 90 on of ten frames. It differs from all others."""
    rows = 10 if number >= 90 else (1, 2, 5)[number % 3]
    A = torch.full((rows, 16), float(number)) + torch.arange(16)  # 64 bytes a row, as a frame
    return compacted(f"adapter-{number}", {(0, "o"): GroupDelta(A, None, ())}, None, None, None)


def scope_of(name: str) -> PrefixScope:
    return PrefixScope(CacheScope(name.encode()))


def request_for(path: TokenPath, session: SessionUse | None, ttl_s: float | None) -> EngineRequest:
    """Returns a request with the prompt `path` that asks to keep the prompt for `ttl_s` seconds."""
    return EngineRequest(
        RequestId("req"),
        tuple(path.token_ids),
        SamplingParams(max_tokens=1),
        IsolationDomain(path.domain),
        session=session,
        cache_ttl_s=ttl_s,
    )


class TaggedKvCache:
    """A KV cache of a few pages, and the content of each page."""

    def __init__(
        self,
        *,
        device: int = 12,
        host: int = 8,
        page_tokens: int = 2,
        context: int = 4,
        disk: FakeDisk | None = None,
        ranking: Ranking | None = None,
        reserve_share: float = 0.5,
        lora_floor_share: float = 0.0,
        clock: ManualClock | None = None,
        copies: type[ManualCopyEngine] = ManualCopyEngine,
        adapter_copies: AdapterCopies | None = None,
        windows: PageWindows | None = None,
        step_tokens: int = 1,
    ) -> None:
        self.clock = clock or ManualClock()
        self.disk = disk if disk is not None else FakeDisk()
        self.device_memory = DeviceMemory(device, 64, torch.device("cpu"))
        self.copies = copies(self.disk, DeviceTags(self.device_memory))
        sizes = KvSizes(page_tokens, 100, device, host, context, reserve_share, lora_floor_share, windows)
        layer_window = 0 if windows is None else windows.window
        sizes = replace(sizes, step_tokens=step_tokens, layer_window=layer_window)
        lower = LowerTiers(self.copies, CostTracker(LOAD_ALL), self.disk)
        self.kv_cache = KvCacheManager(sizes, lower, self.clock, ranking)
        self.lora = RecordingLoraBackend()
        self.adapters = DeviceAdapterPool(
            self.device_memory, self.kv_cache.page_store, self.lora, copies=adapter_copies
        )
        self.kv_cache.page_store.frame_users[Tier.DEVICE] = self.adapters
        self.size = page_tokens

    def path(self, scope: str, tokens: Sequence[int]) -> TokenPath:
        return TokenPath(scope_of(scope), tokens, scope.encode())

    def tags(self, path: TokenPath) -> list[Tag]:
        """Returns the expected tags of a path's whole pages."""
        tags: list[Tag] = []
        for index in range(len(path.token_ids) // self.size):
            tokens = tuple(path.token_ids[index * self.size : (index + 1) * self.size])
            tags.append(page_key(path.scope, index, tags[-1] if tags else None, tokens))
        return tags

    def compute(self, path: TokenPath, allocation: PageAllocation) -> None:
        """Replaces the forward pass: checks the tags of cached pages and writes the others."""
        pool, on_device = self.kv_cache.page_store.device, self.copies.tags[Tier.DEVICE]
        for index, page, tag in self.places(path, allocation):
            if index < len(allocation.tiers):
                assert on_device[page] == tag, "a cached page holds the KV of another prefix"
            else:
                assert pool.holders(page) == 1, "a page that is shared is written"
                assert not pool.is_in_flight(page), "a page is written while it is copied"
                on_device[page] = tag
        for page in allocation.pages[len(self.places(path, allocation)) :]:
            on_device[page] = None
        if allocation.windows is not None:
            self.compute_windows(self.tags(path), len(allocation.tiers), allocation.windows)

    def places(self, path: TokenPath, allocation: PageAllocation) -> list[tuple[int, PageId, Tag]]:
        """Returns each whole page of an allocation: its number in the prompt, the page, and its tag."""
        tags, sinks = self.tags(path), 0 if path.scope.rolling is None else -(-path.scope.rolling.sinks // self.size)
        numbers = [*range(min(sinks, len(tags))), *range(sinks + allocation.num_given_up, len(tags))]
        return [(index, page, tags[index]) for index, page in zip(numbers, allocation.pages, strict=False)]

    def compute_windows(self, tags: Sequence[Tag], num_cached: int, windows: WindowPages) -> None:
        """Does what `compute` does, for the pages of windowed layer groups."""
        pool, on_device = self.kv_cache.page_store.device, self.copies.tags[Tier.DEVICE]
        for index, frames in enumerate(windows.frames, start=windows.first):
            for group, frame in enumerate(frames):
                if index < num_cached:
                    assert on_device[frame] == window_key(tags[index], group), "a windowed page holds other KV"
                    continue
                assert pool.holders(frame) == 1, "a windowed page that is shared is written"
                assert not pool.is_in_flight(frame), "a windowed page is written while it is copied"
                on_device[frame] = window_key(tags[index], group) if index < len(tags) else None

    def run(self, scope: str, tokens: Sequence[int], session: str | None = None) -> PageAllocation | None:
        """Runs a whole request with an empty answer: allocate, load, compute, insert, release."""
        use = None if session is None else SessionUse(SessionKey(session))
        path = self.path(scope, tokens)
        allocation = self.kv_cache.allocate_path(path, self.kv_cache.match(path), len(tokens))
        if allocation is None:
            return None
        self.fire_all()
        self.compute(path, allocation)
        self.kv_cache.insert(path, allocation.pages, use)
        if use is not None:
            self.kv_cache.set_history(path, use)
        self.kv_cache.release(allocation.pages)
        return allocation

    def fire_all(self) -> None:
        """Ends all copies, and those that follow from them."""
        while self.copies.under_way:
            self.kv_cache.finish_transfer(self.copies.fire())

    def check(self, num_held: int = 0) -> None:
        """Checks every invariant that holds at any time. `num_held` is the number of device pages that requests hold."""
        self.kv_cache.check_integrity()
        self.adapters.check_integrity()
        self.check_contents(num_held)

    def check_contents(self, num_held: int) -> None:
        """Checks that pages and adapters are what they say. The cache and the adapters are not checked themselves."""
        page_store = self.kv_cache.page_store
        self.device_memory.check_integrity()
        for tier in (Tier.DEVICE, Tier.HOST):
            pool = page_store.pool(tier)
            parts = pool.free_pages + pool.idle_pages + pool.active_pages + pool.in_flight_pages + pool.lent_pages
            assert parts == pool.num_pages
            for node in page_store.tree.nodes_on(tier):
                page = node.page(tier)
                assert page is not None
                if tier is Tier.HOST or not node.is_loading:
                    assert self.copies.tags[tier][page] == node.key, f"a page on the {tier} is not what it says"
        assert all(key == tag for key, tag in self.disk.pages.items())
        in_tree = page_store.tree.num_copies(Tier.DEVICE)
        assert page_store.device.num_holders == in_tree + num_held
        self.check_adapters()

    def check_adapters(self) -> None:
        """Checks that every adapter has its content, wherever it was moved, and that the backend has the same view."""
        assert self.lora.shown.keys() == set(filter(self.adapters.is_usable, self.adapters.digests))
        for digest, shown in self.lora.shown.items():
            own = adapter_of(int(digest.removeprefix("adapter-")))
            assert torch.equal(shown.deltas[0, "o"].A, own.deltas[0, "o"].A), f"{digest} is not what it was"
            assert shown is self.adapters.find(digest)
