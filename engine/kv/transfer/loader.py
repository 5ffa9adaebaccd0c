"""Allocates device pages to requests, and loads cached KV from the host and the disk to the device.

Owns the loads that are running. Never loads a page twice at the same time: a second request for the page waits for the
first load. Invariant: pages that are in flight are never evicted. A load marks its source pages as in flight before
other pages are evicted to make room. It marks its target pages as in flight before the copy begins.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from graftwork.engine.core.prefix_keys import PageKey, PrefixScope, page_keys, pages_for
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.index.page_store import PageStore
from graftwork.engine.kv.index.radix_tree import Domain, Node
from graftwork.engine.kv.index.window_pages import WindowPages
from graftwork.engine.kv.transfer.plan import CopyEngine, PageMove, TransferDone, TransferKind, TransferPlan


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix of a prompt whose KV is cached on the device, the host or the disk, in whole pages."""

    nodes: tuple[Node, ...]
    """The pages on the device or the host, first page first."""
    disk_keys: tuple[PageKey, ...]
    """The keys of the pages after `nodes`; these pages are only on disk."""
    rolling: tuple[int, ...] | None = None
    """Of a prompt with a rolling window, which has only the pages that it needs: their numbers in the prompt, `nodes` first.
    Any of them may be only on disk. None for other prompts.
    """
    rolling_end: int = 0
    """With `rolling`, the number of pages of the prefix, given up ones included."""

    def __len__(self) -> int:
        return len(self.nodes) + len(self.disk_keys) if self.rolling is None else self.rolling_end

    def first(self, num_pages: int) -> "PrefixMatch":
        """Returns the first `num_pages` pages of the prefix: all or none with a rolling window."""
        if self.rolling is not None and num_pages == self.rolling_end:
            return self
        return PrefixMatch(self.nodes[:num_pages], self.disk_keys[: max(num_pages - len(self.nodes), 0)])

    def places(self) -> list[tuple[int, Node | None, PageKey]]:
        """Returns each page in the order of the prompt: its number, its node if it is not only on disk, and its key."""
        found = [*((node, node.key) for node in self.nodes), *((None, key) for key in self.disk_keys)]
        if self.rolling is None:
            return [(index, *one) for index, one in enumerate(found)]
        return sorted(((index, *one) for index, one in zip(self.rolling, found, strict=True)), key=itemgetter(0))

    def tiers(self, tier_of: Callable[[Node | None], Tier]) -> tuple[Tier, ...]:
        """Returns the tier of each page of the prefix. A page that was given up counts where the next one is."""
        tiers: list[Tier] = []
        for index, node, _ in self.places():
            tiers += [tier_of(node)] * (index + 1 - len(tiers))
        return (*tiers, *[tiers[-1] if tiers else Tier.DEVICE] * (len(self) - len(tiers)))


@dataclass(frozen=True, slots=True)
class TokenPath:
    """The first tokens of a prompt, the cache scopes of their pages, and the domain (tenant) that the pages are charged
    to.
    """

    scope: PrefixScope
    token_ids: Sequence[int]
    domain: Domain
    known_keys: list[PageKey] = field(default_factory=list, compare=False, repr=False)
    """The keys of the first pages, as far as they are known: page_keys appends to them. Paths of one request share them."""

    def keys(self, page_tokens: int, start: int = 0) -> Iterator[PageKey]:
        """Yields the keys of the whole pages, from page `start` on. A page has `page_tokens` tokens."""
        return page_keys(self.scope, self.token_ids, page_tokens, self.known_keys, start)


@dataclass(frozen=True, slots=True)
class PageAllocation:
    """The device pages that a request was given, in the order of its tokens."""

    pages: list[PageId]
    tiers: tuple[Tier, ...]
    """The tiers on which the KV of the first pages was found. The pages contain this KV once all `loads` have ended."""
    loads: frozenset[TransferPlan]
    windows: WindowPages | None = None
    """The pages of the windowed layer groups; None if the model has one group. They may end before `pages`."""
    num_given_up: int = 0
    """The pages after the sinks that a request with a rolling window does not need: they are not in `pages`."""


