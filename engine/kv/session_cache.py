"""Decides what happens to a session's KV between its turns.

Records when sessions began to wait for tools, and measures how long each tool takes. Never changes a page itself: it
calls KvCacheManager to keep, load or free pages.
"""

from collections.abc import Collection, Mapping
from itertools import takewhile
from typing import Protocol

from graftwork.engine.core.requests import SessionUse
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory, SessionVerb
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.index.radix_tree import Domain, Lease, Node
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.kv.session_index import SessionRecord
from graftwork.engine.kv.transfer.loader import TokenPath
from graftwork.platform.clock import Clock

_TURN_LEASE_S = 30.0
"""The length in seconds of the lease that protects a session's pages when its turn is about to begin.

The lease covers the rest of the upload and the wait in the queue.
"""


class LeaseModel(Protocol):
    """Predicts how long the tools of a session take to answer. engine/kv/tool_latency.py implements it.

    In all methods, `domain` identifies the domain (usually one tenant) of the session.
    """

    def lease_s(self, domain: str, tools: Mapping[str, float | None]) -> float:
        """Returns how many seconds a session's pages should stay on the device while the session waits for `tools`.

        `tools` maps the name of each tool to the milliseconds that the client expects it to take, or to None.
        """
        ...

    def return_probability(self, domain: str, tools: Collection[str], waited_s: float, within_s: float) -> float:
        """Returns the probability that all `tools` have answered after `within_s` more seconds.

        The session has waited for them for `waited_s` seconds.
        """
        ...

    def observe(self, domain: str, tool: str, seconds: float) -> None:
        """Learns that `tool` has taken `seconds` to answer."""
        ...

    def forget_domain(self, domain: str) -> None:
        """Drops what was learned of the domain's tools."""
        ...


