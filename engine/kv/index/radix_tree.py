"""Which pages hold which prefix of which scope, on the device and on the host.

A node is one page of tokens below a prefix; an edge is one whole page in one scope, so nothing is ever split and
`walk` is read-only. A node has a copy on the device, on the host, or on both; the tree is one counted holder of each.

Invariants: on each tier, a node that has a copy has ancestors that have one (a copy that is on its way counts); a
node without any copy is not in the tree. So pages leave a tier from the leaves, and whatever can be walked can be used.

It never decides what is dropped, and never holds a partial page.
Source: the radix cache of SGLang (Zheng et al. 2023), with pages for edges as in vLLM's prefix caching.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from graftwork.engine.core.prefix_keys import CacheScope, Edge, PageKey, PageTokens, PrefixScope, edges, page_key
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.page_pool import PagePool

Domain = bytes
"""Opaque name of the domain that a page is charged to: its isolation domain."""

PUBLIC: Domain = b""
"""Whom the pages of public prefixes are charged to."""


@dataclass(slots=True, eq=False)
class Node:
    """One page of tokens below a prefix."""

    parent: "Node | None"
    scope: CacheScope
    tokens: PageTokens
    key: PageKey
    depth: int
    """Pages above it."""
    domain: Domain
    last_used: int
    device: PageId | None = None
    host: PageId | None = None
    is_loading: bool = False
    """The device page is the destination of a copy that has not landed."""
    is_saving: bool = False
    """A copy to the host is under way."""
    in_tree: bool = True
    children: "dict[Edge, Node]" = field(default_factory=dict)
    device_children: int = 0
    host_children: int = 0
    outlives_sessions: bool = False
    """Somebody without a session has made or used it, so it outlives the sessions that reach it."""
    lease: "Lease | None" = None

    def page(self, tier: Tier) -> PageId | None:
        return self.device if tier is Tier.DEVICE else self.host

    def is_leaf_on(self, tier: Tier) -> bool:
        """Whether it is the last of its path on that tier."""
        return (self.device_children if tier is Tier.DEVICE else self.host_children) == 0


@dataclass(slots=True, eq=False)
class Lease:
    """A session's soft claim on device pages: they are dropped after all others, while it lasts."""

    until: float
    """On the engine's clock."""
    chance: float
    """Probability that the session is back by then."""


