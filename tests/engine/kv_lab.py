"""A KV memory over a device that holds tags: what a page's KV stands for is the hash of (scope, exact prefix)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from graftwork.engine.arrivals import Path, Residence
from graftwork.engine.disk_tally import DiskCounters
from graftwork.engine.drop_order import Ranking
from graftwork.engine.kv_memory import KvMemory, LowerTiers
from graftwork.engine.load_cost import CostTracker, LoadCost, PrefillCost, TransferCost
from graftwork.engine.page_key import PageKey
from graftwork.engine.page_path import CacheScope, SequenceScope, page_key
from graftwork.engine.pages import PageId
from graftwork.engine.request import SessionKey, SessionUse
from graftwork.engine.residency import KvSizes
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


class FakeCopies:
    """A CopyEngine whose events fire when the test says so, and in whatever order."""

    def __init__(self, disk: FakeDisk) -> None:
        self.tags: dict[Tier, dict[PageId, Tag | None]] = {Tier.DEVICE: {}, Tier.HOST: {}}
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
    ) -> None:
        self.clock = ManualClock()
        self.disk = disk if disk is not None else FakeDisk()
        self.copies = FakeCopies(self.disk)
        sizes = KvSizes(page_tokens, 100, device, host, context, reserve_share)
        lower = LowerTiers(self.copies, CostTracker(LOAD_ALL), self.disk)
        self.memory = KvMemory(sizes, lower, self.clock, ranking)
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
            parts = pool.free_pages + pool.idle_pages + pool.active_pages + pool.in_flight_pages
            assert parts == pool.num_pages
            for node in residency.tree.nodes_on(tier):
                page = node.page(tier)
                assert page is not None
                if tier is Tier.HOST or not node.is_arriving:
                    assert self.copies.tags[tier][page] == node.key, f"a page on the {tier} is not what it says"
        assert all(key == tag for key, tag in self.disk.pages.items())
        in_tree = residency.tree.num_copies(Tier.DEVICE)
        assert residency.device.num_holders == in_tree + num_held
