"""Allocates device pages to requests, and loads cached KV from the host and the disk to the device.

Owns the loads that are running. Never loads a page twice at the same time: a second request for the page waits for the
first load. Invariant: pages that are in flight are never evicted. A load marks its source pages as in flight before
other pages are evicted to make room. It marks its target pages as in flight before the copy begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from graftwork.engine.core.prefix_keys import PageKey, PrefixScope, edges, pages_for
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.index.page_store import PageStore
from graftwork.engine.kv.index.radix_tree import Domain, Node
from graftwork.engine.kv.transfer.plan import CopyEngine, PageMove, TransferDone, TransferKind, TransferPlan


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix of a prompt whose KV is cached on the device, the host or the disk, in whole pages."""

    nodes: tuple[Node, ...]
    """The pages on the device or the host, first page first."""
    disk_keys: tuple[PageKey, ...]
    """The keys of the pages after `nodes`; these pages are only on disk."""

    def __len__(self) -> int:
        return len(self.nodes) + len(self.disk_keys)


@dataclass(frozen=True, slots=True)
class TokenPath:
    """The first tokens of a prompt, the cache scopes of their pages, and the domain (tenant) that the pages are charged
    to.
    """

    scope: PrefixScope
    token_ids: Sequence[int]
    domain: Domain


@dataclass(frozen=True, slots=True)
class PageAllocation:
    """The device pages that a request was given, in the order of its tokens."""

    pages: list[PageId]
    tiers: tuple[Tier, ...]
    """The tiers on which the KV of the first pages was found. The pages contain this KV once all `loads` have ended."""
    loads: frozenset[TransferPlan]


