"""Pages on their way up: what is found on lower tiers, and how it gets to the device.

Owns the transfers that fill device pages, and who may wait for which: a page that is on its way already is waited
for, never copied twice.
Invariant: a plan's sources are leased before room is made, and its destinations before it begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from graftwork.engine.core.prefix_keys import PageKey, SequenceScope, edges, pages_for
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.index.page_store import Residency
from graftwork.engine.kv.index.radix_tree import Node, Owner
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
class Path:
    """A prompt, and where its pages may be shared."""

    scope: SequenceScope
    token_ids: Sequence[int]
    owner: Owner


@dataclass(frozen=True, slots=True)
class Residence:
    """Pages that a sequence was given, in order, and what they hold."""

    pages: list[PageId]
    tiers: tuple[Tier, ...]
    """Where the KV of the leading pages was found; they hold it once `arrivals` have landed."""
    arrivals: frozenset[TransferPlan]


class Arrivals:
    """Gives sequences their pages, and brings cached ones to the device."""

    def __init__(self, residency: Residency, copies: CopyEngine, costs: CostTracker) -> None:
        self._residency = residency
        self._copies = copies
        self._costs = costs
        self._under_way: dict[Node, TransferPlan] = {}

    def settle(self, path: Path, match: PrefixMatch, num_tokens: int) -> Residence | None:
        """Pages for the first `num_tokens` of a path, the cached ones first, each held once for the caller.

        What is worth loading is on its way when this returns. None, and nothing held, if there is no room.
        """
        residency = self._residency
        on_device = list(takewhile(lambda node: node.device is not None, match.nodes))
        loads = self._worth_loading(match, len(on_device), num_tokens)
        held = [node.device for node in on_device if node.device is not None]
        residency.device.hold(held)
        missing = pages_for(num_tokens, residency.sizes.page_tokens) - len(on_device)
        has_room = residency.could_have(Tier.DEVICE, missing)
        if not has_room or self._make_room(loads, missing, path.owner) < missing:
            residency.release(Tier.DEVICE, held)
            return None
        pages = residency.device.take(missing)
        tiers = [self._tier_of(node) for node in on_device] + [tier for tier, _ in loads]
        self._load(path, on_device, loads, pages)
        nodes = residency.tree.walk(path.scope, path.token_ids)[: len(tiers)]
        residency.tree.touch(nodes)
        arrivals = frozenset(self._under_way[node] for node in nodes if node in self._under_way)
        return Residence(held + pages, tuple(tiers), arrivals)

    def prefetch(self, path: Path, match: PrefixMatch) -> list[Node]:
        """Bring the pages of a path to the device, as many as there is room for, for nobody in particular.

        Returns the nodes of those that are there, or on their way.
        """
        residency = self._residency
        on_device = list(takewhile(lambda node: node.device is not None, match.nodes))
        loads = self._below(match, len(on_device))
        held = [node.device for node in on_device if node.device is not None]
        residency.device.hold(held)
        pages = residency.device.take(self._make_room(loads, len(loads), path.owner))
        self._load(path, on_device, loads, pages)
        nodes = residency.tree.walk(path.scope, path.token_ids)[: len(on_device) + len(pages)]
        residency.tree.touch(nodes)
        residency.release(Tier.DEVICE, [*pages, *held])
        return nodes

    def absorb(self, done: TransferDone) -> int | None:
        """A load's event has fired. Returns the depth from which it failed, or None."""
        plan, residency = done.plan, self._residency
        for node in plan.nodes:
            node.is_arriving = False
            self._under_way.pop(node, None)
        if plan.kind is TransferKind.LOAD:
            residency.land(Tier.HOST, [move.source for move in plan.moves if move.source is not None])
        residency.land(Tier.DEVICE, [move.target for move in plan.moves if move.target is not None])
        if done.num_good:
            self._costs.observe_load(plan.kind.source, done.num_good, done.seconds)
        if done.num_good == len(plan.nodes):
            return None
        first_bad = plan.nodes[done.num_good]
        if first_bad.in_tree:
            residency.tree.cut(first_bad)
        return first_bad.depth

    def _tier_of(self, node: Node) -> Tier:
        plan = self._under_way.get(node)
        return Tier.DEVICE if plan is None else plan.kind.source

    def _below(self, match: PrefixMatch, start: int) -> "list[tuple[Tier, Node | None]]":
        """Pages behind the first `start` that are not on the device, and where they are."""
        on_host = [(Tier.HOST, node) for node in match.nodes[start:]]
        return [*on_host, *((Tier.DISK, None) for _ in match.disk_keys)]

    def _worth_loading(self, match: PrefixMatch, start: int, num_tokens: int) -> "list[tuple[Tier, Node | None]]":
        below = self._below(match, start)
        if not below:
            return []
        page_tokens = self._residency.sizes.page_tokens
        tiers = [Tier.DEVICE] * start + [tier for tier, _ in below]
        return below[: self._costs.cost.best_prefix(tiers, num_tokens, page_tokens)]

    def _make_room(self, loads: "list[tuple[Tier, Node | None]]", num_pages: int, owner: Owner) -> int:
        """How many of the pages are free now, with the sources of what is to be loaded out of reach meanwhile."""
        residency = self._residency
        sources = [node.host for _, node in loads if node is not None and node.host is not None]
        residency.host.take_off(sources)
        num_free = residency.make_room(Tier.DEVICE, num_pages, owner)
        residency.land(Tier.HOST, sources)
        return num_free

    def _load(
        self, path: Path, above: list[Node], loads: "list[tuple[Tier, Node | None]]", pages: list[PageId]
    ) -> None:
        """Begin the transfers into the first of `pages`."""
        tree, size = self._residency.tree, self._residency.sizes.page_tokens
        parent = above[-1] if above else None
        by_tier: dict[Tier, list[tuple[Node, PageId]]] = {Tier.HOST: [], Tier.DISK: []}
        path_edges = islice(edges(path.scope, path.token_ids, size), len(above), None)
        for (tier, found), page, edge in zip(loads, pages, path_edges, strict=False):
            node = found or tree.attach(path.scope, parent, edge, path.owner)
            tree.add_copy(node, Tier.DEVICE, page)
            node.is_arriving = True
            by_tier[tier].append((node, page))
            parent = node
        self._begin(TransferKind.LOAD, path.owner, by_tier[Tier.HOST])
        self._begin(TransferKind.FETCH, path.owner, by_tier[Tier.DISK])

    def _begin(self, kind: TransferKind, owner: Owner, placed: list[tuple[Node, PageId]]) -> None:
        if not placed:
            return
        nodes = tuple(node for node, _ in placed)
        moves = tuple(PageMove(node.key, node.host, page) for node, page in placed)
        plan = TransferPlan(kind, owner, moves, nodes)
        self._residency.device.take_off([page for _, page in placed])
        self._residency.host.take_off([move.source for move in moves if move.source is not None])
        for node in nodes:
            self._under_way[node] = plan
        self._copies.begin(plan)
