"""Which pages hold which prefix of which scope.

One root per CacheScope; an edge is one whole page of tokens, so nothing is ever split and `match` is read-only.
The tree is one counted holder of each of its pages; a sequence that uses them holds them too, from the root down.
Hence a node that only the tree holds has only such nodes below it, and reclaiming from the leaves frees them all.

It never holds a partial page, and never matches across scopes.
Source: the radix cache of SGLang (Zheng et al. 2023), with pages for edges as in vLLM's prefix caching.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NewType

from graftwork.engine.pages import PageId, PagePool

CacheScope = NewType("CacheScope", bytes)
"""A digest of everything that must agree for KV to be shared; see engine/scope.py."""

PageTokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """One page of tokens below a prefix."""

    parent: "_Node | None"
    scope: CacheScope
    tokens: PageTokens
    page: PageId
    path_hash: int
    """Of the scope and all tokens down to here; only ever used to explain misses."""
    last_used: int
    is_queued: bool = False
    """Whether the heap of leaves has an entry for it."""
    children: dict[PageTokens, "_Node"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of a prompt, in whole pages."""

    pages: tuple[PageId, ...]
    was_evicted: bool
    """The next page had been cached and was reclaimed."""


class PrefixTree:
    """Radix tree over pages of `page_tokens` tokens; reclaims the least recently used leaves."""

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._roots: dict[CacheScope, dict[PageTokens, _Node]] = {}
        self._leaves: list[tuple[int, int, _Node]] = []
        self._ticks = count()
        self._entries = count()
        self._evicted: OrderedDict[int, None] = OrderedDict()
        self._num_nodes = 0

    def __len__(self) -> int:
        """Pages in the tree."""
        return self._num_nodes

    def match(self, scope: CacheScope, token_ids: Sequence[int]) -> PrefixMatch:
        """The cached pages of the longest prefix of `token_ids`. Changes nothing."""
        nodes = self._walk(scope, token_ids)
        return PrefixMatch(
            pages=tuple(node.page for node in nodes),
            was_evicted=self._next_hash(scope, token_ids, nodes) in self._evicted,
        )

    def lease(self, scope: CacheScope, token_ids: Sequence[int], match: PrefixMatch) -> list[PageId]:
        """Hold the matched pages for a sequence and mark them used; release them through the pool."""
        nodes = self._walk(scope, token_ids)[: len(match.pages)]
        tick = next(self._ticks)
        for node in nodes:
            node.last_used = tick
        pages = [node.page for node in nodes]
        self._pool.hold(pages)
        return pages

    def insert(self, scope: CacheScope, token_ids: Sequence[int], pages: Sequence[PageId]) -> int:
        """Enter the whole pages of a computed sequence; where the prefix is cached already, the tree keeps its own.

        Returns how many pages are new in the tree. The sequence's own holds stay and must be released as before.
        """
        tick = next(self._ticks)
        runs = self._split(token_ids)
        children = self._roots.setdefault(scope, {}) if runs else {}
        parent: _Node | None = None
        added = 0
        for tokens, page in zip(runs, pages, strict=False):
            node = children.get(tokens)
            if node is None:
                node = self._enter(parent, scope, tokens, page, tick)
                children[tokens] = node
                added += 1
            node.last_used = tick
            parent, children = node, node.children
        if parent is not None and not parent.children:
            self._push_leaf(parent)
        return added

    def reclaim(self, num_pages: int) -> int:
        """Free up to `num_pages` idle pages, least recently used leaves first; returns how many were freed."""
        freed = 0
        in_use: list[_Node] = []
        while freed < num_pages and self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            node.is_queued = False
            if node.children:
                continue  # it is entered again when its last child goes
            if node.last_used != last_used:
                self._push_leaf(node)
            elif self._pool.holders(node.page) > 1:
                in_use.append(node)
            else:
                self._drop(node)
                freed += 1
        for node in in_use:
            self._push_leaf(node)
        return freed

    def check_integrity(self) -> None:
        """Recount the nodes and check that each is reachable, owned, and entered once."""
        pages: set[PageId] = set()
        waiting = [node for children in self._roots.values() for node in children.values()]
        while waiting:
            node = waiting.pop()
            assert len(node.tokens) == self._page_tokens
            assert node.page not in pages, f"page {node.page} stands twice in the tree"
            assert self._pool.holders(node.page) >= 1, f"page {node.page} is in the tree and free"
            assert node.parent is None or node.parent.children[node.tokens] is node
            pages.add(node.page)
            waiting.extend(node.children.values())
        assert len(pages) == self._num_nodes, f"{self._num_nodes} nodes counted, {len(pages)} found"

    def _split(self, token_ids: Sequence[int]) -> list[PageTokens]:
        size = self._page_tokens
        return [tuple(token_ids[start : start + size]) for start in range(0, len(token_ids) - size + 1, size)]

    def _walk(self, scope: CacheScope, token_ids: Sequence[int]) -> list[_Node]:
        nodes: list[_Node] = []
        children = self._roots.get(scope, {})
        for tokens in self._split(token_ids):
            node = children.get(tokens)
            if node is None:
                break
            nodes.append(node)
            children = node.children
        return nodes

    def _next_hash(self, scope: CacheScope, token_ids: Sequence[int], nodes: list[_Node]) -> int:
        start = len(nodes) * self._page_tokens
        parent = nodes[-1].path_hash if nodes else hash(scope)
        return hash((parent, tuple(token_ids[start : start + self._page_tokens])))

    def _enter(self, parent: _Node | None, scope: CacheScope, tokens: PageTokens, page: PageId, tick: int) -> _Node:
        parent_hash = parent.path_hash if parent is not None else hash(scope)
        node = _Node(parent, scope, tokens, page, hash((parent_hash, tokens)), tick)
        self._pool.enter_tree(page)
        self._evicted.pop(node.path_hash, None)
        self._num_nodes += 1
        return node

    def _drop(self, node: _Node) -> None:
        siblings = self._roots[node.scope] if node.parent is None else node.parent.children
        del siblings[node.tokens]
        self._pool.leave_tree(node.page)
        self._num_nodes -= 1
        self._remember_eviction(node.path_hash)
        if node.parent is not None and not node.parent.children:
            self._push_leaf(node.parent)
        elif node.parent is None and not siblings:
            del self._roots[node.scope]

    def _remember_eviction(self, path_hash: int) -> None:
        self._evicted[path_hash] = None
        while len(self._evicted) > 4 * self._pool.num_pages:
            self._evicted.popitem(last=False)

    def _push_leaf(self, node: _Node) -> None:
        if not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._leaves, (node.last_used, next(self._entries), node))
