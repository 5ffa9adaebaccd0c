"""When leases end, and which path is worth less from then on.

A drop order notices by itself when a page has become worth more, not when it has become worth less: it must be told.
A path is remembered by its last node, since at most one of its pages, the deepest on a tier, can be the next to go.
Invariant: what is remembered are the leases that have not ended; whoever asks for room asks here first.
"""

import heapq
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from graftwork.engine.core.events import MissReason
from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import NO_KV_LIMITS, KvLimits
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.disk.counters import DiskCounters
from graftwork.engine.kv.index.eviction_queue import DropOrder, Giver, Lodger, NoLodger, Rank, Ranking, give_way
from graftwork.engine.kv.index.page_pool import PagePool
from graftwork.engine.kv.index.radix_tree import Lease, Node, Owner, PrefixTree
from graftwork.platform.clock import Clock


class DiskPages(Protocol):
    """What the loop must know of the disk tier."""

    @property
    def num_pages(self) -> int: ...

    @property
    def bytes_used(self) -> int: ...

    @property
    def counters(self) -> DiskCounters: ...

    def holds(self, key: PageKey) -> bool:
        """Whether a page is there, as far as can be known without reading it."""
        ...

    def forget(self, key: PageKey) -> None:
        """Answer a page no more, at once; a sweep removes what lies there."""
        ...

    def forget_owner(self, owner: bytes) -> int:
        """The same for all pages of a party, by its name in files; returns how many there were."""
        ...


class NoDisk:
    """A disk tier of no bytes."""

    num_pages = 0
    bytes_used = 0
    counters = DiskCounters()

    def holds(self, key: PageKey) -> bool:
        return False

    def forget(self, key: PageKey) -> None:
        """There is nothing to forget."""

    def forget_owner(self, owner: bytes) -> int:
        return 0


