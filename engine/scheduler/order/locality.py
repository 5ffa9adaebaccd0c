"""Knows what a waiting request would find on the device: cached KV of its prompt, and its adapters.

Owns one cursor into the prefix tree for each waiting request, and the pages that running requests compute for the first
time. Never loads, keeps or evicts anything.

A cursor is the last node that was found. It holds as long as the tree has neither gained nor lost a node, as within one
step; then the search goes on from it, so a prompt is not matched from its first page each time.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from graftwork.engine.kv.index.radix_tree import Node, RadixTree
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.platform.ids import RequestId

_MOST_BACK = 4096
"""How many pages from the end of a prompt its last cached one is looked for, if those in the middle are not kept."""


class Locality(Protocol):
    """Tells what a waiting request would find on the device."""

    def cached_tokens(self, state: RequestState) -> int:
        """Returns how many of the request's known tokens have cached KV. The value may be a little out of date."""
        ...

    def has_adapters(self, state: RequestState) -> bool:
        """Returns whether all adapters of the request are on the device."""
        ...

    def next_page(self, state: RequestState) -> Hashable | None:
        """Returns what identifies the first page of the request's prompt whose KV is not cached; None if all is cached.
        Two requests with equal pages would compute the same.
        """
        ...

    def is_being_computed(self, page: Hashable) -> bool:
        """Returns whether a running request computes this page, which is then cached."""
        ...

    def start(self, state: RequestState) -> None:
        """Records that a waiting request starts, and computes its next page. `forget` must follow."""
        ...

    def forget(self, state: RequestState) -> None:
        """Ends the tracking of a request that waits no longer. Does nothing if it was not tracked."""
        ...


class NoLocality:
    """A Locality for which nothing is ever on the device."""

    def cached_tokens(self, state: RequestState) -> int:
        return 0

    def has_adapters(self, state: RequestState) -> bool:
        return False

    def next_page(self, state: RequestState) -> Hashable | None:
        return None

    def is_being_computed(self, page: Hashable) -> bool:
        return False

    def start(self, state: RequestState) -> None:
        """Does nothing, because nothing is tracked."""

    def forget(self, state: RequestState) -> None:
        """Does nothing, because nothing is tracked."""


class DeviceLocality:
    """Reads the prefix tree (copies on the device or on the host count) and the adapters of one engine."""

    def __init__(self, tree: RadixTree, has_adapter: Callable[[str], bool]) -> None:
        """`has_adapter` returns whether the adapter with a digest is on the device."""
        self._tree = tree
        self._has_adapter = has_adapter
        self._cursors: dict[RequestId, _Cursor] = {}
        self._computed: dict[Hashable, RequestState] = {}
        """The running request that computes a page. The request may have computed it or ended since."""

    def cached_tokens(self, state: RequestState) -> int:
        return min(self._follow(state).cached_tokens, state.num_reusable)

    def has_adapters(self, state: RequestState) -> bool:
        return all(map(self._has_adapter, state.request.adapter_digests))

    def next_page(self, state: RequestState) -> Hashable | None:
        return self._follow(state).next_page

    def is_being_computed(self, page: Hashable) -> bool:
        state = self._computed.get(page)
        return state is not None and _is_prefilling(state)

    def start(self, state: RequestState) -> None:
        self._computed = {page: one for page, one in self._computed.items() if _is_prefilling(one)}
        page = self.next_page(state)
        if page is not None:
            self._computed[page] = state

    def forget(self, state: RequestState) -> None:
        self._cursors.pop(state.request_id, None)

    def _follow(self, state: RequestState) -> "_Cursor":
        cursor, size, num_changes = self._cursors.get(state.request_id), self._tree.page_tokens, self._tree.num_changes
        if cursor is not None and cursor.num_changes == num_changes:
            return cursor
        node = None if cursor is None else cursor.node
        if state.rolling_window is None or node is None or not (node.is_apart and node.in_tree):
            node = self._tree.follow(node, state.scope, state.token_ids, state.known_keys)
            node = node if state.rolling_window is None else self._last_kept(state) or node
        if cursor is None or node is not cursor.node:
            start = 0 if node is None else (node.depth + 1) * size
            tokens = tuple(state.token_ids[start : start + size]) if start + size <= state.num_reusable else None
            page = None if tokens is None else (node, state.scope.at(start // size), tokens)
            cursor = self._cursors[state.request_id] = _Cursor(node, page, start, num_changes)
        cursor.num_changes = num_changes
        return cursor

    def _last_kept(self, state: RequestState) -> Node | None:
        """Returns the last cached page of a prompt with a rolling window, of which pages in the middle are not kept."""
        path = state.path(state.num_reusable)
        keys = list(path.keys(self._tree.page_tokens))[-_MOST_BACK:]
        return next((node for key in reversed(keys) if (node := self._tree.find(key)) is not None), None)


@dataclass(slots=True)
class _Cursor:
    """What one waiting request would find in the prefix tree."""

    node: Node | None
    """The last node of its cached prefix."""
    next_page: Hashable | None
    cached_tokens: int
    num_changes: int
    """The changes of the tree when this was found."""


def _is_prefilling(state: RequestState) -> bool:
    """Returns whether a request runs, and has not computed its prompt."""
    return bool(state.pages) and state.num_computed < state.num_prompt
