"""When leases end, and which path is worth less from then on.

A drop queue notices by itself when a page has become worth more, not when it has become worth less: it must be told.
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
from graftwork.engine.kv.index.eviction_queue import (
    Evictable,
    EvictionQueue,
    EvictionRank,
    FrameUser,
    NoFrameUser,
    Ranking,
    evict_one,
)
from graftwork.engine.kv.index.page_pool import PagePool
from graftwork.engine.kv.index.radix_tree import Domain, Lease, Node, RadixTree
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

    def forget_domain(self, domain: bytes) -> int:
        """The same for all pages of a domain, by its name in files; returns how many there were."""
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

    def forget_domain(self, domain: bytes) -> int:
        return 0


class LeaseExpiryQueue:
    """Paths by the end of their leases."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Node]] = []
        self._numbers = count()

    def add(self, until: float, last: Node) -> None:
        """The pages down to `last` have a lease until then."""
        heapq.heappush(self._ends, (until, next(self._numbers), last))

    def pop_expired(self, now: float) -> Iterator[Node]:
        """The last nodes of paths whose leases have ended by `now`, each once."""
        while self._ends and self._ends[0][0] <= now:
            yield heapq.heappop(self._ends)[2]


_MAX_REMEMBERED_REASONS = 1 << 16


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
    """Of each tier: parted among the domains present, whom others cannot push below it."""
    lora_floor_share: float = 0.0
    """Of the device: what KV cannot push adapters below."""

    @property
    def lora_floor_pages(self) -> int:
        return min(int(self.lora_floor_share * self.device_pages), max(self.device_pages - self.context_pages, 0))

    @property
    def device_reserve_pages(self) -> int:
        """Pages of the device that are parted among the domains present."""
        most = self.device_pages - self.context_pages - self.lora_floor_pages
        return max(min(int(self.reserve_share * self.device_pages), most), 0)

    @property
    def most_lora_pages(self) -> int:
        """What adapters may take of the device: never the last context, never a reserve, and never less than the floor."""
        return max(self.device_pages - self.context_pages - self.device_reserve_pages, 0)

    def device_pages_for(self, lora_pages: int) -> int:
        """The smallest device on which adapters may have so many pages."""
        return bisect_left(_DEVICES, lora_pages, key=lambda pages: replace(self, device_pages=pages).most_lora_pages)


