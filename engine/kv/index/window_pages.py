"""Holds the pages of a request in the windowed layer groups, and finds which cached prefixes can be continued.

A windowed group keeps a request's last pages only. Its page beside a page of tokens is a child of that page's node in the
prefix tree, so it is evicted before it, and never the other way round:

    node of page 4 ── node of page 5 ── node of page 6
                        ├ group 0         ├ group 0          one child for each windowed group
                        └ group 1         └ group 1

A prefix of n pages can be continued if all n pages are there, and those of the windowed groups that the next query sees.
These are its tail. Other pages of windowed groups stay as long as there is room: a prompt may branch off before them.

WindowPages owns which pages a request holds. PrefixWindows owns nothing, and starts no copy.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.step import WindowTables
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.index.page_windows import PageWindows, window_key
from graftwork.engine.kv.index.radix_tree import Node, RadixTree


@dataclass(slots=True)
class WindowPages:
    """The pages that a request holds in the windowed layer groups: for each page of tokens, one of each group."""

    first: int = 0
    """The number of the request's pages of tokens before these."""
    frames: list[tuple[PageId, ...]] = field(default_factory=list)
    """For each page of tokens from `first` on: the page of each windowed group."""

    @property
    def end(self) -> int:
        """The number of the request's pages of tokens up to the last of these."""
        return self.first + len(self.frames)

    @property
    def all_frames(self) -> list[PageId]:
        return [frame for frames in self.frames for frame in frames]

    def extend(self, frames: Sequence[PageId], num_groups: int) -> None:
        """Appends pages of tokens, whose frames are given page by page."""
        starts = range(0, len(frames), num_groups)
        self.frames += [tuple(frames[start : start + num_groups]) for start in starts]

    def drop_before(self, first: int) -> list[PageId]:
        """Gives up the pages before page `first` of the request. Returns their frames, which the caller must release."""
        dropped = self.frames[: max(first - self.first, 0)]
        self.frames = self.frames[len(dropped) :]
        self.first += len(dropped)
        return [frame for frames in dropped for frame in frames]

    def rename(self, moves: Mapping[PageId, PageId]) -> None:
        """Updates the numbers of pages that were moved."""
        self.frames = [tuple(moves.get(frame, frame) for frame in frames) for frames in self.frames]

    def tables(self, end: int) -> WindowTables:
        """Returns the page table of each group, up to page `end` of the request."""
        return WindowTables(self.first, tuple(zip(*self.frames[: end - self.first], strict=True)))

    def check_integrity(self, windows: PageWindows, num_pages: int, num_computed: int) -> None:
        """Checks that each page of tokens has a page in each group, and that all are there that the next query sees.

        `num_pages` are the pages of tokens of the request, of which `num_computed` tokens are computed.
        """
        assert all(len(frames) == windows.num_groups for frames in self.frames), "a windowed group lacks a page"
        assert self.end <= num_pages, "a windowed page is beside no page of tokens"
        if num_computed:
            assert self.first <= windows.first_needed(num_computed // windows.page_tokens), (
                "a page was given up too early"
            )
            assert self.end * windows.page_tokens >= num_computed, "a computed token has no windowed pages"


class StoredKeys(Protocol):
    """Tells which pages are on disk."""

    def holds(self, key: PageKey) -> bool: ...


class PrefixWindows:
    """Finds the pages of the windowed layer groups in the prefix tree and on disk."""

    def __init__(self, tree: RadixTree, disk: StoredKeys, windows: PageWindows | None) -> None:
        """Without `windows`, the model has one layer group, and every cached prefix can be continued."""
        self._tree = tree
        self._disk = disk
        self._windows = windows

    def usable_pages(self, nodes: Sequence[Node], disk_keys: Sequence[PageKey], most: int) -> int:
        """Returns the length of the longest prefix, of at most `most` pages, that can be continued.

        `nodes` are the cached pages of a prompt, and `disk_keys` the keys of those after them.
        """
        if self._windows is None:
            return most
        usable = most
        while usable > 0:
            needed = range(usable - 1, self._windows.first_needed(usable) - 1, -1)
            missing = next((index for index in needed if not self._are_there(nodes, disk_keys, index)), None)
            if missing is None:
                break
            usable = missing  # all prefixes between need this page too
        return usable

    def tail(self, num_pages: int) -> range:
        """Returns which pages of the windowed groups a request needs to go on after `num_pages` whole pages."""
        return range(0) if self._windows is None else range(self._windows.first_needed(num_pages), num_pages)

    @property
    def groups(self) -> range:
        """The numbers of the windowed groups."""
        return range(0) if self._windows is None else range(self._windows.num_groups)

    def of(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns nodes, each followed by the nodes of the windowed groups beside it."""
        if self._windows is None:
            return list(nodes)
        return [one for node in nodes for one in (node, *self._tree.windows_of(node))]

    def keys(self, page: PageKey) -> list[PageKey]:
        """Returns the keys of the pages of the windowed groups beside a page of tokens."""
        return [window_key(page, group) for group in self.groups]

    def insert(self, nodes: Sequence[Node], held: WindowPages, num_given_up: int = 0) -> None:
        """Adds the windowed pages of a request to the tree, beside its pages of tokens `nodes`, which are on the device.

        Keeps the pages that the tree has already. The caller still holds its own. The request has given up
        `num_given_up` of its first pages, which are not among `nodes`.
        """
        for node, frames in zip(nodes[held.first - num_given_up :], held.frames, strict=False):
            for group, frame in enumerate(frames):
                window = self._tree.window_of(node, group) or self._tree.add_window(node, group)
                self._tree.add_copy_if_absent(window, frame)

    def mark_tails(self, nodes: Sequence[Node], num_histories: Callable[[PageKey], int]) -> list[Node]:
        """Records which windowed pages beside a path of the tree prompts are likely to continue from: those before its
        end, before its branches, and before the ends of histories. `num_histories` counts the histories with a page.

        Returns the nodes of windowed pages that were such and are no longer: their rank has fallen.
        """
        assert self._windows is not None
        fallen: list[Node] = []
        first = len(nodes)
        for index in range(len(nodes) - 1, -1, -1):
            node = nodes[index]
            windows = self._tree.windows_of(node)
            following = [child for child in node.children if child.window_group is None]
            ends = num_histories(node.key) > sum(num_histories(child.key) for child in following)
            if index == len(nodes) - 1 or len(following) > 1 or ends:
                first = min(first, self._windows.first_page((index + 1) * self._windows.page_tokens))
            for window in windows:
                if window.is_tail and index < first:
                    fallen.append(window)
                window.is_tail = index >= first
        return fallen

    def tail_nodes(self, nodes: Sequence[Node]) -> list[Node]:
        """Returns the nodes of the windowed pages from which a path of the tree is continued."""
        if self._windows is None or not nodes:
            return []
        first = self._windows.first_needed(nodes[-1].depth + 1)
        last = list(takewhile(lambda node: node.depth >= first, reversed(nodes)))
        return [window for node in reversed(last) for window in self._tree.windows_of(node)]

    def _are_there(self, nodes: Sequence[Node], disk_keys: Sequence[PageKey], index: int) -> bool:
        node = nodes[index] if index < len(nodes) else None
        return self.are_beside(node, disk_keys[index - len(nodes)] if node is None else node.key)

    def are_beside(self, node: Node | None, key: PageKey) -> bool:
        """Returns whether all windowed groups have their page beside a page of tokens, on any tier. `node` is its node, if
        the tree has one.
        """
        return all(
            (node is not None and self._tree.window_of(node, group) is not None)
            or self._disk.holds(window_key(key, group))
            for group in self.groups
        )
