"""Ranks the idle pages of a tier, and finds the page that the tier evicts next.

A page is idle if no request and no transfer uses it. EvictionQueue orders the idle pages of one tier, and counts the
pages of each domain (usually one tenant). EvictionPolicy (eviction_policy.py) computes the rank of each page. The page
with the lowest rank is evicted first.

Each domain has a reserve: this many of its pages cannot be evicted to make room for other domains. For this, a fixed
share of the tier's pages is divided equally among the domains. A page is never evicted while a page that follows it in
the prefix tree (a child) is on the tier.

The cost of an eviction does not grow with the number of domains. Invariant: no domain falls below its reserve because of
another domain.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Protocol

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.page_pool import PagePool
from graftwork.engine.kv.index.radix_tree import PUBLIC, Domain, Node

EvictionRank = tuple[int, float, int]
"""A page's class, its value within the class, and its time of last use. The lowest rank is evicted first."""

Ranking = Callable[[Node, Tier], EvictionRank]

_Entry = tuple[int, float, int, int, Node]
"""A rank, a number that no other entry has, and the node. It is flat, because many pages have one."""


class EvictionQueue:
    """Orders the evictable pages of one tier by domain (usually one tenant) and rank.

    After a page was queued, a request may use it again, or its rank may rise. So each page is checked again before the
    queue returns it.
    """

    def __init__(self, tier: Tier, pool: PagePool, ranking: Ranking, reserved_pages: int) -> None:
        """`reserved_pages` of the tier are divided equally among the domains that have pages there."""
        self.tier = tier
        self._pool = pool
        self._ranking = ranking
        self._reserved_pages = reserved_pages
        self._used: dict[Domain, int] = {}
        self._heaps: dict[Domain, list[_Entry]] = {}
        self._domain_heap: list[tuple[EvictionRank, int, Domain]] = []
        """Domains above their reserve, each with a lower bound of its lowest rank. May contain outdated bounds."""
        self._bounds: dict[Domain, EvictionRank] = {}
        """The bound of each domain in `_domain_heap` that is not outdated."""
        self._protected_domains: set[Domain] = set()
        """Domains that were at or below their reserve at the last check. These domains are not in `_domain_heap`."""
        self._numbers = count()

    def used_pages(self, domain: Domain) -> int:
        """Returns how many pages of `domain` (usually one tenant) the prefix tree holds on the tier of this queue."""
        return self._used.get(domain, 0)

    def reserve_pages(self) -> int:
        """Returns the reserve of each domain (usually one tenant) that has pages on this tier. All have the same
        reserve.

        The reserve is how many pages of a domain cannot be evicted to make room for other domains.
        """
        return self._reserved_pages // max(len(self._used), 1)

    def protected_pages(self) -> int:
        """Returns an upper bound of the cached pages on this tier that a domain (usually one tenant) cannot take from
        others.

        Counts the pages of each domain up to the domain's reserve. Also counts all public pages (shared by all
        tenants), because a reserved page may follow them in the prefix tree. A page cannot be evicted before the pages
        that follow it.
        """
        reserve = self.reserve_pages()
        return sum(used if domain == PUBLIC else min(used, reserve) for domain, used in self._used.items())

    def count_copy(self, node: Node, change: int) -> None:
        """Records that a node of the prefix tree has gained (+1) or lost (-1) its page on this tier."""
        domain, is_new = node.domain, node.domain not in self._used
        used = self._used.get(domain, 0) + change
        if used:
            self._used[domain] = used
            # A new domain makes every reserve smaller.
            self._recheck_protected(self._protected_domains if is_new else [domain])
        else:
            del self._used[domain]
            self._heaps.pop(domain, None)
            self._bounds.pop(domain, None)
            self._protected_domains.discard(domain)

    def add(self, node: Node) -> None:
        """Queues the page of `node` for eviction from this tier, if the page can be evicted.

        Call it when a page becomes idle, when a page has no child on this tier any more, and when a page's rank falls.
        """
        if self._is_evictable(node):
            heap = self._heaps.setdefault(node.domain, [])
            heapq.heappush(heap, self._entry(node))
            if len(heap) > 64 + 2 * self.used_pages(node.domain):
                self._rebuild(node.domain)
            self._enqueue(node.domain)

    # ---- victims ----------------------------------------------------------------------------------------------

    def victim_domain(self, domain: Domain | None) -> Domain | None:
        """Returns the domain (usually one tenant) that must lose a page to make room for `domain`.

        The result may be `domain` itself. Returns None if no page may be evicted. `domain` is None if an adapter needs
        room.
        """
        first = self._first_above_reserve()
        own = None if domain is None else self._lowest_entry(domain)
        if own is None or (first is not None and self._heaps[first][0][:4] < own[:4]):
            return first
        return domain

    def victim_domain_ignoring_reserves(self) -> Domain | None:
        """Returns the domain (usually one tenant) of the evictable page with the lowest rank on this tier.

        Ignores the reserves of domains. Returns None if no page can be evicted. O(number of domains).
        """
        tops = [(top[:4], one) for one in list(self._heaps) if (top := self._lowest_entry(one)) is not None]
        return min(tops)[1] if tops else None

    def lowest_rank(self, domain: Domain) -> EvictionRank:
        """Returns the lowest eviction rank of all queued pages of `domain` (usually one tenant).

        Call it only for a domain that `victim_domain` has just returned.
        """
        return self._heaps[domain][0][:3]

    def pop(self, domain: Domain) -> Node:
        """Removes the lowest-ranked page of `domain` (usually one tenant) from the queue, and returns the page's node.

        The caller must evict this page or add it to the queue again.
        """
        return heapq.heappop(self._heaps[domain])[4]

    def pop_or_none(self, domain: Domain) -> Node | None:
        """Removes the lowest-ranked page of `domain` (usually one tenant) from the queue, and returns the page's node.

        Returns None if the domain has no page that can be evicted.
        """
        return None if self._lowest_entry(domain) is None else self.pop(domain)

    def pop_of_largest(self, domains: Iterable[Domain]) -> Node | None:
        """Removes the lowest-ranked page of the domain with most pages, of those in `domains` that have one to evict.

        Returns the page's node, or None if no page of these domains can be evicted.
        """
        for domain in sorted(domains, key=lambda one: (-self.used_pages(one), one)):
            if (node := self.pop_or_none(domain)) is not None:
                return node
        return None

    def _first_above_reserve(self) -> Domain | None:
        reserve = self.reserve_pages()
        while self._domain_heap:
            bound, _, domain = self._domain_heap[0]
            if self._bounds.get(domain) != bound:
                heapq.heappop(self._domain_heap)  # outdated: a smaller bound was added later
                continue
            top = self._lowest_entry(domain) if self.used_pages(domain) > reserve else None
            if top is not None and top[:3] == bound:
                return domain
            heapq.heappop(self._domain_heap)
            del self._bounds[domain]
            if top is not None:
                self._enqueue(domain)
            elif self.used_pages(domain) <= reserve:
                self._protected_domains.add(domain)
        return None

    def _enqueue(self, domain: Domain) -> None:
        """Puts a domain into `_domain_heap`, or lowers the domain's bound to the rank of its first queued page."""
        heap = self._heaps.get(domain)
        if not heap or domain in self._protected_domains:
            return
        rank = heap[0][:3]
        if domain not in self._bounds or rank < self._bounds[domain]:
            self._bounds[domain] = rank
            heapq.heappush(self._domain_heap, (rank, next(self._numbers), domain))

    def _recheck_protected(self, domains: Iterable[Domain]) -> None:
        reserve = self.reserve_pages()
        for domain in [one for one in domains if one in self._protected_domains and self.used_pages(one) > reserve]:
            self._protected_domains.remove(domain)
            self._enqueue(domain)

    def _lowest_entry(self, domain: Domain) -> _Entry | None:
        """Returns the entry of a domain's lowest-ranked evictable page, and leaves it in the heap.

        Before that, removes entries of pages that are not evictable, and updates ranks that have risen.
        """
        heap = self._heaps.get(domain, [])
        while heap:
            first = heap[0]
            node = first[4]
            if not self._is_evictable(node):
                heapq.heappop(heap)
            elif self._ranking(node, self.tier) > first[:3]:
                heapq.heapreplace(heap, self._entry(node))
            else:
                return first
        return None

    def _entry(self, node: Node) -> _Entry:
        return (*self._ranking(node, self.tier), next(self._numbers), node)

    def _is_evictable(self, node: Node) -> bool:
        page = node.page(self.tier)
        return node.in_tree and page is not None and node.is_leaf_on(self.tier) and self._pool.is_idle(page)

    def _rebuild(self, domain: Domain) -> None:
        nodes = dict.fromkeys(entry[4] for entry in self._heaps[domain] if self._is_evictable(entry[4]))
        self._heaps[domain] = [self._entry(node) for node in nodes]
        heapq.heapify(self._heaps[domain])

    def check_integrity(self, nodes: list[Node]) -> None:
        """Checks the page count of each domain (usually one tenant), and that every evictable page is queued.

        `nodes` are all nodes of the prefix tree that have a page on this tier.
        """
        used: dict[Domain, int] = {}
        for node in nodes:
            used[node.domain] = used.get(node.domain, 0) + 1
            if self._is_evictable(node):
                assert any(entry[4] is node for entry in self._heaps.get(node.domain, [])), (
                    "an evictable page is not queued"
                )
        assert used == self._used, "pages of domains were counted wrongly"
        queued = {(bound, domain) for bound, _, domain in self._domain_heap}
        for domain in [one for one in list(self._heaps) if self.used_pages(one) > self.reserve_pages()]:
            top = self._lowest_entry(domain)
            if top is not None:
                bound = self._bounds.get(domain)
                assert bound is not None, "a domain above its reserve cannot be found"
                assert bound <= top[:3], "a domain is found too late"
                assert (bound, domain) in queued, "a domain is not in the queue"


