"""Maps token prefixes to the pages that hold their KV, on the device and on the host.

Owns the nodes. A node stands for one page of tokens after a certain prefix, or for the page of a windowed layer group
beside it (see window_pages.py). An edge is one whole page in one cache scope (requests with the same scope may share KV),
so nodes are never split. A node is found by its key, which is computed from the cache scope and all tokens up to the end
of the page, so the tree keeps no tokens. A node has a copy of its page on the device, on the host or on both. The tree
keeps each copy allocated. The tree never decides which page is evicted, and never contains a page that is only partly
filled.

Invariants: if a node has a copy on a tier, all its ancestors have a copy on this tier (a copy that is being loaded
counts). A node without copies is not in the tree. So leaves are evicted first, and every node that `walk` finds is
usable.

Source: the radix cache of SGLang (Zheng et al. 2023), with whole pages as edges as in vLLM's prefix caching.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from graftwork.engine.core.prefix_keys import PageKey, PrefixScope, page_keys
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.page_pool import PagePool
from graftwork.engine.kv.index.page_windows import window_key

Domain = bytes
"""The digest of the isolation domain (usually one tenant) that a page is charged to. It is compared, never interpreted.
"""

PUBLIC: Domain = b""
"""The domain of public pages, which all tenants share."""


@dataclass(slots=True, eq=False)
class Node:
    """A node of the prefix tree: one page of tokens that follows the tokens of the node's ancestors."""

    parent: "Node | None"
    key: PageKey
    depth: int
    """The number of pages before this page in the prompt."""
    domain: Domain
    last_used: int
    device: PageId | None = None
    host: PageId | None = None
    is_loading: bool = False
    """Whether a transfer into the node's device page is still running."""
    is_saving: bool = False
    """Whether a transfer of the page to the host is still running."""
    first_child: "Node | None" = None
    next_sibling: "Node | None" = None
    previous_sibling: "Node | None" = None
    device_children: int = 0
    host_children: int = 0
    outlives_sessions: bool = False
    """Whether a request without a session has used the page. Then closing a session does not remove the page."""
    lease: "Lease | None" = None
    window_group: int | None = None
    """The windowed layer group whose page this is (see window_pages.py); None for a page of the first layer group."""
    is_tail: bool = False
    """Whether a windowed page belongs to the end of a cached prompt, or to a place where prompts branch."""
    is_apart: bool = False
    """Whether pages between the parent and this page may be missing (see rolling_pages.py)."""

    @property
    def in_tree(self) -> bool:
        """Whether the tree contains the node. A node leaves it with its last copy, and does not come back."""
        return self.device is not None or self.host is not None

    @property
    def children(self) -> "Iterator[Node]":
        """The nodes that follow this one, and its windowed pages, the newest first."""
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling

    @property
    def owner(self) -> "Node":
        """The node of the page of tokens that this page belongs to: the parent of a windowed page, else the node itself."""
        return self if self.window_group is None or self.parent is None else self.parent

    def page(self, tier: Tier) -> PageId | None:
        return self.device if tier is Tier.DEVICE else self.host

    def is_leaf_on(self, tier: Tier) -> bool:
        """Returns whether no child of this node has a page on `tier`."""
        return (self.device_children if tier is Tier.DEVICE else self.host_children) == 0


@dataclass(slots=True, eq=False)
class Lease:
    """Protects device pages of a session or a prompt for a limited time: until it ends, pages without a lease are
    evicted first.
    """

    until: float
    """End of the lease in seconds, on the engine's monotonic clock."""
    return_probability: float
    """The probability that the session's next turn, or the prompt's next request, starts before `until`."""


_MAX_DOMAINS = 10_000
"""The most domains whose names the tree keeps to share them. Above that, it begins anew, which only costs memory."""


