"""Pages on their way down: copies that let the device, and then the host, forget without losing.

A session's pages go down as soon as its turn has ended; all others in the background, once free pages run short.
So dropping a page under pressure is mostly a change of a number.
Invariant: a page's parent is on the host before it is.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.page_store import Residency
from graftwork.engine.kv.index.radix_tree import Node, Owner
from graftwork.engine.kv.transfer.plan import CopyEngine, PageMove, TransferDone, TransferKind, TransferPlan

LOW_WATER = 0.25
"""Share of a tier's pages: with fewer free ones, idle pages are copied down."""
_BATCH_PAGES = 64
"""Of one background copy."""
_SLACK = 64
"""Nodes that a line may hold beside twice the pages of its tier, before those that left it are taken out."""


class Cleaner:
    """Plans copies from the device to the host, and from the host to disk."""

    def __init__(
        self, residency: Residency, copies: CopyEngine, is_reached: Callable[[PageKey], bool], *, has_disk: bool
    ) -> None:
        self._residency = residency
        self._copies = copies
        self._is_reached = is_reached
        self._has_disk = has_disk
        self._dirty: OrderedDict[Node, None] = OrderedDict()
        self._wanted_on_disk: OrderedDict[Node, None] = OrderedDict()
        self._only_on_host: OrderedDict[Node, None] = OrderedDict()
        self._giving_up: set[Node] = set()
        self._saves = self._stores = 0

    def consider(self, nodes: Iterable[Node]) -> None:
        """Nodes of a path, from the root: those without a copy on the host will want one."""
        if not self._residency.host.num_pages:
            return
        self._dirty.update((node, None) for node in nodes if node.host is None and not node.is_leaving)
        if self._is_too_long(self._dirty, Tier.DEVICE):
            self._dirty = OrderedDict((node, None) for node in self._dirty if _can_be_saved(node))

    def tick(self) -> None:
        """Copy some idle pages down where free ones run short, unless a background copy is under way."""
        if not self._saves and self._dirty and _runs_short(self._residency, Tier.DEVICE):
            self._save_oldest()
        self._begin_store()

    def save(self, nodes: Sequence[Node]) -> None:
        """Copy the dirty pages of a path down, from the root, as many as the host takes."""
        self._save([node for node in nodes if _can_be_saved(node)])

    def suspend(self, nodes: Sequence[Node]) -> None:
        """Copy the pages of a path down, and drop each from the device as soon as it stands on the host."""
        self._giving_up.update(nodes)
        self.save(nodes)
        self._give_up()

    def keep(self, nodes: Iterable[Node]) -> None:
        """Pages that were being given up are wanted on the device after all."""
        self._giving_up.difference_update(nodes)

    def keep_on_disk(self, nodes: Iterable[Node]) -> None:
        """Pages of a session's history are to survive this process."""
        if self._has_disk:
            self._want_on_disk(nodes)
            self.tick()

    def relieve(self, owner: Owner) -> None:
        """Bring a party within its limits: what stands on no lower tier is copied there first, if that takes it."""
        residency = self._residency
        if residency.excess_pages(Tier.DEVICE, owner):
            dirty = [node for node in self._dirty if node.owner == owner and _can_be_saved(node)]
            self._save(sorted(dirty, key=lambda node: node.depth))
            residency.enforce_limit(Tier.DEVICE, owner)
        if residency.excess_pages(Tier.HOST, owner):
            self._want_on_disk(node for node in self._only_on_host if node.owner == owner)
            self._begin_store()
            if not any(node.owner == owner for node in self._wanted_on_disk):
                residency.enforce_limit(Tier.HOST, owner)

    def absorb(self, done: TransferDone) -> None:
        """A copy down has ended."""
        if done.plan.kind is TransferKind.SAVE:
            self._saves -= 1
            self._absorb_save(done)
        else:
            self._stores -= 1
            self._absorb_store(done)
        self.tick()

    # ---- device to host ---------------------------------------------------------------------------------------

    def _save_oldest(self) -> None:
        """Save some dirty nodes. Those that the host refuses do not stand in the way of others: they wait behind them
        while other copies occupy the host, and otherwise until their path is used again, so that two paths for which
        it is too small do not push each other out for ever."""
        is_busy = self._residency.host.in_flight_pages > 0
        oldest = self._oldest_dirty()
        self._save(oldest)
        for node in oldest:
            if node in self._dirty:
                self._dirty.move_to_end(node)
                if not is_busy:
                    del self._dirty[node]

    def _oldest_dirty(self) -> list[Node]:
        """Some dirty nodes of one party, each behind its dirty ancestors."""
        chosen: dict[Node, None] = {}
        owner: Owner | None = None
        for node in list(islice(self._dirty, 4 * _BATCH_PAGES)):
            if not _can_be_saved(node):
                del self._dirty[node]
            elif owner in (None, node.owner) and len(chosen) < _BATCH_PAGES:
                owner = node.owner
                chosen.update(dict.fromkeys(_dirty_path(node)))
        return list(chosen)

    def _save(self, dirty: Sequence[Node]) -> None:
        if not dirty:
            return
        residency, owner = self._residency, dirty[-1].owner  # the first ones may be public, and nobody's to make room
        chosen = _hanging(dirty)
        anchors = [node.parent.host for node in chosen if node.parent is not None and node.parent.host is not None]
        residency.host.take_off(anchors)  # the host must not make room by dropping what they hang on
        chosen = chosen[: residency.make_room(Tier.HOST, len(chosen), owner)]
        targets = residency.host.take(len(chosen))
        residency.land(Tier.HOST, anchors)
        moves = tuple(PageMove(node.key, node.device, page) for node, page in zip(chosen, targets, strict=True))
        if not moves:
            return
        residency.device.take_off([move.source for move in moves if move.source is not None])
        residency.host.take_off(targets)
        for node in chosen:
            node.is_leaving = True
            self._dirty.pop(node, None)
        self._saves += 1
        self._copies.begin(TransferPlan(TransferKind.SAVE, owner, moves, tuple(chosen)))

    def _absorb_save(self, done: TransferDone) -> None:
        residency, plan = self._residency, done.plan
        for index, (node, move) in enumerate(zip(plan.nodes, plan.moves, strict=True)):
            assert move.source is not None
            assert move.target is not None
            node.is_leaving = False
            hangs = node.parent is None or node.parent.host is not None
            if index < done.num_good and node.in_tree and node.host is None and hangs:
                residency.tree.add_copy(node, Tier.HOST, move.target)
            residency.release(Tier.HOST, [move.target])
            residency.land(Tier.HOST, [move.target])
            residency.land(Tier.DEVICE, [move.source])
        saved = [node for node in plan.nodes if node.host is not None]
        if self._has_disk:
            self._only_on_host.update(dict.fromkeys(saved))
            if self._is_too_long(self._only_on_host, Tier.HOST):
                self._only_on_host = _on_host(self._only_on_host)
            self.keep_on_disk(node for node in saved if self._is_reached(node.key))
        self._give_up()
        self._relieve_all(plan.nodes)

    def _give_up(self) -> None:
        """Drop the device's copies of suspended pages that stand on the host, from the end of each path."""
        for node in sorted(self._giving_up, key=lambda node: -node.depth):
            if node.is_leaving or any(child in self._giving_up for child in node.children.values()):
                continue
            self._giving_up.discard(node)
            page = node.device
            if page is None or node.host is None or not node.is_edge_of(Tier.DEVICE):
                continue
            if self._residency.device.is_idle(page):
                self._residency.tree.drop_copy(node, Tier.DEVICE)

    # ---- host to disk -----------------------------------------------------------------------------------------

    def _begin_store(self) -> None:
        """Write what is wanted on disk, or else what the host may have to give up, unless something is being written."""
        if not self._stores and self._wanted_on_disk:
            self._store(self._wanted_on_disk)
        elif not self._stores and self._only_on_host and _runs_short(self._residency, Tier.HOST):
            self._store(self._only_on_host)

    def _want_on_disk(self, nodes: Iterable[Node]) -> None:
        """Put those of some nodes that are on the host at the end of the line to the disk."""
        self._wanted_on_disk.update(_on_host(nodes))
        if self._is_too_long(self._wanted_on_disk, Tier.HOST):
            self._wanted_on_disk = _on_host(self._wanted_on_disk)

    def _store(self, waiting: OrderedDict[Node, None]) -> None:
        """Write the oldest of some pages."""
        chosen: list[Node] = []
        while waiting and len(chosen) < _BATCH_PAGES:
            node, _ = waiting.popitem(last=False)
            self._only_on_host.pop(node, None)
            if node.in_tree and node.host is not None and not self._residency.disk.holds(node.key):
                chosen.append(node)
        if not chosen:
            return
        moves = tuple(PageMove(node.key, node.host, None) for node in chosen)
        self._residency.host.take_off([move.source for move in moves if move.source is not None])
        self._stores += 1
        self._copies.begin(TransferPlan(TransferKind.STORE, chosen[0].owner, moves, tuple(chosen)))

    def _absorb_store(self, done: TransferDone) -> None:
        closed = [node for node in done.plan.nodes if not node.in_tree and not self._is_reached(node.key)]
        for move in done.plan.moves:
            assert move.source is not None
            self._residency.land(Tier.HOST, [move.source])
        for node in closed:  # while it was written
            self._residency.disk.forget(node.key)
        if closed:
            self._copies.sweep()
        self._relieve_all(done.plan.nodes)

    # ---- bookkeeping ------------------------------------------------------------------------------------------

    def _relieve_all(self, nodes: Iterable[Node]) -> None:
        """Bring everyone within their limits whose pages have been copied."""
        for owner in dict.fromkeys(node.owner for node in nodes):
            self.relieve(owner)

    def _is_too_long(self, line: Collection[Node], tier: Tier) -> bool:
        return len(line) > _SLACK + 2 * self._residency.pool(tier).num_pages

    def check_integrity(self) -> None:
        """Nothing that waits is remembered without bound."""
        assert not self._is_too_long(self._dirty, Tier.DEVICE)
        assert not self._is_too_long(self._wanted_on_disk, Tier.HOST)
        assert not self._is_too_long(self._only_on_host, Tier.HOST)


def _can_be_saved(node: Node) -> bool:
    return (
        node.in_tree and node.device is not None and node.host is None and not node.is_arriving and not node.is_leaving
    )


def _on_host(line: Iterable[Node]) -> OrderedDict[Node, None]:
    """Those that are still there."""
    return OrderedDict.fromkeys(node for node in line if node.in_tree and node.host is not None)


def _runs_short(residency: Residency, tier: Tier) -> bool:
    pool = residency.pool(tier)
    return pool.free_pages < LOW_WATER * pool.num_pages


def _dirty_path(node: Node) -> list[Node]:
    """A node behind those of its ancestors that can be saved before it."""
    path = [node]
    while (parent := path[-1].parent) is not None and _can_be_saved(parent):
        path.append(parent)
    return path[::-1]


def _hanging(dirty: Sequence[Node]) -> list[Node]:
    """Those whose parent is on the host, on its way there, or before them."""
    chosen: dict[Node, None] = {}
    for node in dirty:
        parent = node.parent
        if parent is None or parent.host is not None or parent.is_leaving or parent in chosen:
            chosen[node] = None
    return list(chosen)