class LeaseEnds:
    """Paths by the end of their leases."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Node]] = []
        self._numbers = count()

    def add(self, until: float, last: Node) -> None:
        """The pages down to `last` have a lease until then."""
        heapq.heappush(self._ends, (until, next(self._numbers), last))

    def take_ended(self, now: float) -> Iterator[Node]:
        """The last nodes of paths whose leases have ended by `now`, each once."""
        while self._ends and self._ends[0][0] <= now:
            yield heapq.heappop(self._ends)[2]


_MOST_REMEMBERED_LOSSES = 1 << 16


_DEVICES = range(1 << 40)
"""Sizes of devices, in pages."""


@dataclass(frozen=True, slots=True)
class KvSizes:
    """What there is of each tier in memory, and what is whose.

    On the device pages share their frames with adapters: `context_pages` and the reserve are KV's for sure, the floor
    is the adapters', and the rest goes to whoever needs it.
    """

    page_tokens: int
    page_bytes: int
    device_pages: int
    """Frames of the device."""
    host_pages: int
    context_pages: int
    """Pages of one whole context."""
    reserve_share: float = 0.5
    """Of each tier: parted among the parties present, whom others cannot push below it."""
    lora_floor_share: float = 0.0
    """Of the device: what KV cannot push adapters below."""

    @property
    def lora_floor_pages(self) -> int:
        return min(int(self.lora_floor_share * self.device_pages), max(self.device_pages - self.context_pages, 0))

    @property
    def device_reserve_pages(self) -> int:
        """Pages of the device that are parted among the parties present."""
        most = self.device_pages - self.context_pages - self.lora_floor_pages
        return max(min(int(self.reserve_share * self.device_pages), most), 0)

    @property
    def most_lora_pages(self) -> int:
        """What adapters may take of the device: never the last context, never a reserve, and never less than the floor."""
        return max(self.device_pages - self.context_pages - self.device_reserve_pages, 0)

    def device_pages_for(self, lora_pages: int) -> int:
        """The smallest device on which adapters may have so many pages."""
        return bisect_left(_DEVICES, lora_pages, key=lambda pages: replace(self, device_pages=pages).most_lora_pages)


class Residency:
    """The device's and the host's pages."""

    def __init__(self, sizes: KvSizes, ranking: Ranking, disk: DiskPages, clock: Clock) -> None:
        self.sizes = sizes
        self.disk = disk
        self.device = PagePool(sizes.device_pages)
        self.host = PagePool(sizes.host_pages)
        self.tree = PrefixTree(self.device, self.host, sizes.page_tokens)
        self.tree.on_copy_changed = self._copy_changed
        self._orders = {
            Tier.DEVICE: DropOrder(Tier.DEVICE, self.device, ranking, sizes.device_reserve_pages),
            Tier.HOST: DropOrder(Tier.HOST, self.host, ranking, int(sizes.reserve_share * sizes.host_pages)),
        }
        self.lodgers: dict[Tier, Lodger] = {Tier.DEVICE: NoLodger(), Tier.HOST: NoLodger()}
        """Who else lives in the frames of a tier."""
        self._clock = clock
        self._lease_ends = LeaseEnds()
        self._limits: dict[Owner, KvLimits] = {}
        self._losses: OrderedDict[PageKey, MissReason] = OrderedDict()

    def pool(self, tier: Tier) -> PagePool:
        """The pool of the device or the host."""
        return self.device if tier is Tier.DEVICE else self.host

    def used_pages(self, tier: Tier, owner: Owner) -> int:
        """Pages of a party that the tree holds on a tier."""
        return self._orders[tier].used_pages(owner)

    def reserve_pages(self, tier: Tier) -> int:
        """Pages that each party present keeps for sure."""
        return self._orders[tier].reserve_pages()

    # ---- room -------------------------------------------------------------------------------------------------

    def make_room(self, tier: Tier, num_pages: int, owner: Owner) -> int:
        """Drop what ranks lowest until `num_pages` are free, or nothing more may go; returns how many of them are."""
        order = self._orders[tier]
        pages = _Pages(self, tier, lambda: order.giver_for(owner))
        return self._give_way(tier, num_pages, [pages, self.lodgers[tier]])

    def make_room_for_lodger(self, tier: Tier, num_pages: int, lodger: Giver) -> bool:
        """The same for whoever lives beside the pages, of which `lodger` gives up what it must; whether there is room.

        Parties that hold more than their reserve give. Where nothing is in use and that is still too little, it is
        because reserved pages hang on public ones: then those go too, as KvSizes leaves enough for pages in any case.
        """
        order, pool = self._orders[tier], self.pool(tier)
        self._give_way(tier, num_pages, [_Pages(self, tier, lambda: order.giver_for(None)), lodger])
        if not pool.active_pages:
            self._give_way(tier, num_pages, [_Pages(self, tier, order.giver_of_all), lodger])
        return pool.free_pages >= num_pages

    def _give_way(self, tier: Tier, num_pages: int, givers: Sequence[Giver]) -> int:
        for last in self._lease_ends.take_ended(self._clock.monotonic()):
            self.reconsider_path(last)
        pool = self.pool(tier)
        while pool.free_pages < num_pages and give_way(givers):
            continue
        return min(pool.free_pages, num_pages)

    def lowest_rank(self, tier: Tier, party: Owner) -> Rank:
        """Of the pages that a party could give."""
        return self._orders[tier].rank_of(party)

    def drop_lowest(self, tier: Tier, party: Owner) -> None:
        """Give up the page of that rank."""
        self.drop(self._orders[tier].pop(party), tier, MissReason.EVICTED_PRESSURE)

    def could_have(self, tier: Tier, num_pages: int) -> bool:
        """Whether that many pages are free, idle or the lodger's to spare: a first look, which reserves may still
        disappoint. What the lodger claims is left to it, beside all that it could not be given."""
        pool, lodger = self.pool(tier), self.lodgers[tier]
        claimed = lodger.claimed_pages and lodger.claimed_pages + self._orders[tier].sheltered_pages()
        missing = num_pages + claimed - pool.free_pages - pool.idle_pages
        return missing <= 0 or missing <= lodger.spare_pages

    def drop(self, node: Node, tier: Tier, reason: MissReason) -> None:
        """Give up one idle page at the end of its path on a tier."""
        other = node.host if tier is Tier.DEVICE else node.device
        if other is None and not self.disk.holds(node.key):
            self._remember_loss(node, reason)
        self.tree.drop_copy(node, tier)

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Give up pages on every tier, and all that stands below them; those that are nobody's session's stay."""
        for key in keys:
            node = self.tree.find(key)
            if node is None:
                self.disk.forget(key)
            elif not node.is_loose:
                for gone in self.tree.cut(node):
                    self.disk.forget(gone.key)

    def set_limits(self, owner: Owner, limits: KvLimits) -> None:
        """What a party may keep from now on."""
        if limits == NO_KV_LIMITS:
            self._limits.pop(owner, None)
        else:
            self._limits[owner] = limits

    def excess_pages(self, tier: Tier, owner: Owner) -> int:
        """Pages of a party above its limit on a tier."""
        limits = self._limits.get(owner, NO_KV_LIMITS)
        most_bytes = limits.device_bytes if tier is Tier.DEVICE else limits.host_bytes
        if most_bytes is None:
            return 0
        return max(self.used_pages(tier, owner) - most_bytes // self.sizes.page_bytes, 0)

    def enforce_limit(self, tier: Tier, owner: Owner) -> None:
        """Drop a party's own idle pages until it is within its limit, or has no idle ones."""
        while self.excess_pages(tier, owner) and (node := self._orders[tier].next_of(owner)) is not None:
            self.drop(node, tier, MissReason.EVICTED_QUOTA)

    # ---- changes that make pages idle -------------------------------------------------------------------------

    def release(self, tier: Tier, pages: Iterable[PageId]) -> None:
        """A holder lets go; what the tree holds of the pages stays cached."""
        self._offer_pages(tier, self.pool(tier).release(pages))

    def land(self, tier: Tier, pages: Iterable[PageId]) -> None:
        """A copy has ended on some pages."""
        self._offer_pages(tier, self.pool(tier).land(pages))

    def reconsider(self, keys: Iterable[PageKey]) -> None:
        """Pages are worth less than before: sessions have left them, or a lease is over."""
        for key in keys:
            node = self.tree.find(key)
            if node is not None:
                self._offer(node)

    def reconsider_path(self, last: Node) -> None:
        """The pages of a path, down to its last node, are worth less than before."""
        for tier, order in self._orders.items():
            node: Node | None = last
            while node is not None and node.page(tier) is None:
                node = node.parent
            if node is not None:
                order.offer(node)

    def lease(self, nodes: Sequence[Node], lease: Lease) -> None:
        """Raise the rank of a path's pages; those that several sessions reach keep the lease that lasts longest."""
        for node in nodes:
            if node.lease is None or node.lease.until < lease.until:
                node.lease = lease
        if nodes:
            self._lease_ends.add(lease.until, nodes[-1])

    # ---- what was lost ----------------------------------------------------------------------------------------

    def loss_of(self, key: PageKey) -> MissReason | None:
        """Why a page is nowhere; None if it has never been here, as far as is remembered."""
        return self._losses.get(key)

    def _remember_loss(self, node: Node, reason: MissReason) -> None:
        had_lease = node.lease is not None and node.lease.until <= self._clock.monotonic()
        by_lease = had_lease and reason is MissReason.EVICTED_PRESSURE
        self._losses[node.key] = MissReason.LEASE_EXPIRED if by_lease else reason
        while len(self._losses) > _MOST_REMEMBERED_LOSSES:
            self._losses.popitem(last=False)

    # ---- bookkeeping ------------------------------------------------------------------------------------------

    def _offer_pages(self, tier: Tier, pages: Iterable[PageId]) -> None:
        for page in pages:
            node = self.tree.node_of(tier, page)
            if node is not None:
                self._orders[tier].offer(node)

    def _offer(self, node: Node) -> None:
        for order in self._orders.values():
            order.offer(node)

    def _copy_changed(self, node: Node, tier: Tier, change: int) -> None:
        order = self._orders[tier]
        order.count_copy(node, change)
        if change > 0:
            self._losses.pop(node.key, None)
        elif node.parent is not None:
            order.offer(node.parent)
        self._offer(node)  # the copy on the other tier may be worth more, or less, than it was

    def check_integrity(self) -> None:
        """Recount the pools, the tree and the orders."""
        self.device.check_integrity()
        self.host.check_integrity()
        self.tree.check_integrity()
        for tier, order in self._orders.items():
            order.check_integrity(self.tree.nodes_on(tier))


class _Pages:
    """The idle pages of some parties, as a Giver."""

    def __init__(self, residency: Residency, tier: Tier, find_giver: Callable[[], Owner | None]) -> None:
        """`find_giver` is asked each time: who is above its reserve changes with what goes."""
        self._residency = residency
        self._tier = tier
        self._find_giver = find_giver
        self._party: Owner | None = None

    def rank(self) -> Rank | None:
        self._party = self._find_giver()
        return None if self._party is None else self._residency.lowest_rank(self._tier, self._party)

    def give(self) -> None:
        assert self._party is not None, "nothing was promised"
        self._residency.drop_lowest(self._tier, self._party)
