"""Copies pages to lower tiers: from the device to the host, and from the host to disk.

Owns the queues of pages that wait for a copy. A session's pages are copied when its turn ends. Other pages are copied
in the background when few pages are free. So most evicted pages already have a copy on a lower tier.

Invariant: a page is on the host only if the page before it in the prompt is on the host too.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.kv_limits import KvLimit
from graftwork.engine.kv.index.page_store import PageStore
from graftwork.engine.kv.index.radix_tree import Domain, Node
from graftwork.engine.kv.transfer.plan import CopyEngine, PageMove, TransferDone, TransferKind, TransferPlan

LOW_WATER = 0.25
"""The fraction of a tier's pages that should be free. If fewer pages are free, idle pages are copied to the lower tier.
"""
_BATCH_PAGES = 64
"""The most pages that one background copy copies."""
_SLACK = 64
"""A bound on the length of a queue: twice the pages of its tier plus this number. A longer queue drops nodes that left
the tier.
"""


class PageOffloader:
    """Plans the copies of pages to lower tiers: from the device to the host (saves) and from the host to disk (stores)."""

    def __init__(
        self, page_store: PageStore, copies: CopyEngine, is_in_history: Callable[[PageKey], bool], *, has_disk: bool
    ) -> None:
        self._page_store = page_store
        self._copies = copies
        self._is_reached = is_in_history
        self._has_disk = has_disk
        self._dirty: OrderedDict[Node, None] = OrderedDict()
        self._to_store: OrderedDict[Node, None] = OrderedDict()
        self._only_on_host: OrderedDict[Node, None] = OrderedDict()
        self._suspending: set[Node] = set()
        self._saves = self._stores = 0

    def mark_dirty(self, nodes: Iterable[Node]) -> None:
        """Queues the pages of `nodes` that are not on the host yet, so that they are copied there later.

        `nodes` are a path of the prefix tree, from the root on.
        """
        if not self._page_store.host.num_pages:
            return
        wanted = (node for node in self._page_store.windows.of(nodes) if _is_worth_saving(node))
        self._dirty.update((node, None) for node in wanted if node.host is None and not node.is_saving)
        if self._is_too_long(self._dirty, Tier.DEVICE):
            self._dirty = OrderedDict((node, None) for node in self._dirty if _can_be_saved(node))

    def start_background_copies(self) -> None:
        """Starts copies to lower tiers: from the device to the host, and from the host to disk.

        Copies pages from the device only if few device pages are free and no copy to the host is running. Copies pages
        to disk only if no copy to disk is running. Takes the pages that `store` has queued first, then others if few
        host pages are free.
        """
        if not self._saves and self._dirty and _runs_short(self._page_store, Tier.DEVICE):
            self._save_oldest()
        self._begin_store()

    def save(self, nodes: Sequence[Node]) -> None:
        """Starts to copy the pages of `nodes` to the host, first node first, as many as the host has room for.

        Leaves out pages that are on the host already. `nodes` are a path of the prefix tree.
        """
        self._save([node for node in self._page_store.windows.of(nodes) if _can_be_saved(node)])

    def suspend(self, nodes: Sequence[Node]) -> None:
        """Starts to copy the pages of `nodes` to the host. Removes each page from the device as soon as the host has a
        copy.

        `nodes` are a path of the prefix tree.
        """
        self._suspending.update(self._page_store.windows.of(nodes))
        self.save(nodes)
        self._drop_suspended()

    def keep_on_device(self, nodes: Iterable[Node]) -> None:
        """Cancels the effect of `suspend` for some nodes: their pages are not removed from the device."""
        self._suspending.difference_update(self._page_store.windows.of(nodes))

    def store(self, nodes: Iterable[Node]) -> None:
        """Starts to copy those pages of `nodes` that are on the host to disk, so that they remain after a restart of
        the engine.

        Does nothing on an engine without a disk tier.
        """
        if self._has_disk:
            self._queue_store(nodes)
            self.start_background_copies()

    def enforce_limits(self, domain: Domain) -> None:
        """Removes pages of a domain (usually one tenant), and of the domains that share a limit with it, from the device
        and the host until they are within their limits.

        A page without a copy on a lower tier is copied there first, if there is a lower tier.
        """
        for limit in self._page_store.limits.of(domain):
            self._enforce(limit)

    def _enforce(self, limit: KvLimit) -> None:
        page_store = self._page_store
        if page_store.excess_pages(Tier.DEVICE, limit):
            for domain in limit.domains:
                dirty = [node for node in self._dirty if node.domain == domain and _can_be_saved(node)]
                self._save(sorted(dirty, key=lambda node: node.depth))
            page_store.enforce_limit(Tier.DEVICE, limit)
        if page_store.excess_pages(Tier.HOST, limit):
            self._queue_store(node for node in self._only_on_host if node.domain in limit.domains)
            self._begin_store()
            if not any(node.domain in limit.domains for node in self._to_store):
                page_store.enforce_limit(Tier.HOST, limit)

    def finish(self, done: TransferDone) -> None:
        """Processes the end of a copy to a lower tier, and starts the next one."""
        if done.plan.kind is TransferKind.SAVE:
            self._saves -= 1
            self._finish_save(done)
        else:
            self._stores -= 1
            self._finish_store(done)
        self.start_background_copies()

    # ---- device to host ---------------------------------------------------------------------------------------

    def _save_oldest(self) -> None:
        """Copies to the host the nodes that have waited longest for a copy there.

        A node that does not fit on the host must not block other nodes. While other copies use the host, the node moves
        to the end of the queue. Otherwise it leaves the queue until its path is used again. This keeps two paths that
        are too large for the host from evicting each other for ever.
        """
        is_busy = self._page_store.host.in_flight_pages > 0
        oldest = self._oldest_dirty()
        self._save(oldest)
        for node in oldest:
            if node in self._dirty:
                self._dirty.move_to_end(node)
                if not is_busy:
                    del self._dirty[node]

    def _oldest_dirty(self) -> list[Node]:
        """Returns nodes of one domain without a copy on the host.

        Each comes after its ancestors without such a copy.
        """
        chosen: dict[Node, None] = {}
        domain: Domain | None = None
        for node in list(islice(self._dirty, 4 * _BATCH_PAGES)):
            if not _can_be_saved(node):
                del self._dirty[node]
            elif domain in (None, node.domain) and len(chosen) < _BATCH_PAGES:
                domain = node.domain
                chosen.update(dict.fromkeys(_dirty_path(node)))
        return list(chosen)

    def _save(self, dirty: Sequence[Node]) -> None:
        if not dirty:
            return
        page_store = self._page_store
        domain = dirty[-1].domain  # the first nodes may be public, and the public domain has no pages to evict for them
        chosen = _with_parent_on_host(dirty)
        anchors = [node.parent.host for node in chosen if node.parent is not None and node.parent.host is not None]
        page_store.host.begin_copy(anchors)  # the host must not evict the parents of the new pages to make room
        chosen = chosen[: page_store.make_room(Tier.HOST, len(chosen), domain)]
        targets = page_store.host.allocate(len(chosen))
        page_store.end_copy(Tier.HOST, anchors)
        moves = tuple(PageMove(node.key, node.device, page) for node, page in zip(chosen, targets, strict=True))
        if not moves:
            return
        page_store.device.begin_copy([move.source for move in moves if move.source is not None])
        page_store.host.begin_copy(targets)
        for node in chosen:
            node.is_saving = True
            self._dirty.pop(node, None)
        self._saves += 1
        self._copies.begin(TransferPlan(TransferKind.SAVE, domain, moves, tuple(chosen)))

    def _finish_save(self, done: TransferDone) -> None:
        page_store, plan = self._page_store, done.plan
        for index, (node, move) in enumerate(zip(plan.nodes, plan.moves, strict=True)):
            assert move.target is not None
            node.is_saving = False
            has_parent = node.parent is None or node.parent.host is not None
            if index < done.num_good and node.in_tree and node.host is None and has_parent:
                page_store.tree.add_copy(node, Tier.HOST, move.target)
        # A page is queued for eviction when its copy ends, if no page follows it: so all pages are in the tree before.
        targets = [move.target for move in plan.moves if move.target is not None]
        page_store.release(Tier.HOST, targets)
        page_store.end_copy(Tier.HOST, targets)
        page_store.end_copy(Tier.DEVICE, [move.source for move in plan.moves if move.source is not None])
        saved = [node for node in plan.nodes if node.host is not None]
        if self._has_disk:
            self._only_on_host.update(dict.fromkeys(saved))
            if self._is_too_long(self._only_on_host, Tier.HOST):
                self._only_on_host = _on_host(self._only_on_host)
            self.store([node for node in saved if self._is_reached(node.owner.key)])
        self._drop_suspended()
        self._enforce_limits_of(plan.nodes)

    def _drop_suspended(self) -> None:
        """Removes suspended pages that are on the host from the device, last page of a path first."""
        for node in sorted(self._suspending, key=lambda node: (-node.depth, node.window_group is None)):
            if node.is_saving or any(child in self._suspending for child in node.children):
                continue
            self._suspending.discard(node)
            page = node.device
            is_kept = node.host is None and _is_worth_saving(node)
            if page is None or is_kept or not node.is_leaf_on(Tier.DEVICE):
                continue
            if self._page_store.device.is_idle(page):
                self._page_store.tree.remove_copy(node, Tier.DEVICE)

    # ---- host to disk -----------------------------------------------------------------------------------------

    def _begin_store(self) -> None:
        """Begins a copy to disk if none is running: of queued pages, else of pages that the host may soon evict."""
        if not self._stores and self._to_store:
            self._store(self._to_store)
        elif not self._stores and self._only_on_host and _runs_short(self._page_store, Tier.HOST):
            self._store(self._only_on_host)

    def _queue_store(self, nodes: Iterable[Node]) -> None:
        """Queues the nodes that are on the host for a copy to disk, and the windowed pages beside them."""
        self._to_store.update(_on_host(self._page_store.windows.of(nodes)))
        if self._is_too_long(self._to_store, Tier.HOST):
            self._to_store = _on_host(self._to_store)

    def _store(self, waiting: OrderedDict[Node, None]) -> None:
        """Begins to copy the first pages of a queue to disk."""
        chosen: list[Node] = []
        while waiting and len(chosen) < _BATCH_PAGES:
            node, _ = waiting.popitem(last=False)
            self._only_on_host.pop(node, None)
            is_wanted = node.in_tree and node.host is not None and _is_worth_saving(node)
            if is_wanted and not self._page_store.disk.holds(node.key):
                chosen.append(node)
        if not chosen:
            return
        chosen.sort(key=lambda node: node.window_group is not None)  # pages that follow each other share a file
        moves = tuple(PageMove(node.key, node.host, None) for node in chosen)
        self._page_store.host.begin_copy([move.source for move in moves if move.source is not None])
        self._stores += 1
        self._copies.begin(TransferPlan(TransferKind.STORE, chosen[0].domain, moves, tuple(chosen)))

    def _finish_store(self, done: TransferDone) -> None:
        closed = [node for node in done.plan.nodes if not node.in_tree and not self._is_reached(node.owner.key)]
        for move in done.plan.moves:
            assert move.source is not None
            self._page_store.end_copy(Tier.HOST, [move.source])
        for node in closed:  # the sessions of these pages were closed during the write
            self._page_store.disk.forget(node.key)
        if closed:
            self._copies.sweep()
        self._enforce_limits_of(done.plan.nodes)

    # ---- bookkeeping ------------------------------------------------------------------------------------------

    def _enforce_limits_of(self, nodes: Iterable[Node]) -> None:
        """Enforces the limits of all domains whose pages were copied."""
        for domain in dict.fromkeys(node.domain for node in nodes):
            self.enforce_limits(domain)

    def _is_too_long(self, queue: Collection[Node], tier: Tier) -> bool:
        return len(queue) > _SLACK + 2 * self._page_store.pool(tier).num_pages

    def check_integrity(self) -> None:
        """Checks that no queue of pages is longer than its limit."""
        assert not self._is_too_long(self._dirty, Tier.DEVICE)
        assert not self._is_too_long(self._to_store, Tier.HOST)
        assert not self._is_too_long(self._only_on_host, Tier.HOST)


def _is_worth_saving(node: Node) -> bool:
    """Returns whether a prompt can continue with the page: false for windowed pages in the middle of prompts."""
    return node.window_group is None or node.is_tail


def _can_be_saved(node: Node) -> bool:
    if not _is_worth_saving(node):
        return False
    return node.in_tree and node.device is not None and node.host is None and not node.is_loading and not node.is_saving


def _on_host(queue: Iterable[Node]) -> OrderedDict[Node, None]:
    """Returns the nodes of a queue that have a copy on the host, in the same order."""
    return OrderedDict.fromkeys(node for node in queue if node.in_tree and node.host is not None)


def _runs_short(page_store: PageStore, tier: Tier) -> bool:
    pool = page_store.pool(tier)
    return pool.free_pages < LOW_WATER * pool.num_pages


def _dirty_path(node: Node) -> list[Node]:
    """Returns the ancestors of a node that must be saved before it, then the node."""
    path = [node]
    while (parent := path[-1].parent) is not None and _can_be_saved(parent):
        path.append(parent)
    return path[::-1]


def _with_parent_on_host(dirty: Sequence[Node]) -> list[Node]:
    """Returns the nodes whose parent is on the host, is being saved, or comes before them."""
    chosen: dict[Node, None] = {}
    for node in dirty:
        parent = node.parent
        if parent is None or parent.host is not None or parent.is_saving or parent in chosen:
            chosen[node] = None
    return list(chosen)
