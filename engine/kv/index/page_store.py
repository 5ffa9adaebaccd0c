"""Manages the KV pages of the device and the host: allocation, eviction and the prefix tree.

Owns the page pool and the eviction queue of each of these two tiers, the tree, and the limits of each domain (usually
one tenant) and of groups of domains. Never copies a page: the offloader saves pages before they are evicted.

Invariant: each page that can be evicted is in the eviction queue of its tier, with its present rank or a lower one. So
every change that lowers the rank of a page puts the page into the queue again (`requeue`). When leases expire, their
pages are put into the queue again before the next eviction.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from graftwork.engine.core.events import MissReason
from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.disk.index import NO_OBJECTS, DiskCounters, ObjectFigures
from graftwork.engine.kv.index.eviction_queue import (
    Evictable,
    EvictionQueue,
    EvictionRank,
    FrameUser,
    LeaseExpiryQueue,
    NoFrameUser,
    Ranking,
    evict_one,
)
from graftwork.engine.kv.index.kv_limits import KvLimit, KvLimitTable
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.index.page_pool import PagePool
from graftwork.engine.kv.index.radix_tree import Domain, Lease, Node, RadixTree
from graftwork.engine.kv.index.window_pages import PrefixWindows
from graftwork.platform.clock import Clock


class DiskPages(Protocol):
    """The methods of the disk store that the engine's loop calls. None of them waits for the disk."""

    @property
    def num_pages(self) -> int: ...

    @property
    def bytes_used(self) -> int: ...

    @property
    def counters(self) -> DiskCounters: ...

    @property
    def objects(self) -> ObjectFigures: ...

    def holds(self, key: PageKey) -> bool:
        """Returns whether the page is stored on disk and its key is here, without reading its content."""
        ...

    def unlock(self, domain: bytes, key: KvFileKey) -> bool:
        """Takes the key of a domain's files, by its digest. Returns whether `DiskStore.sweep` has plain files to remove."""
        ...

    def forget(self, key: PageKey) -> None:
        """Forgets a page at once. `DiskStore.sweep` later removes its file, if all pages in the file were forgotten."""
        ...

    def forget_domain(self, domain: bytes) -> int:
        """Forgets all pages of a domain (usually one tenant), by its digest, at once. Returns their number."""
        ...


class NoDisk:
    """Replaces the disk store on an engine without a disk tier. It contains no pages."""

    num_pages = 0
    bytes_used = 0
    counters = DiskCounters()
    objects = NO_OBJECTS

    def holds(self, key: PageKey) -> bool:
        return False

    def unlock(self, domain: bytes, key: KvFileKey) -> bool:
        return False

    def forget(self, key: PageKey) -> None:
        """Does nothing, because no page is on disk."""

    def forget_domain(self, domain: bytes) -> int:
        return 0


_MAX_REMEMBERED_REASONS = 1 << 16