@dataclass(frozen=True, slots=True)
class _Load:
    """A cached page that is to be loaded to the device."""

    tier: Tier
    node: Node | None
    """None if the tree has no node of the page yet, because it is only on disk."""
    index: int
    """The number in the prompt of the page of tokens, or of that beside which a windowed layer group's page is."""
    key: PageKey
    """The key of the page of tokens."""
    group: int | None = None
    """The windowed layer group; None for a page of the first group."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """The cached pages of windowed layer groups with which a prefix is continued."""

    pages: range
    held: dict[tuple[int, int], PageId]
    """Those that are on the device, by page of tokens and group."""
    loads: list[_Load]


class PageLoader:
    """Starts loads of pages to the device, and records which load writes the device page of each node of the prefix
    tree.
    """

    def __init__(self, page_store: PageStore, copies: CopyEngine, costs: CostTracker) -> None:
        self._page_store = page_store
        self._copies = copies
        self._costs = costs
        self._in_flight: dict[Node, TransferPlan] = {}

    def allocate(self, path: TokenPath, match: PrefixMatch, num_tokens: int) -> PageAllocation | None:
        """Allocates device pages for the first `num_tokens` tokens of the prompt `path`: the cached pages of `match`,
        then new pages.

        Cached pages are loaded to the device if this is faster than computing them again. All pages stay allocated
        until the caller releases them. Returns None and allocates nothing if there is no room.
        """
        page_store, sizes = self._page_store, self._page_store.sizes
        found = self._worth_loading(match, num_tokens)
        loads, tail, num_cached = _loads(found), self._tail(found), len(found)
        held = [node.device for node in found.nodes if node.device is not None]
        kept = [*held, *tail.held.values()]
        page_store.device.hold(kept)
        num_pages = len(loads) + self._num_new_pages(path, num_cached, num_tokens)
        missing = num_pages + len(tail.loads) + self._new_window_frames(num_cached, num_tokens)
        has_room = page_store.could_allocate(Tier.DEVICE, missing)
        if not has_room or self._make_room([*loads, *tail.loads], missing, path.domain) < missing:
            page_store.release(Tier.DEVICE, kept)
            return None
        frames = page_store.device.allocate(missing)
        pages, window_frames = frames[:num_pages], frames[num_pages:]
        tiers = found.tiers(self._tier_of)
        by_index = {index: node for index, node, _ in found.places() if node is not None}
        self._load(path, by_index, [*loads, *tail.loads], [*pages[: len(loads)], *window_frames])
        nodes = [by_index[index] for index, _, _ in found.places()]
        used = [*nodes, *page_store.windows.tail_nodes(nodes)]
        page_store.tree.touch(used)
        pending = frozenset(self._in_flight[node] for node in used if node in self._in_flight)
        windows = None if sizes.windows is None else self._held_windows(tail, window_frames)
        cached = [node.device for node in nodes if node.device is not None]
        return PageAllocation(
            cached + pages[len(loads) :], tiers, pending, windows, num_given_up=num_cached - len(cached)
        )

    def prefetch(self, path: TokenPath, match: PrefixMatch) -> list[Node]:
        """Starts to load the cached pages of the prompt `path` to the device, as many as there is room for.

        Returns the nodes that are on the device or being loaded. The caller does not release these pages: after the
        load, they can be evicted.
        """
        page_store = self._page_store
        loads, tail = _loads(match), self._tail(match)
        held = [*(node.device for node in match.nodes if node.device is not None), *tail.held.values()]
        page_store.device.hold(held)
        all_loads = [*loads, *tail.loads]
        pages = page_store.device.allocate(self._make_room(all_loads, len(all_loads), path.domain))
        by_index = {index: node for index, node, _ in match.places() if node is not None}
        self._load(path, by_index, all_loads, pages)
        nodes = [node for _, node in sorted(by_index.items(), key=itemgetter(0)) if node.device is not None]
        page_store.tree.touch([*nodes, *page_store.windows.tail_nodes(nodes)])
        page_store.release(Tier.DEVICE, [*pages, *held])
        return nodes

    def finish(self, done: TransferDone) -> int | None:
        """Processes the end of a load.

        Returns the index in the prompt of the first page that could not be loaded; None if all pages were loaded.
        """
        plan, page_store = done.plan, self._page_store
        for node in plan.nodes:
            node.is_loading = False
            self._in_flight.pop(node, None)
        if plan.kind is TransferKind.LOAD:
            page_store.end_copy(Tier.HOST, [move.source for move in plan.moves if move.source is not None])
        page_store.end_copy(Tier.DEVICE, [move.target for move in plan.moves if move.target is not None])
        if done.num_good:
            self._costs.observe_load(plan.kind.source, done.num_good, done.seconds)
        if done.num_good == len(plan.nodes):
            return None
        bad = plan.nodes[done.num_good :]
        for node in bad:
            if node.in_tree:
                page_store.tree.remove_subtree(node)
        return min(node.depth for node in bad)

    def check_integrity(self) -> None:
        """Checks that a node of the prefix tree is marked as loading exactly if a load writes its page now."""
        for node, plan in self._in_flight.items():
            assert node in plan.nodes, "a load is recorded for a page that it does not fill"
            assert node.is_loading or not node.in_tree, "a page is being loaded and not marked"
        for node in self._page_store.tree.nodes_on(Tier.DEVICE):
            assert not node.is_loading or node in self._in_flight, "a page waits for a load that does not run"

    def _tier_of(self, node: Node | None) -> Tier:
        """Returns the tier that has a cached page before loads begin. A page that is being loaded counts where it was."""
        plan = None if node is None else self._in_flight.get(node)
        return plan.kind.source if plan is not None else _source(node)

    def _worth_loading(self, match: PrefixMatch, num_tokens: int) -> PrefixMatch:
        """Returns the cached pages that are on the device, and those after them of which a load saves time.

        Together they are a prefix that can be continued. With a rolling window, it is all of the match or nothing.
        """
        loads, size = _loads(match), self._page_store.sizes.page_tokens
        if match.rolling is not None:
            tiers = [load.tier for load in loads]
            saves = not loads or self._costs.cost.saves(tiers, num_tokens, len(match) * size)
            return match if saves else match.first(0)
        most = len(match)
        if loads:
            tiers = list(match.tiers(_source))
            most += self._costs.cost.best_prefix(tiers, num_tokens, size) - len(loads)
        return match.first(self._page_store.windows.usable_pages(match.nodes, match.disk_keys, most))

    def _num_new_pages(self, path: TokenPath, num_cached: int, num_tokens: int) -> int:
        """Returns how many pages a request is given for tokens that are not cached: with a rolling window, only those of its
        first steps. It is given others when it gives up these.
        """
        sizes, end = self._page_store.sizes, num_tokens
        if path.scope.rolling is not None:
            end = min(num_tokens, num_cached * sizes.page_tokens + sizes.step_tokens)
        return pages_for(end, sizes.page_tokens) - num_cached

    def _tail(self, match: PrefixMatch) -> _Tail:
        """Returns the pages of the windowed layer groups with which the pages of a match are continued."""
        windows, tree = self._page_store.windows, self._page_store.tree
        pages = windows.tail(len(match))
        held: dict[tuple[int, int], PageId] = {}
        loads: list[_Load] = []
        for index, owner, key in match.places() if pages else ():
            for group in windows.groups if index in pages else ():
                node = None if owner is None else tree.window_of(owner, group)
                if node is not None and node.device is not None:
                    held[index, group] = node.device
                else:
                    loads.append(_Load(Tier.DISK if node is None else Tier.HOST, node, index, key, group))
        return _Tail(pages, held, loads)

    def _new_window_frames(self, num_cached: int, num_tokens: int) -> int:
        """Returns how many frames of windowed layer groups a request is given beside its cached pages.

        They are enough until it gives up its first ones. It is given others then.
        """
        sizes = self._page_store.sizes
        if sizes.windows is None:
            return 0
        end = min(num_tokens, num_cached * sizes.page_tokens + sizes.windows.step_tokens)
        return (pages_for(end, sizes.page_tokens) - num_cached) * sizes.windows.num_groups

    def _held_windows(self, tail: _Tail, frames: list[PageId]) -> WindowPages:
        """Returns the windowed pages of a request: its tail, then new ones. `frames` are those that were allocated."""
        groups = self._page_store.windows.groups
        loaded = {(load.index, load.group): frame for load, frame in zip(tail.loads, frames, strict=False)}
        found = tail.held | loaded
        own = WindowPages(tail.pages.start, [tuple(found[index, group] for group in groups) for index in tail.pages])
        own.extend(frames[len(loaded) :], len(groups))
        return own

    def _make_room(self, loads: list[_Load], num_pages: int, domain: Domain) -> int:
        """Makes room on the device. Returns how many of `num_pages` are free.

        Never evicts the source pages of `loads`.
        """
        page_store = self._page_store
        sources = [load.node.host for load in loads if load.node is not None and load.node.host is not None]
        page_store.host.begin_copy(sources)
        num_free = page_store.make_room(Tier.DEVICE, num_pages, domain)
        page_store.end_copy(Tier.HOST, sources)
        return num_free

    def _load(self, path: TokenPath, nodes: dict[int, Node], loads: list[_Load], pages: list[PageId]) -> None:
        """Begins `loads`, as many as there are pages. The loaded pages fill `pages` from the first on.

        `nodes` are those of the match by the number of their page; those that are added join them. Pages of windowed layer
        groups come after all others.
        """
        tree, rolling = self._page_store.tree, self._page_store.sizes.rolling_pages(path.scope.rolling)
        by_tier: dict[Tier, list[tuple[Node, PageId]]] = {Tier.HOST: [], Tier.DISK: []}
        for load, page in zip(loads, pages, strict=False):
            if load.group is not None:
                node = load.node or tree.add_window(nodes[load.index], load.group)
            else:
                apart = rolling is not None and load.index >= rolling.sink_pages
                parent = nodes.get((rolling.sink_pages if rolling is not None and apart else load.index) - 1)
                apart_at = load.index if apart else None
                node = load.node or tree.add_node(path.scope, parent, load.key, path.domain, apart_at)
                nodes[load.index] = node
            tree.add_copy(node, Tier.DEVICE, page)
            node.is_loading = True
            by_tier[load.tier].append((node, page))
        self._begin(TransferKind.LOAD, path.domain, by_tier[Tier.HOST])
        self._begin(TransferKind.FETCH, path.domain, by_tier[Tier.DISK])

    def _begin(self, kind: TransferKind, domain: Domain, placed: list[tuple[Node, PageId]]) -> None:
        if not placed:
            return
        nodes = tuple(node for node, _ in placed)
        moves = tuple(PageMove(node.key, node.host, page) for node, page in placed)
        plan = TransferPlan(kind, domain, moves, nodes)
        self._page_store.device.begin_copy([page for _, page in placed])
        self._page_store.host.begin_copy([move.source for move in moves if move.source is not None])
        for node in nodes:
            self._in_flight[node] = plan
        self._copies.begin(plan)


def _source(node: Node | None) -> Tier:
    """Returns the nearest tier that has a cached page. The tree has its node unless it is only on disk."""
    if node is None:
        return Tier.DISK
    return Tier.HOST if node.device is None else Tier.DEVICE


def _loads(match: PrefixMatch) -> list[_Load]:
    """Returns the loads of all cached pages that are not on the device, in the order of the prompt."""
    places = match.places()
    return [
        _Load(_source(node), node, index, key) for index, node, key in places if node is None or node.device is None
    ]
