"""Finds and keeps the cached pages of prompts with a rolling window (see rolling_pages.py).

Such a prompt needs its sinks and its last pages alone, and the prefix tree has no others of it. Owns nothing, and starts no
copy. Invariant: what is found here was inserted by a prompt with the same window, because the window is part of the keys.
"""

from collections.abc import Sequence

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.index.page_store import PageStore
from graftwork.engine.kv.index.radix_tree import Node
from graftwork.engine.kv.index.rolling_pages import RollingPages
from graftwork.engine.kv.index.window_pages import WindowPages
from graftwork.engine.kv.transfer.loader import PrefixMatch, TokenPath


class RollingPrefixes:
    """The cached pages of prompts with a rolling window, in one page store."""

    def __init__(self, page_store: PageStore) -> None:
        self._page_store = page_store

    def match(self, path: TokenPath, rolling: RollingPages) -> PrefixMatch:
        """Returns the longest prefix that can be continued: the pages that it needs are cached, on any tier."""
        keys = list(path.keys(self._page_store.sizes.page_tokens))
        usable = len(keys)
        while usable:
            missing = self._missing(keys, usable, rolling)
            if missing is None:
                break
            usable = missing  # all prefixes between need this page too
        found: list[tuple[int, Node]] = []
        on_disk: list[tuple[int, PageKey]] = []
        for index in sorted(rolling.needed(usable)):
            node = self._page_store.tree.find(keys[index])
            if node is None:
                on_disk.append((index, keys[index]))
            else:
                found.append((index, node))
        numbers = (*(index for index, _ in found), *(index for index, _ in on_disk))
        return PrefixMatch(tuple(node for _, node in found), tuple(key for _, key in on_disk), numbers, usable)

    def kept_keys(self, path: TokenPath, rolling: RollingPages) -> list[PageKey]:
        """Returns the keys of the pages that are kept of a text, in order, whether they are cached or not."""
        keys = list(path.keys(self._page_store.sizes.page_tokens))
        return [keys[index] for index in rolling.kept(len(keys))]

    def insert(
        self,
        path: TokenPath,
        pages: Sequence[PageId],
        rolling: RollingPages,
        num_given_up: int,
        windows: WindowPages | None,
    ) -> list[Node]:
        """Adds the pages of a request to the prefix tree, and its pages of windowed layer groups.

        `pages` are those of the sinks and those after `num_given_up` more. Returns the nodes of the whole ones, in order.
        """
        tree, keys = self._page_store.tree, list(path.keys(self._page_store.sizes.page_tokens))
        nodes: list[Node] = []
        for place, page in enumerate(pages):
            apart = place >= rolling.sink_pages
            index = place + num_given_up if apart else place
            if index >= len(keys):
                break
            parent = nodes[min(place, rolling.sink_pages) - 1] if place and rolling.sink_pages else None
            node = tree.find(keys[index])
            if node is None:
                node = tree.add_node(path.scope, parent, keys[index], path.domain, index if apart else None)
            tree.add_copy_if_absent(node, page)
            nodes.append(node)
        tree.touch(nodes)
        if windows is not None and nodes:
            self._page_store.windows.insert(nodes, windows, num_given_up)
            beside = [one for node in nodes[windows.first - num_given_up :] for one in tree.windows_of(node)]
            for one in beside:
                one.is_tail = True
            tree.touch(beside)
        return nodes

    def _missing(self, keys: Sequence[PageKey], num_pages: int, rolling: RollingPages) -> int | None:
        """Returns a page that is not cached and without which the first `num_pages` pages cannot be continued; None if all
        are there.
        """
        windows, tail = self._page_store.windows, self._page_store.windows.tail(num_pages)
        for index in rolling.needed(num_pages):
            node, key = self._page_store.tree.find(keys[index]), keys[index]
            if node is None and not self._page_store.disk.holds(key):
                return index
            if index in tail and not windows.are_beside(node, key):
                return index
        return None
