"""Manages the KV cache of one engine for the scheduler.

    match → allocate_path → (loads end) → allocate_pages, insert → release     during a request
    prefetch, offloader.suspend, close_session                                 between the turns of a session

KvCacheManager connects five classes: PageStore (the pages of each tier), PageLoader (loads to the device),
PageOffloader (copies to lower tiers), SessionIndex (the pages of each session) and PromptLeases (prompts that are kept
for a time). It never waits: the end of a copy arrives as a message, which the loop passes to `finish_transfer`.

Invariants: a page that a request holds is never evicted. After all requests and sessions are closed, no pool has an
active page.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graftwork.engine.core.events import MissReason
from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import KvFileKey, KvLimits, SessionUse
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.index.eviction_policy import EvictionPolicy
from graftwork.engine.kv.index.eviction_queue import Ranking
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.index.page_store import DiskPages, NoDisk, PageStore
from graftwork.engine.kv.index.radix_tree import Domain, Lease, Node
from graftwork.engine.kv.index.rolling_pages import RollingPages
from graftwork.engine.kv.index.window_pages import WindowPages
from graftwork.engine.kv.prompt_leases import PromptLeases
from graftwork.engine.kv.session_index import SessionIndex, SessionRecord
from graftwork.engine.kv.transfer.loader import PageAllocation, PageLoader, PrefixMatch, TokenPath
from graftwork.engine.kv.transfer.offloader import PageOffloader
from graftwork.engine.kv.transfer.plan import CopyEngine, TransferDone, TransferKind, domain_digest
from graftwork.engine.kv.transfer.rolling_prefixes import RollingPrefixes
from graftwork.platform.clock import Clock


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """What the KV cache needs to use the host and the disk: the disk store, the copy engine and the estimated load
    times.
    """

    copies: CopyEngine
    costs: CostTracker
    disk: DiskPages


class KvCacheManager:
    """Allocates device pages to requests, and keeps the KV of earlier requests in a cache."""

    def __init__(self, sizes: KvSizes, lower: LowerTiers, clock: Clock, ranking: Ranking | None = None) -> None:
        """`ranking` replaces EvictionPolicy in benchmarks that compare policies."""
        self._clock = clock
        self._disk = lower.disk
        self._copies = lower.copies
        self.sessions = SessionIndex(max_keys=1024 + 16 * (sizes.device_pages + sizes.host_pages))
        policy = EvictionPolicy(
            clock,
            lower.costs,
            sizes.page_tokens,
            self.sessions.is_in_history,
            lower.disk.holds,
            self._is_in_use,
            has_windows=sizes.windows is not None,
        )
        self.page_store = PageStore(sizes, ranking or policy.rank, lower.disk, clock)
        self.prompt_leases = PromptLeases(self.page_store, clock)
        self._loader = PageLoader(self.page_store, lower.copies, lower.costs)
        self._rolling = RollingPrefixes(self.page_store)
        has_disk = not isinstance(lower.disk, NoDisk)
        self.offloader = PageOffloader(self.page_store, lower.copies, self.sessions.is_in_history, has_disk=has_disk)

    @property
    def page_tokens(self) -> int:
        return self.page_store.sizes.page_tokens

    # ---- during a request ---------------------------------------------------------------------------------------

    def match(self, path: TokenPath) -> PrefixMatch:
        """Returns the longest prefix of a prompt whose KV is cached on the device, the host or the disk, and that can be
        continued. Changes nothing.
        """
        found = self.cached(path)
        if found.rolling is not None:
            return found
        return found.first(self.page_store.windows.usable_pages(found.nodes, found.disk_keys, len(found)))

    def cached(self, path: TokenPath) -> PrefixMatch:
        """Returns all cached pages of a prompt. Pages of windowed layer groups may be missing beside the last ones. With a
        rolling window, returns only the pages with which the prompt can be continued.
        """
        rolling = self._rolling_pages(path)
        if rolling is not None:
            return self._rolling.match(path, rolling)
        nodes = tuple(self.page_store.tree.walk(path.scope, path.token_ids, path.known_keys))
        on_disk: list[PageKey] = []
        for key in path.keys(self.page_tokens, len(nodes)):
            if not self._disk.holds(key):
                break
            on_disk.append(key)
        return PrefixMatch(nodes, tuple(on_disk))

    def allocate_path(
        self, path: TokenPath, match: PrefixMatch, num_tokens: int, session: SessionUse | None = None
    ) -> PageAllocation | None:
        """Allocates device pages for the first `num_tokens` tokens of the prompt `path`: the cached pages of `match`,
        then new pages.

        Returns None if there is no room. Records that `session` uses the cached pages.
        """
        allocation = self._loader.allocate(path, match, num_tokens)
        if allocation is not None and len(match):
            self._record_use(path, self._walk(path, match), session)
        return allocation

    def _walk(self, path: TokenPath, match: PrefixMatch) -> list[Node]:
        """Returns the nodes of a prompt's cached pages, of which `match` has found some, after they were allocated."""
        if match.rolling is None:
            return self.page_store.tree.walk(path.scope, path.token_ids, path.known_keys)
        found = (self.page_store.tree.find(key) for _, _, key in match.places())
        return [node for node in found if node is not None]

    def walk(self, path: TokenPath) -> list[Node]:
        """Returns the nodes of the longest cached prefix of a text, first page first: of the pages that are kept of it, with a
        rolling window.
        """
        rolling = self._rolling_pages(path)
        if rolling is None:
            return self.page_store.tree.walk(path.scope, path.token_ids, path.known_keys)
        found = map(self.page_store.tree.find, self._rolling.kept_keys(path, rolling))
        return [node for node in found if node is not None]

    def _rolling_pages(self, path: TokenPath) -> RollingPages | None:
        return self.page_store.sizes.rolling_pages(path.scope.rolling)

    def has_room(
        self, match: PrefixMatch, num_tokens: int, spare_pages: int, window: RollingWindow | None = None
    ) -> bool:
        """Returns whether enough device pages are free or can be evicted.

        Enough means: pages for the first `num_tokens` tokens of a prompt, and for `spare_pages` pages of tokens more. Pages of `match` that
        other requests use now are not counted, because the new request can share them. `window` is the prompt's rolling
        window.
        """
        pool, sizes = self.page_store.device, self.page_store.sizes
        in_use = sum(node.device is not None and not pool.is_idle(node.device) for node in match.nodes)
        wanted = sizes.frames_for(num_tokens, window) - in_use + spare_pages * sizes.frames_of_page
        return self.page_store.could_allocate(Tier.DEVICE, wanted)

    def allocate_pages(self, num_pages: int, domain: Domain) -> list[PageId] | None:
        """Allocates `num_pages` device pages for a domain (usually one tenant). Evicts other pages if needed.

        Returns None and allocates nothing if not enough pages can be evicted.
        """
        page_store = self.page_store
        if page_store.make_room(Tier.DEVICE, num_pages, domain) < num_pages:
            return None
        return page_store.device.allocate(num_pages)

    def insert(
        self,
        path: TokenPath,
        pages: Sequence[PageId],
        session: SessionUse | None,
        windows: WindowPages | None = None,
        num_given_up: int = 0,
    ) -> list[Node]:
        """Adds the pages of computed tokens to the prefix tree. Leaves out a last page that is not full.

        `windows` are the request's pages of windowed layer groups, and `num_given_up` the pages that are not in `pages`
        because of its rolling window. Returns the nodes of `pages`. The request still holds its own pages.
        """
        rolling = self._rolling_pages(path)
        if rolling is not None:
            nodes = self._rolling.insert(path, pages, rolling, num_given_up, windows)
        else:
            nodes = self.page_store.tree.insert(path.scope, path.keys(self.page_tokens), pages, path.domain)
        if windows is not None and rolling is None:
            self.page_store.windows.insert(nodes, windows)
            fallen = self.page_store.windows.mark_tails(nodes, self.sessions.num_histories)
            self.page_store.requeue_nodes(fallen)
            self.page_store.tree.touch(self.page_store.windows.tail_nodes(nodes))
        self._record_use(path, nodes, session)
        self.offloader.mark_dirty(nodes)
        return nodes

    def deduplicate(
        self, nodes: Sequence[Node], pages: list[PageId], windows: WindowPages | None = None
    ) -> tuple[list[PageId], list[PageId]]:
        """Replaces pages of a request with pages of the prefix tree that contain the same KV. Changes `windows`.

        `nodes` are the nodes of the request's first pages. Returns the request's new list of pages, and the pages that
        were replaced, which the caller must release.
        """
        shared, replaced = list(pages), list[PageId]()
        for index, node in enumerate(nodes):
            if node.device is not None and node.device != pages[index] and not node.is_loading:
                self.page_store.device.hold([node.device])
                replaced.append(pages[index])
                shared[index] = node.device
        if windows is not None:
            replaced += self._deduplicate_windows(nodes, windows)
        return shared, replaced

    def _deduplicate_windows(self, nodes: Sequence[Node], windows: WindowPages) -> list[PageId]:
        """Does what `deduplicate` does, for the pages of windowed layer groups. Returns the pages that were replaced."""
        replaced: list[PageId] = []
        num_given_up = nodes[-1].depth + 1 - len(nodes) if nodes else 0
        for place, (node, frames) in enumerate(
            zip(nodes[windows.first - num_given_up :], windows.frames, strict=False)
        ):
            beside = [self.page_store.tree.window_of(node, group) for group in range(len(frames))]
            shared = [
                frame if one is None or one.is_loading or one.device is None else one.device
                for one, frame in zip(beside, frames, strict=True)
            ]
            changed = [pair for pair in zip(shared, frames, strict=True) if pair[0] != pair[1]]
            self.page_store.device.hold(new for new, _ in changed)
            replaced += [old for _, old in changed]
            windows.frames[place] = tuple(shared)
        return replaced

    def _record_use(self, path: TokenPath, nodes: Sequence[Node], session: SessionUse | None) -> None:
        """Records that a session, or a request without a session, uses pages.

        Closing a session never removes pages that a request without a session has used.
        """
        if session is None:
            for node in nodes:
                node.outlives_sessions = True
        else:
            keys = [node.key for node in nodes]
            self.page_store.requeue(self.sessions.add_pages(path.domain, session.session, path.scope.own, keys))

    def release(self, pages: Iterable[PageId]) -> None:
        """Ends a request's use of device pages. Pages that are in the prefix tree stay cached."""
        self.page_store.release(Tier.DEVICE, pages)

    def set_history(self, path: TokenPath, session: SessionUse) -> SessionRecord:
        """Sets the history of a session: the tokens that its next turn will start with.

        Pages that only the former history contained are evicted earlier from now on.
        """
        keys = self._history_keys(path)
        followed = self.sessions.set_history(path.domain, session.session, path.scope.own, keys)
        self.page_store.requeue(followed.superseded)
        return followed.record

    def _history_keys(self, path: TokenPath) -> list[PageKey]:
        """Returns the keys of the pages from which a text can be continued: of all its whole pages, or of those that are kept
        with a rolling window.
        """
        rolling = self._rolling_pages(path)
        return list(path.keys(self.page_tokens)) if rolling is None else self._rolling.kept_keys(path, rolling)

    def lease(self, record: SessionRecord, nodes: Sequence[Node], lease: Lease) -> None:
        """Gives the pages of a session a lease: until the lease ends, pages without a lease are evicted first."""
        record.lease = lease
        self.page_store.lease(nodes, lease)

    def close_session(self, path: TokenPath, session: SessionUse) -> None:
        """Removes the record of a session. Also removes, from every tier, the pages that only this session has used.

        `path` is the session's history. Pages that another session's history contains, or that a request without a
        session has used, are kept.
        """
        nodes = {key: self.page_store.tree.find(key) for key in path.keys(self.page_tokens)}
        own = [key for key, node in nodes.items() if node is None or not node.outlives_sessions]
        keys = dict.fromkeys((*self.sessions.remove(path.domain, session.session), *own))
        self.page_store.forget(key for key in keys if not self.sessions.is_in_history(key))
        self._copies.sweep()

    def forget_domain(self, domain: Domain) -> None:
        """Removes all cached pages of a domain (usually one tenant) from every tier. Also removes the domain's limits
        and the records of its sessions.

        The domain's running requests continue, and the pages that they compute are cached again.
        """
        self.sessions.remove_domain(domain)
        self.prompt_leases.forget_domain(domain)
        self.page_store.limits.forget(domain)
        tree = self.page_store.tree
        for node in [*tree.nodes_on(Tier.DEVICE), *tree.nodes_on(Tier.HOST)]:
            if node.domain == domain and node.in_tree:
                tree.remove_subtree(node)
        self._disk.forget_domain(domain_digest(domain))
        self._copies.sweep()

    def unlock_files(self, domain: Domain, key: KvFileKey | None) -> None:
        """Encrypts the files of `domain` (usually one tenant) with `key` from now on, and reads those that are.

        Removes its plain files when its first key comes. None changes nothing.
        """
        if key is not None and self._disk.unlock(domain_digest(domain), key):
            self._copies.sweep()

    def set_limits(self, domain: Domain, limits: KvLimits) -> None:
        """Sets the most bytes that the KV pages of `domain` (usually one tenant) and of its group may take on each tier,
        and enforces these limits.
        """
        self.page_store.limits.set(domain, limits)
        self.offloader.enforce_limits(domain)

    def enforce_limits(self, domain: Domain) -> None:
        """Moves pages of `domain` (usually one tenant) to a lower tier until the domain is within its limits.

        Evicts the pages if there is no lower tier. Also ends leases of prompts, of any domain, above the domain's
        reserve.
        """
        self.prompt_leases.enforce_limits()
        self.offloader.enforce_limits(domain)

    def offload(
        self,
        path: TokenPath,
        pages: Sequence[PageId],
        session: SessionUse | None,
        windows: WindowPages | None = None,
        num_given_up: int = 0,
    ) -> None:
        """Ends a running request's use of its device pages, so that the request can continue later.

        Adds the computed pages to the prefix tree, releases them, and starts to copy them to the host. The parameters are
        those of `insert`.
        """
        nodes = self.insert(path, pages, session, windows, num_given_up)
        self.release(pages if windows is None else [*pages, *windows.all_frames])
        self.offloader.save(nodes)

    def _is_in_use(self, node: Node) -> bool:
        return node.device is not None and self.page_store.device.holders(node.device) > 1

    # ---- copies -----------------------------------------------------------------------------------------------

    def prefetch(self, path: TokenPath) -> list[Node]:
        """Starts to load the cached pages of the prompt `path` to the device, as many as there is room for.

        Returns the nodes that are on the device or being loaded.
        """
        return self._loader.prefetch(path, self.match(path))

    def finish_transfer(self, done: TransferDone) -> int | None:
        """Processes the end of a transfer between tiers.

        If the transfer was a load to the device, and some pages could not be loaded, returns the index in the prompt of
        the first of these pages. Otherwise returns None.
        """
        if done.plan.kind in (TransferKind.LOAD, TransferKind.FETCH):
            failed_from = self._loader.finish(done)
            self.offloader.start_background_copies()
            return failed_from
        self.offloader.finish(done)
        return None

    def start_background_copies(self) -> None:
        """Copies pages to lower tiers in the background if few pages are free. The scheduler calls it once per step."""
        self.offloader.start_background_copies()

    # ---- misses -----------------------------------------------------------------------------------------------

    def miss_reason(self, path: TokenPath, match: PrefixMatch, session: SessionUse | None) -> MissReason | None:
        """Returns why pages of a prompt are not in the cache. `match` is the prefix of the prompt that is in the cache.

        Returns None if no page is missing, or if no reason is known.
        """
        size = self.page_tokens
        key = next(iter(path.keys(size, len(match))), None)
        if key is None:
            return None
        lost = self.page_store.eviction_reason(key)
        if lost is not None:
            return lost
        if session is not None and len(match) < session.history_tokens // size:
            return self._history_miss(path, session, match)
        return MissReason.NEVER_CACHED if not len(match) else None

    def _history_miss(self, path: TokenPath, session: SessionUse, match: PrefixMatch) -> MissReason:
        record = self.sessions.find(path.domain, session.session)
        if record is None:
            return MissReason.RESTARTED
        if record.scope != path.scope.own:
            return MissReason.ADAPTER_CHANGED
        if not record.keys:
            return MissReason.RESTARTED
        own = self._history_keys(
            TokenPath(path.scope, path.token_ids[: session.history_tokens], path.domain, path.known_keys)
        )
        shared = sum(mine == theirs for mine, theirs in zip(own, record.keys, strict=False))
        edited = shared < min(len(record.keys), session.history_tokens // self.page_tokens)
        return MissReason.HISTORY_EDITED if edited else MissReason.EVICTED_PRESSURE

    def check_integrity(self) -> None:
        """Checks the page store, the session index, the leases of prompts, the loader and the offloader."""
        self.page_store.check_integrity()
        self.sessions.check_integrity()
        self.prompt_leases.check_integrity()
        self._loader.check_integrity()
        self.offloader.check_integrity()