class RadixTree:
    """Maps token prefixes to nodes. Each node stands for one page of `page_tokens` tokens."""

    def __init__(self, device: PagePool, host: PagePool, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._pools = {Tier.DEVICE: device, Tier.HOST: host}
        self._nodes: dict[Tier, list[Node | None]] = {
            tier: [None] * pool.num_pages for tier, pool in self._pools.items()
        }
        self._num_copies = {Tier.DEVICE: 0, Tier.HOST: 0}
        self._by_key: dict[PageKey, Node] = {}
        self._domains: dict[Domain, Domain] = {}
        self._ticks = 0
        self.num_changes = 0
        """How many nodes were added or removed so far. As long as it is the same, each prefix leads to the same node."""
        self.on_copy_changed: Callable[[Node, Tier, int], None] = lambda node, tier, change: None
        """A callback for each copy that a tier gains (+1) or loses (-1)."""

    def num_copies(self, tier: Tier) -> int:
        """Returns how many nodes have a page on `tier`."""
        return self._num_copies[tier]

    def node_of(self, tier: Tier, page: PageId) -> Node | None:
        """Returns the node whose KV is in `page` of `tier`; None if the tree does not contain this page."""
        return self._nodes[tier][page]

    def nodes_on(self, tier: Tier) -> list[Node]:
        """Returns all nodes that have a page on `tier`, in the order of the pages' numbers."""
        return [node for node in self._nodes[tier] if node is not None]

    def find(self, key: PageKey) -> Node | None:
        """Returns the node whose page has this key; None if the tree has no such node."""
        return self._by_key.get(key)

    def walk(self, scope: PrefixScope, token_ids: Sequence[int], known_keys: list[PageKey] | None = None) -> list[Node]:
        """Returns the nodes of the longest cached prefix of `token_ids`, first page first, without windowed pages. Changes
        nothing.

        Here and in the other methods, `known_keys` are the keys of the prompt's first pages: see `page_keys`.
        """
        nodes: list[Node] = []
        for key in page_keys(scope, token_ids, self.page_tokens, known_keys):
            node = self._by_key.get(key)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def follow(
        self,
        node: Node | None,
        scope: PrefixScope,
        token_ids: Sequence[int],
        known_keys: list[PageKey] | None = None,
    ) -> Node | None:
        """Returns the last node of the longest cached prefix of `token_ids`; None if there is none. Changes nothing.

        `node` is what an earlier call returned for the same prompt, or None. The search continues from there, so it takes
        time only for the pages that were added or removed since.
        """
        while node is not None and not node.in_tree:
            node = node.parent
        start = 0 if node is None else node.depth + 1
        for key in page_keys(scope, token_ids, self.page_tokens, known_keys, start):
            child = self._by_key.get(key)
            if child is None:
                break
            node = child
        return node

    def touch(self, nodes: Sequence[Node]) -> None:
        """Marks nodes as just used, so that their pages are evicted later."""
        self._ticks += 1
        for node in nodes:
            node.last_used = self._ticks

    def insert(
        self, scope: PrefixScope, keys: Iterable[PageKey], pages: Sequence[PageId], domain: Domain
    ) -> list[Node]:
        """Adds the first pages of a prompt to the tree and returns their nodes. `keys` are those of its whole pages.

        `pages` contain the KV of the prompt on the device. If a node already has a device page, the tree keeps that
        page. Otherwise the caller's page becomes the node's device page. The caller still holds its own pages and must
        release them later.
        """
        nodes: list[Node] = []
        parent: Node | None = None
        for key, page in zip(keys, pages, strict=False):
            node = self._by_key.get(key)
            if node is None:
                node = self.add_node(scope, parent, key, domain)
            self.add_copy_if_absent(node, page)
            nodes.append(node)
            parent = node
        self.touch(nodes)
        return nodes

    def add_node(
        self, scope: PrefixScope, parent: Node | None, key: PageKey, domain: Domain, apart_at: int | None = None
    ) -> Node:
        """Adds a node that has no page on any tier yet, and returns it. `key` is the key of its page.

        The caller must call `add_copy` for the node before anything else uses the tree. `apart_at` is the number of pages
        before this one if the parent is not the last of them.
        """
        depth = (0 if parent is None else parent.depth + 1) if apart_at is None else apart_at
        charged = self._same_domain(domain) if scope.at(depth) == scope.own else PUBLIC
        node = Node(parent, key, depth, charged, self._ticks, outlives_sessions=charged == PUBLIC)
        node.is_apart = apart_at is not None
        self._attach(node)
        return node

    def window_of(self, node: Node, group: int) -> Node | None:
        """Returns the node of a windowed layer group beside a page of tokens; None if the tree has no such page."""
        return self._by_key.get(window_key(node.key, group))

    def windows_of(self, node: Node) -> list[Node]:
        """Returns the nodes of all windowed layer groups beside a page of tokens, in the order of the groups."""
        windows = [(child.window_group, child) for child in node.children if child.window_group is not None]
        return [window for _, window in sorted(windows, key=itemgetter(0))]

    def add_window(self, node: Node, group: int) -> Node:
        """Adds the node of a windowed layer group beside a page of tokens. It has no page on any tier yet."""
        key = window_key(node.key, group)
        window = Node(node, key, node.depth, node.domain, self._ticks, window_group=group)
        self._attach(window)
        return window

    def add_copy_if_absent(self, node: Node, page: PageId) -> None:
        """Makes `page` the page of `node` on the device, unless it has one there already."""
        if node.device is None:
            self.add_copy(node, Tier.DEVICE, page)

    def add_copy(self, node: Node, tier: Tier, page: PageId) -> None:
        """Makes `page` the page of `node` on `tier`. From now on, the tree keeps this page allocated.

        The page must be allocated already, for example to a request.
        """
        self._pools[tier].enter_tree(page)
        self._nodes[tier][page] = node
        self._num_copies[tier] += 1
        self._set_copy(node, tier, page)
        self.on_copy_changed(node, tier, 1)

    def move_copy(self, node: Node, tier: Tier, page: PageId) -> None:
        """Records that the page of `node` on `tier` now has the number `page`, because its content and holders were
        moved there.
        """
        former = node.page(tier)
        assert former is not None, f"the node has no copy on the {tier}"
        self._nodes[tier][former] = None
        self._nodes[tier][page] = node
        if tier is Tier.DEVICE:
            node.device = page
        else:
            node.host = page

    @property
    def ticks(self) -> int:
        """The number of calls of `touch` so far. `Node.last_used` is this number when the node was used last."""
        return self._ticks

    def remove_copy(self, node: Node, tier: Tier) -> None:
        """Removes the page of a node from `tier`. No child of the node may have a page there.

        If the node then has no page on any tier, the node leaves the tree.
        """
        assert node.is_leaf_on(tier), "a page is dropped only after those below it"
        page = node.page(tier)
        assert page is not None, f"the node has no copy on the {tier}"
        if tier is Tier.DEVICE:
            node.is_loading = False
        self._pools[tier].leave_tree(page)
        self._nodes[tier][page] = None
        self._num_copies[tier] -= 1
        self._set_copy(node, tier, None)
        if node.device is None and node.host is None:
            self._detach(node)
        self.on_copy_changed(node, tier, -1)

    def remove_subtree(self, node: Node) -> list[Node]:
        """Removes a node and all its descendants from the tree. A page stays allocated while a request still holds it.

        Returns the removed nodes, leaves first.
        """
        below = list(_leaves_first(node))
        for one in below:
            for tier in (Tier.DEVICE, Tier.HOST):
                if one.page(tier) is not None:
                    self.remove_copy(one, tier)
        return below

    def check_integrity(self) -> None:
        """Recounts the nodes. Checks that each node can be reached from a root, and that each page of a node has a
        holder.

        Also checks that, on each tier where a node has a page, all ancestors of the node have one.
        """
        seen: dict[Tier, set[PageId]] = {Tier.DEVICE: set(), Tier.HOST: set()}
        waiting = [node for node in self._by_key.values() if node.parent is None]
        while waiting:
            node = waiting.pop()
            self._check_place(node)
            assert node.in_tree
            assert self._by_key[node.key] is node
            assert node.device is not None or node.host is not None, "a node without a copy is in the tree"
            for tier, pages in seen.items():
                page = node.page(tier)
                below = sum(child.page(tier) is not None for child in node.children)
                assert below == (node.device_children if tier is Tier.DEVICE else node.host_children)
                if page is None:
                    assert below == 0, f"a page is on the {tier} and its parent is not"
                    continue
                assert page not in pages, f"page {page} stands twice in the tree"
                assert self._nodes[tier][page] is node
                assert self._pools[tier].holders(page) >= 1, f"page {page} is in the tree and free"
                pages.add(page)
            self._check_siblings(node)
            waiting.extend(node.children)
        for tier, pages in seen.items():
            assert len(pages) == self._num_copies[tier], f"{len(pages)} nodes on the {tier} can be reached"
            assert len(pages) == len(self.nodes_on(tier)), f"{len(pages)} pages of the {tier} have a node"

    def _check_place(self, node: Node) -> None:
        """Checks that a node stands for a page of tokens, or for a windowed page beside one."""
        if node.window_group is None:
            return
        assert node.owner is not node, "a windowed page stands beside no page of tokens"
        assert node.owner.window_group is None, "a windowed page stands beside another one"
        assert node.first_child is None, "a page follows a windowed page"
        assert node.key == window_key(node.owner.key, node.window_group)
        assert (node.depth, node.domain) == (node.owner.depth, node.owner.domain)

    def _check_siblings(self, node: Node) -> None:
        """Checks the links between the children of a node."""
        previous: Node | None = None
        for child in node.children:
            assert child.parent is node, "a node is among another's children"
            assert child.previous_sibling is previous, "the links between siblings differ"
            previous = child

    def _same_domain(self, domain: Domain) -> Domain:
        """Returns one object for all equal domains, because each request comes with an object of its own."""
        if len(self._domains) > _MAX_DOMAINS:
            self._domains.clear()
        return self._domains.setdefault(domain, domain)

    def _attach(self, node: Node) -> None:
        """Makes a new node the first child of its parent, and findable."""
        self.num_changes += 1
        self._by_key[node.key] = node
        if node.parent is not None:
            node.next_sibling = node.parent.first_child
            if node.next_sibling is not None:
                node.next_sibling.previous_sibling = node
            node.parent.first_child = node

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
        assert node.first_child is None, "a node with children lost its last copy"
        self.num_changes += 1
        del self._by_key[node.key]
        if node.next_sibling is not None:
            node.next_sibling.previous_sibling = node.previous_sibling
        if node.previous_sibling is not None:
            node.previous_sibling.next_sibling = node.next_sibling
        elif node.parent is not None:
            node.parent.first_child = node.next_sibling
        node.next_sibling = node.previous_sibling = None


def _leaves_first(node: Node) -> Iterator[Node]:
    order, waiting = [], [node]
    while waiting:
        one = waiting.pop()
        order.append(one)
        waiting.extend(one.children)
    return reversed(order)
