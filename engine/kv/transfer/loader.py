"""Pages on their way up: what is found on lower tiers, and how it gets to the device.

Owns the transfers that fill device pages, and who may wait for which: a page that is on its way already is waited
for, never copied twice.
Invariant: a plan's sources are leased before room is made, and its destinations before it begins.
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
    """The longest prefix of a prompt that is cached anywhere, in whole pages."""

    nodes: tuple[Node, ...]
    """On the device or the host."""
    disk_keys: tuple[PageKey, ...]
    """Behind them: pages that are on disk alone."""

    def __len__(self) -> int:
        return len(self.nodes) + len(self.disk_keys)


@dataclass(frozen=True, slots=True)
class TokenPath:
    """A prompt, and where its pages may be shared."""

    scope: PrefixScope
    token_ids: Sequence[int]
    domain: Domain


@dataclass(frozen=True, slots=True)
class PageAllocation:
    """Pages that a sequence was given, in order, and what they hold."""

    pages: list[PageId]
    tiers: tuple[Tier, ...]
    """Where the KV of the leading pages was found; they hold it once `loads` have ended."""
    loads: frozenset[TransferPlan]


class PageLoader:
    """Gives sequences their pages, and brings cached ones to the device."""

    def __init__(self, page_store: PageStore, copies: CopyEngine, costs: CostTracker) -> None:
        self._page_store = page_store
        self._copies = copies
        self._costs = costs
        self._in_flight: dict[Node, TransferPlan] = {}

    def allocate(self, path: TokenPath, match: PrefixMatch, num_tokens: int) -> PageAllocation | None:
        """Pages for the first `num_tokens` of a path, the cached ones first, each held once for the caller.

        What is worth loading is on its way when this returns. None, and nothing held, if there is no room.
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
        """Bring the pages of a path to the device, as many as there is room for, for nobody in particular.

        Returns the nodes of those that are there, or on their way.
        """
        page_store = self._page_store
        on_device = list(takewhile(lambda node: node.device is not None, match.nodes))
        loads = self._pages_below(match, len(on_device))
        held = [node.device for node in on_device if node.device is not None]
        page_store.device.hold(held)
        pages = page_store.device.allocate(self._make_room(loads, len(loads), path.domain))
        self._load(path, on_device, loads, pages)
        nodes = page_store.tree.walk(path.scope, path.token_ids)[: len(on_device) + len(pages)]
        page_store.tree.touch(nodes)
        page_store.release(Tier.DEVICE, [*pages, *held])
        return nodes

    def finish(self, done: TransferDone) -> int | None:
        """A load's event has fired. Returns the depth from which it failed, or None."""
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

    def _tier_of(self, node: Node) -> Tier:
        plan = self._in_flight.get(node)
        return Tier.DEVICE if plan is None else plan.kind.source

    def _pages_below(self, match: PrefixMatch, start: int) -> "list[tuple[Tier, Node | None]]":
        """Pages behind the first `start` that are not on the device, and where they are."""
        on_host = [(Tier.HOST, node) for node in match.nodes[start:]]
        return [*on_host, *((Tier.DISK, None) for _ in match.disk_keys)]

    def _pages_to_load(self, match: PrefixMatch, start: int, num_tokens: int) -> "list[tuple[Tier, Node | None]]":
        below = self._pages_below(match, start)
        if not below:
            return []
        page_tokens = self._page_store.sizes.page_tokens
        tiers = [Tier.DEVICE] * start + [tier for tier, _ in below]
        return below[: self._costs.cost.best_prefix(tiers, num_tokens, page_tokens)]

    def _make_room(self, loads: "list[tuple[Tier, Node | None]]", num_pages: int, domain: Domain) -> int:
        """How many of the pages are free now, with the sources of what is to be loaded out of reach meanwhile."""
        page_store = self._page_store
        sources = [node.host for _, node in loads if node is not None and node.host is not None]
        page_store.host.begin_copy(sources)
        num_free = page_store.make_room(Tier.DEVICE, num_pages, domain)
        page_store.end_copy(Tier.HOST, sources)
        return num_free

    def _load(
        self, path: TokenPath, above: list[Node], loads: "list[tuple[Tier, Node | None]]", pages: list[PageId]
    ) -> None:
        """Begin the transfers into the first of `pages`."""
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