class LeaseExpiryQueue:
    """Remembers when each lease ends, because the ranks of the leased pages fall at that time.

    A lease protects the pages of one path in the prefix tree: until it ends, pages without a lease are evicted first. A
    path is stored as its last node. A lease that has ended stays in the queue until `pop_expired` returns its path.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Node]] = []
        self._numbers = count()

    def add(self, until: float, last: Node) -> None:
        """Adds a lease, which protects the pages on the path from the root of the prefix tree to `last`.

        The lease ends at `until`, in seconds on the monotonic clock.
        """
        heapq.heappush(self._ends, (until, next(self._numbers), last))

    def pop_expired(self, now: float) -> Iterator[Node]:
        """Removes all leases (protections of pages for a limited time) that end at `now` or earlier.

        `now` is in seconds on the monotonic clock. Yields the last node of each path that these leases protected.
        """
        while self._ends and self._ends[0][0] <= now:
            yield heapq.heappop(self._ends)[2]

    def check_integrity(self) -> None:
        """Checks that the queue is ordered, so that the lease that ends first is returned first."""
        for index, entry in enumerate(self._ends):
            assert self._ends[(index - 1) // 2 if index else 0][:2] <= entry[:2], "a lease's end is found too late"


class Evictable(Protocol):
    """Something that can evict a page or an adapter to free memory: the KV cache or the adapter cache."""

    def next_rank(self) -> EvictionRank | None:
        """Returns the eviction rank of the page or adapter that `evict_next` would evict; None if nothing can be
        evicted.
        """
        ...

    def evict_next(self) -> None:
        """Evicts the page or adapter whose eviction rank the last call of `next_rank` returned."""
        ...


class FrameUser(Evictable, Protocol):
    """Another user of device memory besides the KV cache: the adapters.

    The memory is divided into frames. Each frame has the size of one KV page. Adapters are ranked for eviction together
    with the pages.
    """

    @property
    def evictable_pages(self) -> int:
        """How many pages of memory would become free if all adapters that can be evicted were evicted."""
        ...

    @property
    def claimed_pages(self) -> int:
        """How many pages of memory new requests must leave free, because adapters have waited too long for memory."""
        ...


class NoFrameUser:
    """Stands for the adapters on a tier that has only KV pages: it uses no memory and evicts nothing. Implements
    FrameUser.
    """

    evictable_pages = 0
    claimed_pages = 0

    def next_rank(self) -> EvictionRank | None:
        return None

    def evict_next(self) -> None:
        """Does nothing, because there is nothing to evict."""


def evict_one(candidates: Sequence[Evictable]) -> bool:
    """Evicts one page or one adapter: the one with the lowest eviction rank among all `candidates`.

    At a tie, the first of the candidates evicts. Returns False if no candidate can evict anything.
    """
    ranked = [
        (rank, place) for place, candidate in enumerate(candidates) if (rank := candidate.next_rank()) is not None
    ]
    if not ranked:
        return False
    candidates[min(ranked)[1]].evict_next()
    return True
