"""A KV memory over a device that holds tags: what a page's KV stands for is the hash of (scope, exact prefix).

The device's frames are real, and small: a page's tag is bytes in its frame, and adapters of a few frames lie among
them, so that whatever is carried elsewhere is found to be there.
"""

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch

from graftwork.engine.arrivals import Path, Residence
from graftwork.engine.device_adapters import DeviceAdapters
from graftwork.engine.disk_tally import DiskCounters
from graftwork.engine.drop_order import Ranking
from graftwork.engine.frame_arena import FrameArena
from graftwork.engine.kv_memory import KvMemory, LowerTiers
from graftwork.engine.load_cost import CostTracker, LoadCost, PrefillCost, TransferCost
from graftwork.engine.lora import Segment
from graftwork.engine.lora_backend import StepLora
from graftwork.engine.page_key import PageKey
from graftwork.engine.page_path import CacheScope, SequenceScope, page_key
from graftwork.engine.pages import PageId
from graftwork.engine.request import SessionKey, SessionUse
from graftwork.engine.residency import KvSizes
from graftwork.engine.resident_adapter import GroupDelta, ResidentAdapter, compacted
from graftwork.engine.tier_names import Tier
from graftwork.engine.transfers import TransferDone, TransferKind, TransferPlan, file_owner
from graftwork.platform.clock import ManualClock

Tag = PageKey
"""A page's key is a digest of its scope and its whole prefix: exactly what its KV depends on."""


LOAD_ALL = LoadCost(TransferCost(0.0, 1e-6), TransferCost(0.0, 2e-6), PrefillCost(0.01, 0.0, 0.0))
"""Loading is always worth it."""


@dataclass
class FakeDisk:
    """Pages by key; `corrupt` ones are there until they are read."""

    pages: dict[PageKey, Tag] = field(default_factory=dict)
    max_pages: int = 1_000_000
    owners: dict[PageKey, bytes] = field(default_factory=dict)

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def bytes_used(self) -> int:
        return len(self.pages)

    @property
    def counters(self) -> DiskCounters:
        return DiskCounters()

    def holds(self, key: PageKey) -> bool:
        return key in self.pages

    def forget(self, key: PageKey) -> None:
        self.pages.pop(key, None)

    def forget_owner(self, owner: bytes) -> int:
        lost = [key for key in self.pages if self.owners.get(key) == owner]
        for key in lost:
            self.forget(key)
        return len(lost)


class DeviceTags(MutableMapping[PageId, Tag | None]):
    """The tags of pages, as bytes in the frames of an arena: a length, and so many bytes."""

    def __init__(self, arena: FrameArena) -> None:
        arena.memory.zero_()
        self._frames = arena.memory.numpy()

    def __getitem__(self, page: PageId) -> Tag | None:
        length, *rest = self._frames[page].tolist()
        return Tag(bytes(rest[:length])) if length else None

    def __setitem__(self, page: PageId, tag: Tag | None) -> None:
        content = b"" if tag is None else tag
        self._frames[page, : len(content) + 1] = [len(content), *content]

    def __delitem__(self, page: PageId) -> None:
        self[page] = None

    def __iter__(self) -> Iterator[PageId]:
        return map(PageId, range(len(self)))

    def __len__(self) -> int:
        return len(self._frames) - 2


class FakeCopies:
    """A CopyEngine whose events fire when the test says so, and in whatever order."""

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
        """Carry one plan out, its first `num_good` moves at least in name, and report it."""
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
        """What is forgotten is gone at once."""

    def close(self) -> None:
        """Nothing runs by itself."""

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
                self.disk.owners[move.key] = file_owner(plan.nodes[index].owner)
            return
        assert move.target is not None
        self.tags[Tier.HOST if plan.kind is TransferKind.SAVE else Tier.DEVICE][move.target] = tag


class FixedAdvice:
    """Every tool takes ten seconds, more or less."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def lease_s(self, party: str, tools: Mapping[str, float | None]) -> float:
        return 10.0

    def return_probability(self, party: str, tools: Collection[str], waited_s: float, within_s: float) -> float:
        return 0.9

    def observe(self, party: str, tool: str, seconds: float) -> None:
        self.seen.append((tool, seconds))


class ShownLora:
    """A LoraBackend that knows adapters only as it was shown them."""

    def __init__(self) -> None:
        self.shown: dict[str, ResidentAdapter] = {}

    def place(self, on_host: ResidentAdapter, on_device: ResidentAdapter) -> None:
        assert on_device.digest not in self.shown, "an adapter was placed twice"
        assert torch.equal(on_host.block, on_device.block), "the copy to be read is another"
        self.shown[on_device.digest] = on_device

    def forget(self, digest: str) -> None:
        del self.shown[digest]

    def check_integrity(self) -> None:
        assert all(digest == adapter.digest for digest, adapter in self.shown.items())

    def step(self, segments: Sequence[Segment], num_rows: int) -> StepLora:
        raise NotImplementedError


def adapter_of(number: int) -> ResidentAdapter:
    """An adapter of one, two or five frames of the lab's device, unlike all others."""
    rows = (1, 2, 5)[number % 3]
    A = torch.full((rows, 16), float(number)) + torch.arange(16)  # 64 bytes a row, as a frame
    return compacted(f"adapter-{number}", {(0, "o"): GroupDelta(A, None, ())}, None, None, None)