class RadixTree:
    """Radix tree over pages of `page_tokens` tokens."""

    def __init__(self, device: PagePool, host: PagePool, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._pools = {Tier.DEVICE: device, Tier.HOST: host}
        self._roots: dict[Edge, Node] = {}
        self._nodes: dict[Tier, dict[PageId, Node]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        self._by_key: dict[PageKey, Node] = {}
        self._ticks = 0
        self.on_copy_changed: Callable[[Node, Tier, int], None] = lambda node, tier, change: None
        """Told of every copy that a tier gains (+1) or loses (-1)."""

    def num_copies(self, tier: Tier) -> int:
        """Pages of a tier that the tree holds."""
        return len(self._nodes[tier])

    def node_of(self, tier: Tier, page: PageId) -> Node | None:
        """The node whose copy this page is."""
        return self._nodes[tier].get(page)

    def nodes_on(self, tier: Tier) -> list[Node]:
        """All nodes that have a copy on a tier."""
        return list(self._nodes[tier].values())

    def find(self, key: PageKey) -> Node | None:
        """The node of a key."""
        return self._by_key.get(key)

    def walk(self, scope: PrefixScope, token_ids: Sequence[int]) -> list[Node]:
        """The nodes of the longest prefix of `token_ids`, from the root down. Changes nothing."""
        nodes: list[Node] = []
        children = self._roots
        for edge in edges(scope, token_ids, self.page_tokens):
            node = children.get(edge)
            if node is None:
                break
            nodes.append(node)
            children = node.children
        return nodes

    def touch(self, nodes: Sequence[Node]) -> None:
        """Mark nodes as used just now."""
        self._ticks += 1
        for node in nodes:
            node.last_used = self._ticks

    def insert(
        self, scope: PrefixScope, token_ids: Sequence[int], pages: Sequence[PageId], domain: Domain
    ) -> list[Node]:
        """Enter the whole pages of a computed sequence, and return their nodes.

        Where a prefix is on the device already, the tree keeps its own page; where it is only on the host, the
        sequence's page becomes its copy. The sequence's own holds stay and must be released as before.
        """
        nodes: list[Node] = []
        parent: Node | None = None
        for edge, page in zip(edges(scope, token_ids, self.page_tokens), pages, strict=False):
            node = self._children(parent).get(edge)
            if node is None:
                node = self.add_node(scope, parent, edge, domain)
            if node.device is None:
                self.add_copy(node, Tier.DEVICE, page)
            nodes.append(node)
            parent = node
        self.touch(nodes)
        return nodes

    def add_node(self, scope: PrefixScope, parent: Node | None, edge: Edge, domain: Domain) -> Node:
        """A new node without copies; the caller gives it one before anybody looks."""
        depth = 0 if parent is None else parent.depth + 1
        key = page_key(scope, depth, None if parent is None else parent.key, edge[1])
        charged = domain if edge[0] == scope.own else PUBLIC
        node = Node(parent, edge[0], edge[1], key, depth, charged, self._ticks, outlives_sessions=charged == PUBLIC)
        self._children(parent)[edge] = node
        self._by_key[key] = node
        return node

    def add_copy(self, node: Node, tier: Tier, page: PageId) -> None:
        """The tree becomes one more holder of an owned page: the node's copy on that tier."""
        self._pools[tier].enter_tree(page)
        self._nodes[tier][page] = node
        self._set_copy(node, tier, page)
        self.on_copy_changed(node, tier, 1)

    def move_copy(self, node: Node, tier: Tier, page: PageId) -> None:
        """A node's copy has moved to another page of the same tier, holders and all."""
        former = node.page(tier)
        assert former is not None, f"the node has no copy on the {tier}"
        del self._nodes[tier][former]
        self._nodes[tier][page] = node
        if tier is Tier.DEVICE:
            node.device = page
        else:
            node.host = page

    @property
    def ticks(self) -> int:
        """What a node that is used now has for `last_used`."""
        return self._ticks

    def remove_copy(self, node: Node, tier: Tier) -> None:
        """Give up a node's copy on one tier, of which it is the edge; with its last copy the node goes too."""
        assert node.is_leaf_on(tier), "a page is dropped only after those below it"
        page = node.page(tier)
        assert page is not None, f"the node has no copy on the {tier}"
        if tier is Tier.DEVICE:
            node.is_loading = False
        self._pools[tier].leave_tree(page)
        del self._nodes[tier][page]
        self._set_copy(node, tier, None)
        self.on_copy_changed(node, tier, -1)
        if node.device is None and node.host is None:
            self._detach(node)

    def remove_subtree(self, node: Node) -> list[Node]:
        """Take a node and all below it out, whoever else may hold their pages; returns them, leaves first."""
        below = list(_leaves_first(node))
        for one in below:
            for tier in (Tier.DEVICE, Tier.HOST):
                if one.page(tier) is not None:
                    self.remove_copy(one, tier)
        return below

    def check_integrity(self) -> None:
        """Recount the nodes and check that each is reachable, held, closed towards its root, and entered once."""
        seen: dict[Tier, set[PageId]] = {Tier.DEVICE: set(), Tier.HOST: set()}
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            assert len(node.tokens) == self.page_tokens
            assert node.in_tree
            assert self._by_key[node.key] is node
            assert node.device is not None or node.host is not None, "a node without a copy is in the tree"
            for tier, pages in seen.items():
                page = node.page(tier)
                below = sum(child.page(tier) is not None for child in node.children.values())
                assert below == (node.device_children if tier is Tier.DEVICE else node.host_children)
                if page is None:
                    assert below == 0, f"a page is on the {tier} and its parent is not"
                    continue
                assert page not in pages, f"page {page} stands twice in the tree"
                assert self._nodes[tier][page] is node
                assert self._pools[tier].holders(page) >= 1, f"page {page} is in the tree and free"
                pages.add(page)
            waiting.extend(node.children.values())
        for tier, pages in seen.items():
            assert len(pages) == len(self._nodes[tier]), f"{len(pages)} nodes on the {tier} can be reached"

    def _children(self, parent: Node | None) -> dict[Edge, Node]:
        return self._roots if parent is None else parent.children

    def _set_copy(self, node: Node, tier: Tier, page: PageId | None) -> None:
        change = 1 if page is not None else -1
        if tier is Tier.DEVICE:
            node.device = page
            if node.parent is not None:
                node.parent.device_children += change
        else:
            node.host = page
            if node.parent is not None:
                node.parent.host_children += change

    def _detach(self, node: Node) -> None:
        assert not node.children, "a node with children lost its last copy"
        del self._children(node.parent)[(node.scope, node.tokens)]
        del self._by_key[node.key]
        node.in_tree = False


def _leaves_first(node: Node) -> Iterator[Node]:
    order, waiting = [], [node]
    while waiting:
        one = waiting.pop()
        order.append(one)
        waiting.extend(one.children.values())
    return reversed(order)
