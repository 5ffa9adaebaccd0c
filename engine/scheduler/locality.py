"""Knows what a waiting request would find on the device: cached KV of its prompt, and its adapters.

Owns one cursor into the prefix tree for each waiting request. Never loads, keeps or evicts anything.

A cursor is the last node that was found. It is read again in O(1) unless the tree has grown or shrunk below it, so a
prompt is not matched from its first page each time.
"""

from typing import Protocol

from graftwork.engine.kv.index.radix_tree import Node, RadixTree
from graftwork.engine.scheduler.request_state import RequestState
from graftwork.engine.scheduler.resources import AdapterProvider
from graftwork.platform.ids import RequestId


class Locality(Protocol):
    """Tells what a waiting request would find on the device."""

    def cached_tokens(self, state: RequestState) -> int:
        """Returns how many of the request's known tokens have cached KV. The value may be a little out of date."""
        ...

    def has_adapters(self, state: RequestState) -> bool:
        """Returns whether all adapters of the request are on the device."""
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

    def forget(self, state: RequestState) -> None:
        """Does nothing, because nothing is tracked."""


class DeviceLocality:
    """Reads the prefix tree (copies on the device or on the host count) and the adapters of one engine."""

    def __init__(self, tree: RadixTree, adapters: AdapterProvider) -> None:
        self._tree = tree
        self._adapters = adapters
        self._cursors: dict[RequestId, Node | None] = {}

    def cached_tokens(self, state: RequestState) -> int:
        node = self._tree.follow(self._cursors.get(state.request_id), state.scope, state.token_ids)
        self._cursors[state.request_id] = node
        return 0 if node is None else min((node.depth + 1) * self._tree.page_tokens, state.num_reusable)

    def has_adapters(self, state: RequestState) -> bool:
        return all(map(self._adapters.is_ready, state.request.adapter_digests))

    def forget(self, state: RequestState) -> None:
        self._cursors.pop(state.request_id, None)
