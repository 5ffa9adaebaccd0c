"""Which pages are on the device and on the host, and who gives way when room is needed.

Owns both pools, the prefix tree over them, the order in which each tier gives pages up, and the memory of what was
lost and why. Never copies anything.
Invariant: only idle pages at the end of their path are dropped, and never another party's below its reserve.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from graftwork.engine.drop_order import DropOrder, Ranking
from graftwork.engine.page_key import PageKey
from graftwork.engine.pages import PageId, PagePool
from graftwork.engine.prefix_tree import Lease, Node, Owner, PrefixTree
from graftwork.engine.request import NO_KV_LIMITS, KvLimits, MissReason
from graftwork.engine.tier_names import Tier
from graftwork.engine.transfers import DiskPages
from graftwork.platform.clock import Clock

_MOST_REMEMBERED_LOSSES = 1 << 16


@dataclass(frozen=True, slots=True)
class KvSizes:
    """What there is of each tier in memory."""

    page_tokens: int
    page_bytes: int
    device_pages: int
    host_pages: int
    context_pages: int
    """Pages of one whole context."""
    reserve_share: float = 0.5
    """Of each tier: parted among the parties present, whom others cannot push below it."""


class Residency:
    """The device's and the host's pages."""

    def __init__(self, sizes: KvSizes, ranking: Ranking, disk: DiskPages, clock: Clock) -> None:
        self.sizes = sizes
        self.disk = disk
        self.device = PagePool(sizes.device_pages)
        self.host = PagePool(sizes.host_pages)
        self.tree = PrefixTree(self.device, self.host, sizes.page_tokens)
        self.tree.on_copy_changed = self._copy_changed
        device_reserve = min(int(sizes.reserve_share * sizes.device_pages), sizes.device_pages - sizes.context_pages)
        self._orders = {
            Tier.DEVICE: DropOrder(Tier.DEVICE, self.device, ranking, max(device_reserve, 0)),
            Tier.HOST: DropOrder(Tier.HOST, self.host, ranking, int(sizes.reserve_share * sizes.host_pages)),
        }
        self._clock = clock
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
        """Drop pages until `num_pages` are free, or nothing more may go; returns how many of them are free."""
        pool = self.pool(tier)
        while pool.free_pages < num_pages:
            node = self._orders[tier].next_for(owner)
            if node is None:
                break
            self.drop(node, tier, MissReason.EVICTED_PRESSURE)
        return min(pool.free_pages, num_pages)

    def could_have(self, tier: Tier, num_pages: int) -> bool:
        """Whether that many pages are free or idle: a first look, which reserves may still disappoint."""
        pool = self.pool(tier)
        return num_pages <= pool.free_pages + pool.idle_pages

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

    def lease(self, nodes: Iterable[Node], lease: Lease) -> None:
        """Pages are leased; those that several sessions reach keep the lease that lasts longest."""
        for node in nodes:
            if node.lease is None or node.lease.until < lease.until:
                node.lease = lease
                self._offer(node)

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