class PageLoader:
    """Starts loads of pages to the device, and records which load writes the device page of each node of the prefix
    tree.
    """

    def __init__(self, page_store: PageStore, copies: CopyEngine, costs: CostTracker) -> None:
        self._page_store = page_store
        self._copies = copies
        self._costs = costs
        self._in_flight: dict[Node, TransferPlan] = {}

    def allocate(self, path: TokenPath, match: PrefixMatch, num_tokens: int) -> PageAllocation | None:
        """Allocates device pages for the first `num_tokens` tokens of the prompt `path`: the cached pages of `match`,
        then new pages.

        Cached pages are loaded to the device if this is faster than computing them again. All pages stay allocated
        until the caller releases them. Returns None and allocates nothing if there is no room.
        """
        page_store = self._page_store
        on_device = list(takewhile(lambda node: node.device is not None, match.nodes))
        loads = self._pages_to_load(match, len(on_device), num_tokens)
        held = [node.device for node in on_device if node.device is not None]
        page_store.device.hold(held)
        missing = pages_for(num_tokens, page_store.sizes.page_tokens) - len(on_device)
        has_room = page_store.could_allocate(Tier.DEVICE, missing)
        if not has_room or self._make_room(loads, missing, path.domain) < missing:
            page_store.release(Tier.DEVICE, held)
            return None
        pages = page_store.device.allocate(missing)
        tiers = [self._tier_of(node) for node in on_device] + [tier for tier, _ in loads]
        self._load(path, on_device, loads, pages)
        nodes = page_store.tree.walk(path.scope, path.token_ids)[: len(tiers)]
        page_store.tree.touch(nodes)
        pending = frozenset(self._in_flight[node] for node in nodes if node in self._in_flight)
        return PageAllocation(held + pages, tuple(tiers), pending)

    def prefetch(self, path: TokenPath, match: PrefixMatch) -> list[Node]:
        """Starts to load the cached pages of the prompt `path` to the device, as many as there is room for.

        Returns the nodes that are on the device or being loaded. The caller does not release these pages: after the
        load, they can be evicted.
        """
        page_store = self._page_store
        on_device = list(takewhile(lambda node: node.device is not None, match.nodes))
        loads = self._pages_off_device(match, len(on_device))
        held = [node.device for node in on_device if node.device is not None]
        page_store.device.hold(held)
        pages = page_store.device.allocate(self._make_room(loads, len(loads), path.domain))
        self._load(path, on_device, loads, pages)
        nodes = page_store.tree.walk(path.scope, path.token_ids)[: len(on_device) + len(pages)]
        page_store.tree.touch(nodes)
        page_store.release(Tier.DEVICE, [*pages, *held])
        return nodes

    def finish(self, done: TransferDone) -> int | None:
        """Processes the end of a load.

        Returns the index in the prompt of the first page that could not be loaded; None if all pages were loaded.
        """
        plan, page_store = done.plan, self._page_store
        for node in plan.nodes:
            node.is_loading = False
            self._in_flight.pop(node, None)
        if plan.kind is TransferKind.LOAD:
            page_store.end_copy(Tier.HOST, [move.source for move in plan.moves if move.source is not None])
        page_store.end_copy(Tier.DEVICE, [move.target for move in plan.moves if move.target is not None])
        if done.num_good:
            self._costs.observe_load(plan.kind.source, done.num_good, done.seconds)
        if done.num_good == len(plan.nodes):
            return None
        first_bad = plan.nodes[done.num_good]
        if first_bad.in_tree:
            page_store.tree.remove_subtree(first_bad)
        return first_bad.depth

    def check_integrity(self) -> None:
        """Checks that a node of the prefix tree is marked as loading exactly if a load writes its page now."""
        for node, plan in self._in_flight.items():
            assert node in plan.nodes, "a load is recorded for a page that it does not fill"
            assert node.is_loading or not node.in_tree, "a page is being loaded and not marked"
        for node in self._page_store.tree.nodes_on(Tier.DEVICE):
            assert not node.is_loading or node in self._in_flight, "a page waits for a load that does not run"

    def _tier_of(self, node: Node) -> Tier:
        plan = self._in_flight.get(node)
        return Tier.DEVICE if plan is None else plan.kind.source

    def _pages_off_device(self, match: PrefixMatch, start: int) -> "list[tuple[Tier, Node | None]]":
        """Returns the tier of each cached page after the first `start`, and its node if the page is on the host."""
        on_host = [(Tier.HOST, node) for node in match.nodes[start:]]
        return [*on_host, *((Tier.DISK, None) for _ in match.disk_keys)]

    def _pages_to_load(self, match: PrefixMatch, start: int, num_tokens: int) -> "list[tuple[Tier, Node | None]]":
        below = self._pages_off_device(match, start)
        if not below:
            return []
        page_tokens = self._page_store.sizes.page_tokens
        tiers = [Tier.DEVICE] * start + [tier for tier, _ in below]
        return below[: self._costs.cost.best_prefix(tiers, num_tokens, page_tokens)]

    def _make_room(self, loads: "list[tuple[Tier, Node | None]]", num_pages: int, domain: Domain) -> int:
        """Makes room on the device. Returns how many of `num_pages` are free.

        Never evicts the source pages of `loads`.
        """
        page_store = self._page_store
        sources = [node.host for _, node in loads if node is not None and node.host is not None]
        page_store.host.begin_copy(sources)
        num_free = page_store.make_room(Tier.DEVICE, num_pages, domain)
        page_store.end_copy(Tier.HOST, sources)
        return num_free

    def _load(
        self, path: TokenPath, above: list[Node], loads: "list[tuple[Tier, Node | None]]", pages: list[PageId]
    ) -> None:
        """Begins `loads`. The loaded pages fill `pages` from the first on."""
        tree, size = self._page_store.tree, self._page_store.sizes.page_tokens
        parent = above[-1] if above else None
        by_tier: dict[Tier, list[tuple[Node, PageId]]] = {Tier.HOST: [], Tier.DISK: []}
        path_edges = islice(edges(path.scope, path.token_ids, size), len(above), None)
        for (tier, found), page, edge in zip(loads, pages, path_edges, strict=False):
            node = found or tree.add_node(path.scope, parent, edge, path.domain)
            tree.add_copy(node, Tier.DEVICE, page)
            node.is_loading = True
            by_tier[tier].append((node, page))
            parent = node
        self._begin(TransferKind.LOAD, path.domain, by_tier[Tier.HOST])
        self._begin(TransferKind.FETCH, path.domain, by_tier[Tier.DISK])

    def _begin(self, kind: TransferKind, domain: Domain, placed: list[tuple[Node, PageId]]) -> None:
        if not placed:
            return
        nodes = tuple(node for node, _ in placed)
        moves = tuple(PageMove(node.key, node.host, page) for node, page in placed)
        plan = TransferPlan(kind, domain, moves, nodes)
        self._page_store.device.begin_copy([page for _, page in placed])
        self._page_store.host.begin_copy([move.source for move in moves if move.source is not None])
        for node in nodes:
            self._in_flight[node] = plan
        self._copies.begin(plan)