def scope_of(name: str) -> SequenceScope:
    return SequenceScope(CacheScope(name.encode()))


class KvLab:
    """A memory of few pages, with what is in them."""

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
    ) -> None:
        self.clock = ManualClock()
        self.disk = disk if disk is not None else FakeDisk()
        self.arena = FrameArena(device, 64, torch.device("cpu"))
        self.copies = FakeCopies(self.disk, DeviceTags(self.arena))
        sizes = KvSizes(page_tokens, 100, device, host, context, reserve_share, lora_floor_share)
        lower = LowerTiers(self.copies, CostTracker(LOAD_ALL), self.disk)
        self.memory = KvMemory(sizes, lower, self.clock, ranking)
        self.lora = ShownLora()
        self.adapters = DeviceAdapters(self.arena, self.memory.residency, self.lora)
        self.memory.residency.lodgers[Tier.DEVICE] = self.adapters
        self.size = page_tokens

    def path(self, scope: str, tokens: Sequence[int]) -> Path:
        return Path(scope_of(scope), tokens, scope.encode())

    def tags(self, path: Path) -> list[Tag]:
        """What the KV of a path's whole pages stands for."""
        tags: list[Tag] = []
        for index in range(len(path.token_ids) // self.size):
            tokens = tuple(path.token_ids[index * self.size : (index + 1) * self.size])
            tags.append(page_key(path.scope, index, tags[-1] if tags else None, tokens))
        return tags

    def compute(self, path: Path, residence: Residence) -> None:
        """The forward pass: check what was cached, write the rest."""
        pool, on_device = self.memory.residency.device, self.copies.tags[Tier.DEVICE]
        for index, (page, tag) in enumerate(zip(residence.pages, self.tags(path), strict=False)):
            if index < len(residence.tiers):
                assert on_device[page] == tag, "a cached page holds somebody else's KV"
            else:
                assert pool.holders(page) == 1, "a page that is shared is written"
                assert not pool.is_in_flight(page), "a page is written while it is copied"
                on_device[page] = tag
        for page in residence.pages[len(self.tags(path)) :]:
            on_device[page] = None

    def run(self, scope: str, tokens: Sequence[int], session: str | None = None) -> Residence | None:
        """A whole request whose answer is nothing: settle, wait, compute, enter, release."""
        use = None if session is None else SessionUse(SessionKey(session))
        path = self.path(scope, tokens)
        residence = self.memory.settle(path, self.memory.match(path), len(tokens))
        if residence is None:
            return None
        self.fire_all()
        self.compute(path, residence)
        self.memory.enter(path, residence.pages, use)
        if use is not None:
            self.memory.follow(path, use)
        self.memory.release(residence.pages)
        return residence

    def fire_all(self) -> None:
        """Let every transfer land, and those that follow from it."""
        while self.copies.under_way:
            self.memory.absorb(self.copies.fire())

    def check(self, num_held: int = 0) -> None:
        """Every invariant that does not need to know what happened. `num_held`: device pages held by sequences."""
        residency = self.memory.residency
        self.memory.check_integrity()
        for tier in (Tier.DEVICE, Tier.HOST):
            pool = residency.pool(tier)
            parts = pool.free_pages + pool.idle_pages + pool.active_pages + pool.in_flight_pages + pool.lent_pages
            assert parts == pool.num_pages
            for node in residency.tree.nodes_on(tier):
                page = node.page(tier)
                assert page is not None
                if tier is Tier.HOST or not node.is_arriving:
                    assert self.copies.tags[tier][page] == node.key, f"a page on the {tier} is not what it says"
        assert all(key == tag for key, tag in self.disk.pages.items())
        in_tree = residency.tree.num_copies(Tier.DEVICE)
        assert residency.device.num_holders == in_tree + num_held
        self.check_adapters()

    def check_adapters(self) -> None:
        """Each is what it was made as, wherever it lies, and so is what the backend was shown of it."""
        self.adapters.check_integrity()
        assert self.lora.shown.keys() == set(self.adapters.digests)
        for digest, shown in self.lora.shown.items():
            own = adapter_of(int(digest.removeprefix("adapter-")))
            assert torch.equal(shown.deltas[0, "o"].A, own.deltas[0, "o"].A), f"{digest} is not what it was"
            assert shown is self.adapters.find(digest)