class SessionCache:
    """Runs the commands on a session's KV between its turns: hold, prefetch, suspend, close, change and read."""

    def __init__(self, kv_cache: KvCacheManager, scopes: CacheScopes, lease_model: LeaseModel, clock: Clock) -> None:
        self._kv_cache = kv_cache
        self._scopes = scopes
        self._lease_model = lease_model
        self._clock = clock

    def begin_turn(self, domain: Domain, use: SessionUse) -> None:
        """Protects a session's pages with a lease (they are evicted last for some seconds), because its next turn is
        about to begin.

        From now on the session waits for no tool.
        """
        record = self._kv_cache.sessions.find(domain, use.session)
        if record is not None:
            self._end_wait(record, set(record.tools))
            tree = self._kv_cache.page_store.tree
            found = takewhile(lambda node: node is not None, map(tree.find, record.keys))
            nodes = [node for node in found if node is not None]
            self._kv_cache.lease(record, nodes, Lease(self._clock.monotonic() + _TURN_LEASE_S, return_probability=1.0))

    def run(self, command: SessionCommand) -> SessionMemory:
        """Runs one command on a session. Returns on which tiers the KV of the session's history is afterwards."""
        self._kv_cache.unlock_files(command.domain, command.kv_key)
        path = self._path(command)
        use = SessionUse(command.session, len(command.token_ids))
        match command.verb:
            case SessionVerb.HOLD:
                self._hold(path, use, command)
            case SessionVerb.PREFETCH:
                self._prefetch(path, use, command)
            case SessionVerb.SUSPEND:
                self._suspend(path, use)
            case SessionVerb.CLOSE:
                self._kv_cache.close_session(path, use)
            case SessionVerb.CHANGE:
                self._kv_cache.close_session(path, use)
                self._kv_cache.set_history(TokenPath(path.scope, (), path.domain), use)
            case SessionVerb.READ:
                pass
        return self._report(path, use)

    def forget_domain(self, domain: Domain) -> None:
        """Removes all cached KV of a domain (usually one tenant), and what was learned of its tools."""
        self._kv_cache.forget_domain(domain)
        self._lease_model.forget_domain(domain.hex())

    def _path(self, command: SessionCommand) -> TokenPath:
        adapters = tuple(sorted(command.adapters))
        own = self._scopes.scope(command.domain, adapters)
        public_pages = command.public_tokens // self._kv_cache.page_tokens
        scope = self._scopes.of_prompt(own, adapters, public_pages, command.window)
        return TokenPath(scope, command.token_ids, command.domain)

    def _hold(self, path: TokenPath, use: SessionUse, command: SessionCommand) -> None:
        record = self._kv_cache.set_history(path, use)
        nodes = self._kv_cache.walk(path)
        self._end_wait(record, set(record.tools))
        if command.waits:
            domain, expected_ms = path.domain.hex(), {wait.tool: wait.expected_ms for wait in command.waits}
            seconds = self._lease_model.lease_s(domain, expected_ms)
            probability = self._lease_model.return_probability(domain, expected_ms, 0.0, seconds)
            record.waiting_since, record.tools = self._clock.monotonic(), tuple(expected_ms)
            self._kv_cache.lease(record, nodes, Lease(self._clock.monotonic() + seconds, probability))
        for node in [*(node for node in nodes[:-1] if node.is_apart), *nodes[-1:]]:
            self._kv_cache.page_store.requeue_path(node)  # the lease that `begin_turn` gave has ended
        self._kv_cache.offloader.save(nodes)
        self._kv_cache.offloader.store(nodes)

    def _prefetch(self, path: TokenPath, use: SessionUse, command: SessionCommand) -> None:
        """Loads the session's pages because some of its tools have answered. If no tool is named, all have answered."""
        record = self._kv_cache.set_history(path, use)
        self._end_wait(record, {wait.tool for wait in command.waits} or set(record.tools))
        nodes = self._kv_cache.prefetch(path)
        self._kv_cache.offloader.keep_on_device(nodes)
        self._kv_cache.lease(
            record, nodes, record.lease or Lease(self._clock.monotonic() + _TURN_LEASE_S, return_probability=1.0)
        )

    def _suspend(self, path: TokenPath, use: SessionUse) -> None:
        record = self._kv_cache.set_history(path, use)
        if record.lease is not None:
            record.lease.until = min(record.lease.until, self._clock.monotonic())
            self._kv_cache.page_store.requeue(record.keys)
        nodes = self._kv_cache.walk(path)
        if path.scope.rolling is not None:
            self._forget_left_behind(record)
        self._kv_cache.offloader.suspend(nodes)
        self._kv_cache.offloader.store(nodes)

    def _forget_left_behind(self, record: SessionRecord) -> None:
        """Removes the pages that a session with a rolling window has seen roll by. They stand beside those of its history, so
        they would keep the sinks on the device.
        """
        found = ((key, self._kv_cache.page_store.tree.find(key)) for key in record.abandoned)
        left = [key for key, node in found if node is not None and node.is_apart]
        self._kv_cache.page_store.forget(key for key in left if not self._kv_cache.sessions.is_in_history(key))

    def _end_wait(self, record: SessionRecord, answered: set[str]) -> None:
        """Records how long the answered tools took. When the session waits for no further tool, its lease ends."""
        now = self._clock.monotonic()
        if record.waiting_since is not None:
            for tool in answered.intersection(record.tools):
                self._lease_model.observe(record.domain.hex(), tool, now - record.waiting_since)
        record.tools = tuple(tool for tool in record.tools if tool not in answered)
        if not record.tools:
            record.waiting_since = None
            if record.lease is not None:
                record.lease.until = min(record.lease.until, now)
                record.lease = None
                self._kv_cache.page_store.requeue(record.keys)

    def _report(self, path: TokenPath, use: SessionUse) -> SessionMemory:
        match = self._kv_cache.match(path)
        size, page_bytes = self._kv_cache.page_tokens, self._kv_cache.page_store.sizes.page_bytes
        tiers = match.tiers(_readable_on)
        device, host = tiers.count(Tier.DEVICE), tiers.count(Tier.HOST)
        page_store, cached = self._kv_cache.page_store, self._kv_cache.cached(path)
        pages = page_store.windows.of(cached.nodes)  # of all layer groups
        on_device = sum(node.device is not None and not node.is_loading for node in pages)
        on_host = sum(node.host is not None for node in pages)
        keys = [*(node.key for node in cached.nodes), *cached.disk_keys]
        on_disk = sum(page_store.disk.holds(one) for key in keys for one in (key, *page_store.windows.keys(key)))
        record = self._kv_cache.sessions.find(path.domain, use.session)
        lease = None if record is None else record.lease
        left = None if lease is None else lease.until - self._clock.monotonic()
        return SessionMemory(
            device_tokens=device * size,
            host_tokens=host * size,
            disk_tokens=(len(match) - device - host) * size,
            missing_tokens=len(path.token_ids) - len(match) * size,
            device_bytes=on_device * page_bytes,
            host_bytes=on_host * page_bytes,
            disk_bytes=on_disk * page_bytes,
            lease_s=left if left is not None and left > 0 else None,
        )


def _readable_on(node: Node | None) -> Tier:
    """Returns the nearest tier from which a cached page can be read now."""
    if node is None:
        return Tier.DISK
    if node.device is not None and not node.is_loading:
        return Tier.DEVICE
    return Tier.HOST if node.host is not None else Tier.DISK