class PageStore:
    """Manages the KV pages of the device and the host: their allocation, their order of eviction and the prefix tree."""

    def __init__(self, sizes: KvSizes, ranking: Ranking, disk: DiskPages, clock: Clock) -> None:
        self.sizes = sizes
        self.disk = disk
        self.device = PagePool(sizes.device_pages)
        self.host = PagePool(sizes.host_pages)
        self.tree = RadixTree(self.device, self.host, sizes.page_tokens)
        self.windows = PrefixWindows(self.tree, disk, sizes.windows)
        self.tree.on_copy_changed = self._copy_changed
        self._queues = {
            Tier.DEVICE: EvictionQueue(Tier.DEVICE, self.device, ranking, sizes.device_reserve_pages),
            Tier.HOST: EvictionQueue(Tier.HOST, self.host, ranking, int(sizes.reserve_share * sizes.host_pages)),
        }
        self.frame_users: dict[Tier, FrameUser] = {Tier.DEVICE: NoFrameUser(), Tier.HOST: NoFrameUser()}
        """The users of memory besides KV pages, by tier: the adapters on the device, and none on the host."""
        self.limits = KvLimitTable()
        self._clock = clock
        self._lease_expiries = LeaseExpiryQueue()
        self._eviction_reasons: OrderedDict[PageKey, MissReason] = OrderedDict()

    def pool(self, tier: Tier) -> PagePool:
        """Returns the page pool of `tier`, which is the device or the host."""
        return self.device if tier is Tier.DEVICE else self.host

    def used_pages(self, tier: Tier, domain: Domain) -> int:
        """Returns how many pages of `domain` (usually one tenant) the prefix tree holds on `tier`."""
        return self._queues[tier].used_pages(domain)

    def reserve_pages(self, tier: Tier) -> int:
        """Returns the reserve of each domain (usually one tenant) that has pages on `tier`.

        The reserve is how many pages of a domain cannot be evicted to make room for other domains.
        """
        return self._queues[tier].reserve_pages()

    # ---- room -------------------------------------------------------------------------------------------------

    def make_room(self, tier: Tier, num_pages: int, domain: Domain) -> int:
        """Evicts pages and adapters, lowest rank first, until `num_pages` pages are free or nothing more may be
        evicted.

        `domain` is the domain (usually one tenant) that needs the pages. Returns the number of free pages, at most
        `num_pages`.
        """
        queue = self._queues[tier]
        pages = _IdlePages(self, tier, lambda: queue.victim_domain(domain))
        return self._make_room(tier, num_pages, [pages, self.frame_users[tier]])

    def make_room_for_frames(self, tier: Tier, num_pages: int, frame_user: Evictable) -> bool:
        """Evicts pages and adapters until `num_pages` pages of memory are free for an adapter. Returns whether this
        succeeded.

        Adapters are evicted through `frame_user`. At first, every domain (usually one tenant) keeps its reserve (pages
        that cannot be evicted for others). If too little is free after that, and no request uses a page, evicts
        reserved pages too. Otherwise public pages (shared by all tenants) might stay for ever: a public page cannot be
        evicted before a reserved page that follows it in the prefix tree.
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
        """Returns the eviction rank of the page of `domain` (usually one tenant) that would be evicted first from
        `tier`.
        """
        return self._queues[tier].lowest_rank(domain)

    def evict_lowest(self, tier: Tier, domain: Domain) -> None:
        """Evicts the page of `domain` (usually one tenant) that has the lowest eviction rank on `tier`."""
        self.evict(self._queues[tier].pop(domain), tier, MissReason.EVICTED_PRESSURE)

    def could_allocate(self, tier: Tier, num_pages: int) -> bool:
        """Returns whether `num_pages` pages of `tier` are free or could be made free.

        Idle pages and adapters can be evicted to make pages free. If adapters have waited too long for memory, fewer
        pages count: neither the pages that these adapters need, nor the pages that are reserved for domains (tenants).
        True is no promise: a reserve may still prevent the allocation.
        """
        pool, frame_user = self.pool(tier), self.frame_users[tier]
        claimed = frame_user.claimed_pages and frame_user.claimed_pages + self._queues[tier].protected_pages()
        missing = num_pages + claimed - pool.free_pages - pool.idle_pages
        return missing <= 0 or missing <= frame_user.evictable_pages

    def evict(self, node: Node, tier: Tier, reason: MissReason) -> None:
        """Evicts a node's idle page from `tier`. No child of the node may have a page on `tier`.

        If this was the last copy of the page on any tier, remembers `reason`, to explain a later cache miss. If it was a
        page of a windowed layer group, those of the others are of no use any more and are evicted soon.
        """
        other = node.host if tier is Tier.DEVICE else node.device
        is_lost = other is None and not self.disk.holds(node.key)
        if is_lost:
            self._remember_reason(node.owner, reason)
        self.tree.remove_copy(node, tier)
        if is_lost and node.window_group is not None:
            siblings = self.tree.windows_of(node.owner)
            for sibling in siblings:
                sibling.is_tail = False
            self.requeue_nodes(siblings)

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Removes the pages with these `keys`, and all pages that follow them in the prefix tree, from every tier.

        If a request without a session has used a page of `keys`, keeps this page and all pages that follow it.
        """
        for key in keys:
            node = self.tree.find(key)
            if node is None:
                for gone in (key, *self.windows.keys(key)):
                    self.disk.forget(gone)
            elif not node.outlives_sessions:
                for removed in self.tree.remove_subtree(node):
                    for gone in (removed.key, *self.windows.keys(removed.owner.key)):
                        self.disk.forget(gone)

    def excess_pages(self, tier: Tier, limit: KvLimit) -> int:
        """Returns by how many pages the domains of a limit exceed it together on `tier`; 0 if they do not."""
        max_bytes = limit.max_bytes(tier)
        if max_bytes is None:
            return 0
        used = sum(self.used_pages(tier, domain) for domain in limit.domains)
        return max(used - max_bytes // self.sizes.page_bytes, 0)

    def enforce_limit(self, tier: Tier, limit: KvLimit) -> None:
        """Evicts idle pages of the limit's domains (usually tenants) from `tier` until they are within it there.

        The domain with most pages loses one first, so that none of them pushes out the others. Stops before that if no
        page can be evicted.
        """
        queue = self._queues[tier]
        while self.excess_pages(tier, limit) and (node := queue.pop_of_largest(limit.domains)) is not None:
            self.evict(node, tier, MissReason.EVICTED_QUOTA)

    # ---- changes of a page's state ----------------------------------------------------------------------------

    def release(self, tier: Tier, pages: Iterable[PageId]) -> None:
        """Removes one holder (for example, a request) from each page. Pages that are in the prefix tree stay cached."""
        self._queue_pages(tier, self.pool(tier).release(pages))

    def end_copy(self, tier: Tier, pages: Iterable[PageId]) -> None:
        """Records that one copy operation of each page has ended. Queues the pages that are now idle for eviction."""
        self._queue_pages(tier, self.pool(tier).end_copy(pages))

    def requeue(self, keys: Iterable[PageKey]) -> None:
        """Puts pages into the eviction queues again, because their rank has fallen.

        For example, a session's history no longer contains them.
        """
        for key in keys:
            node = self.tree.find(key)
            if node is not None:
                self.requeue_nodes(self.windows.of([node]))

    def requeue_nodes(self, nodes: Iterable[Node]) -> None:
        """Puts the pages of nodes into the eviction queues again, because their rank has fallen."""
        for node in nodes:
            self._requeue_node(node)

    def requeue_path(self, last: Node) -> None:
        """Puts a path of the prefix tree into the eviction queues again, because the rank of its pages has fallen.

        `last` is the last node of the path. On each tier, only the last page of the path is queued, because the pages
        before it cannot be evicted earlier. Windowed pages can.
        """
        if self.sizes.windows is not None:
            above: Node | None = last
            while above is not None:
                self.requeue_nodes(self.tree.windows_of(above))
                above = above.parent
        for tier, queue in self._queues.items():
            node: Node | None = last
            while node is not None and node.page(tier) is None:
                node = node.parent
            if node is not None:
                queue.add(node)

    def lease(self, nodes: Sequence[Node], lease: Lease) -> None:
        """Protects the pages of a path with a lease: until it ends, pages without a lease are evicted first.

        A page with several leases keeps the lease that ends last.
        """
        for node in nodes:
            if node.lease is None or node.lease.until < lease.until:
                node.lease = lease
        for node in [*(node for node in nodes[:-1] if node.is_apart), *nodes[-1:]]:
            self._lease_expiries.add(lease.until, node)

    # ---- evicted pages ----------------------------------------------------------------------------------------

    def eviction_reason(self, key: PageKey) -> MissReason | None:
        """Returns why the last copy of a page was evicted; None if this is not known."""
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
            self._eviction_reasons.pop(node.owner.key, None)
        elif node.window_group is not None:
            self._requeue_node(node.owner)  # it may lead nowhere now
        elif node.parent is not None:
            queue.add(node.parent)
        self._requeue_node(node)  # the rank of the node's copy on the other tier has changed

    def check_integrity(self) -> None:
        """Checks the page pools, the prefix tree and the eviction queues."""
        self.device.check_integrity()
        self.host.check_integrity()
        self.tree.check_integrity()
        self._lease_expiries.check_integrity()
        self.limits.check_integrity()
        for tier, queue in self._queues.items():
            queue.check_integrity(self.tree.nodes_on(tier))


class _IdlePages:
    """Offers the idle pages of some domains for eviction, lowest rank first."""

    def __init__(self, page_store: PageStore, tier: Tier, find_victim: Callable[[], Domain | None]) -> None:
        """`find_victim` is called for each page, because evictions change which domains are above their reserve."""
        self._page_store = page_store
        self._tier = tier
        self._find_victim = find_victim
        self._domain: Domain | None = None

    def next_rank(self) -> EvictionRank | None:
        self._domain = self._find_victim()
        return None if self._domain is None else self._page_store.lowest_rank(self._tier, self._domain)

    def evict_next(self) -> None:
        assert self._domain is not None, "next_rank must be called first"
        self._page_store.evict_lowest(self._tier, self._domain)