class PageStore:
    """The device's and the host's pages."""

    def __init__(self, sizes: KvSizes, ranking: Ranking, disk: DiskPages, clock: Clock) -> None:
        self.sizes = sizes
        self.disk = disk
        self.device = PagePool(sizes.device_pages)
        self.host = PagePool(sizes.host_pages)
        self.tree = RadixTree(self.device, self.host, sizes.page_tokens)
        self.tree.on_copy_changed = self._copy_changed
        self._queues = {
            Tier.DEVICE: EvictionQueue(Tier.DEVICE, self.device, ranking, sizes.device_reserve_pages),
            Tier.HOST: EvictionQueue(Tier.HOST, self.host, ranking, int(sizes.reserve_share * sizes.host_pages)),
        }
        self.frame_users: dict[Tier, FrameUser] = {Tier.DEVICE: NoFrameUser(), Tier.HOST: NoFrameUser()}
        """Who else lives in the frames of a tier."""
        self._clock = clock
        self._lease_expiries = LeaseExpiryQueue()
        self._limits: dict[Domain, KvLimits] = {}
        self._eviction_reasons: OrderedDict[PageKey, MissReason] = OrderedDict()

    def pool(self, tier: Tier) -> PagePool:
        """The pool of the device or the host."""
        return self.device if tier is Tier.DEVICE else self.host

    def used_pages(self, tier: Tier, domain: Domain) -> int:
        """Pages of a domain that the tree holds on a tier."""
        return self._queues[tier].used_pages(domain)

    def reserve_pages(self, tier: Tier) -> int:
        """Pages that each domain present keeps for sure."""
        return self._queues[tier].reserve_pages()

    # ---- room -------------------------------------------------------------------------------------------------

    def make_room(self, tier: Tier, num_pages: int, domain: Domain) -> int:
        """Drop what ranks lowest until `num_pages` are free, or nothing more may go; returns how many of them are."""
        queue = self._queues[tier]
        pages = _IdlePages(self, tier, lambda: queue.victim_domain(domain))
        return self._make_room(tier, num_pages, [pages, self.frame_users[tier]])

    def make_room_for_frames(self, tier: Tier, num_pages: int, frame_user: Evictable) -> bool:
        """The same for whoever lives beside the pages, of which `frame_user` gives up what it must; whether there is room.

        Parties that hold more than their reserve give. Where nothing is in use and that is still too little, it is
        because reserved pages hang on public ones: then those go too, as KvSizes leaves enough for pages in any case.
        """
        queue, pool = self._queues[tier], self.pool(tier)
        self._make_room(tier, num_pages, [_IdlePages(self, tier, lambda: queue.victim_domain(None)), frame_user])
        if not pool.active_pages:
            self._make_room(
                tier, num_pages, [_IdlePages(self, tier, queue.victim_domain_ignoring_reserves), frame_user]
            )
        return pool.free_pages >= num_pages

    def _make_room(self, tier: Tier, num_pages: int, candidates: Sequence[Evictable]) -> int:
        for last in self._lease_expiries.pop_expired(self._clock.monotonic()):
            self.requeue_path(last)
        pool = self.pool(tier)
        while pool.free_pages < num_pages and evict_one(candidates):
            continue
        return min(pool.free_pages, num_pages)

    def lowest_rank(self, tier: Tier, domain: Domain) -> EvictionRank:
        """Of the pages that a domain could give."""
        return self._queues[tier].lowest_rank(domain)

    def evict_lowest(self, tier: Tier, domain: Domain) -> None:
        """Give up the page of that rank."""
        self.evict(self._queues[tier].pop(domain), tier, MissReason.EVICTED_PRESSURE)

    def could_allocate(self, tier: Tier, num_pages: int) -> bool:
        """Whether that many pages are free, idle or the frame_user's to spare: a first look, which reserves may still
        disappoint. What the frame_user claims is left to it, beside all that it could not be given."""
        pool, frame_user = self.pool(tier), self.frame_users[tier]
        claimed = frame_user.claimed_pages and frame_user.claimed_pages + self._queues[tier].protected_pages()
        missing = num_pages + claimed - pool.free_pages - pool.idle_pages
        return missing <= 0 or missing <= frame_user.evictable_pages

    def evict(self, node: Node, tier: Tier, reason: MissReason) -> None:
        """Give up one idle page at the end of its path on a tier."""
        other = node.host if tier is Tier.DEVICE else node.device
        if other is None and not self.disk.holds(node.key):
            self._remember_reason(node, reason)
        self.tree.remove_copy(node, tier)

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Give up pages on every tier, and all that stands below them; those that are nobody's session's stay."""
        for key in keys:
            node = self.tree.find(key)
            if node is None:
                self.disk.forget(key)
            elif not node.outlives_sessions:
                for gone in self.tree.remove_subtree(node):
                    self.disk.forget(gone.key)

    def set_limits(self, domain: Domain, limits: KvLimits) -> None:
        """What a domain may keep from now on."""
        if limits == NO_KV_LIMITS:
            self._limits.pop(domain, None)
        else:
            self._limits[domain] = limits

    def excess_pages(self, tier: Tier, domain: Domain) -> int:
        """Pages of a domain above its limit on a tier."""
        limits = self._limits.get(domain, NO_KV_LIMITS)
        most_bytes = limits.device_bytes if tier is Tier.DEVICE else limits.host_bytes
        if most_bytes is None:
            return 0
        return max(self.used_pages(tier, domain) - most_bytes // self.sizes.page_bytes, 0)

    def enforce_limit(self, tier: Tier, domain: Domain) -> None:
        """Drop a domain's own idle pages until it is within its limit, or has no idle ones."""
        while self.excess_pages(tier, domain) and (node := self._queues[tier].pop_or_none(domain)) is not None:
            self.evict(node, tier, MissReason.EVICTED_QUOTA)

    # ---- changes that make pages idle -------------------------------------------------------------------------

    def release(self, tier: Tier, pages: Iterable[PageId]) -> None:
        """A holder lets go; what the tree holds of the pages stays cached."""
        self._queue_pages(tier, self.pool(tier).release(pages))

    def end_copy(self, tier: Tier, pages: Iterable[PageId]) -> None:
        """A copy has ended on some pages."""
        self._queue_pages(tier, self.pool(tier).end_copy(pages))

    def requeue(self, keys: Iterable[PageKey]) -> None:
        """Pages are worth less than before: sessions have left them, or a lease is over."""
        for key in keys:
            node = self.tree.find(key)
            if node is not None:
                self._requeue_node(node)

    def requeue_path(self, last: Node) -> None:
        """The pages of a path, down to its last node, are worth less than before."""
        for tier, queue in self._queues.items():
            node: Node | None = last
            while node is not None and node.page(tier) is None:
                node = node.parent
            if node is not None:
                queue.add(node)

    def lease(self, nodes: Sequence[Node], lease: Lease) -> None:
        """Raise the rank of a path's pages; those that several sessions reach keep the lease that lasts longest."""
        for node in nodes:
            if node.lease is None or node.lease.until < lease.until:
                node.lease = lease
        if nodes:
            self._lease_expiries.add(lease.until, nodes[-1])

    # ---- what was lost ----------------------------------------------------------------------------------------

    def eviction_reason(self, key: PageKey) -> MissReason | None:
        """Why a page is nowhere; None if it has never been here, as far as is remembered."""
        return self._eviction_reasons.get(key)

    def _remember_reason(self, node: Node, reason: MissReason) -> None:
        had_lease = node.lease is not None and node.lease.until <= self._clock.monotonic()
        by_lease = had_lease and reason is MissReason.EVICTED_PRESSURE
        self._eviction_reasons[node.key] = MissReason.LEASE_EXPIRED if by_lease else reason
        while len(self._eviction_reasons) > _MAX_REMEMBERED_REASONS:
            self._eviction_reasons.popitem(last=False)

    # ---- bookkeeping ------------------------------------------------------------------------------------------

    def _queue_pages(self, tier: Tier, pages: Iterable[PageId]) -> None:
        for page in pages:
            node = self.tree.node_of(tier, page)
            if node is not None:
                self._queues[tier].add(node)

    def _requeue_node(self, node: Node) -> None:
        for queue in self._queues.values():
            queue.add(node)

    def _copy_changed(self, node: Node, tier: Tier, change: int) -> None:
        queue = self._queues[tier]
        queue.count_copy(node, change)
        if change > 0:
            self._eviction_reasons.pop(node.key, None)
        elif node.parent is not None:
            queue.add(node.parent)
        self._requeue_node(node)  # the copy on the other tier may be worth more, or less, than it was

    def check_integrity(self) -> None:
        """Recount the pools, the tree and the orders."""
        self.device.check_integrity()
        self.host.check_integrity()
        self.tree.check_integrity()
        for tier, queue in self._queues.items():
            queue.check_integrity(self.tree.nodes_on(tier))


class _IdlePages:
    """The idle pages of some domains, as a Evictable."""

    def __init__(self, page_store: PageStore, tier: Tier, find_victim: Callable[[], Domain | None]) -> None:
        """`find_victim` is asked each time: who is above its reserve changes with what goes."""
        self._page_store = page_store
        self._tier = tier
        self._find_victim = find_victim
        self._domain: Domain | None = None

    def next_rank(self) -> EvictionRank | None:
        self._domain = self._find_victim()
        return None if self._domain is None else self._page_store.lowest_rank(self._tier, self._domain)

    def evict_next(self) -> None:
        assert self._domain is not None, "nothing was promised"
        self._page_store.evict_lowest(self._tier, self._domain)
