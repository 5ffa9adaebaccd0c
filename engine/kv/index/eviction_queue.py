"""Ranks the idle pages of a tier, and finds the idle page that the tier evicts next.

EvictionQueue owns the order of the idle pages of one tier, and counts the pages of each domain. EvictionPolicy gives
each page its rank and changes nothing. The page with the lowest rank is evicted first. On the device the classes of
pages are evicted in this order:

    REDUNDANT    no session's history contains the page, and a lower tier has a copy
    SUPERSEDED   sessions used the page, but their histories no longer contain it
    LAPSED       a session's history contains the page, no lease protects it, and a lower tier has a copy
    VALUED       all other pages, by expected loss: probability of reuse × seconds to bring the page back

On the host the classes are the same, and the lower tier is the disk. All pages have the same size, so a rank is not
divided by bytes. A lease raises a page's rank and never makes an allocation fail.

Each domain has a reserve: an equal part of `reserve_share` of the tier. A page may be evicted if its domain holds
more than its reserve, or if its domain needs the room itself. An adapter that needs frames belongs to no domain.
KvSizes limits adapters so that all reserves fit. A page that has a child on the tier is never evicted.

A heap sorts domains by a lower bound of their lowest rank. A bound is raised only when it is read. So the cost of an
eviction does not grow with the number of domains.

Invariant: no domain falls below its reserve because of another domain.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Protocol

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.index.page_pool import PagePool
from graftwork.engine.kv.index.radix_tree import PUBLIC, Domain, Node
from graftwork.platform.clock import Clock

EvictionRank = tuple[int, float, int]
"""A page's class, its value within the class, and its time of last use. The lowest rank is evicted first."""


Ranking = Callable[[Node, Tier], EvictionRank]


_Entry = tuple[EvictionRank, int, Node]


class EvictionQueue:
    """Owns the order of the evictable pages of one tier, by domain and rank.

    A queued page may have changed since it was added: it is in use again, or its rank has risen. So each page is
    checked when the queue returns it.
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
        """Returns how many of the tier's pages the tree holds for a domain."""
        return self._used.get(domain, 0)

    def reserve_pages(self) -> int:
        """Returns the reserve of each domain that has pages: how many pages other domains cannot evict."""
        return self._reserved_pages // max(len(self._used), 1)

    def protected_pages(self) -> int:
        """Returns the most pages that evictions for other domains may be unable to free.

        These are each domain's pages up to its reserve, and all public pages, because other pages may depend on them.
        """
        reserve = self.reserve_pages()
        return sum(used if domain == PUBLIC else min(used, reserve) for domain, used in self._used.items())

    def count_copy(self, node: Node, change: int) -> None:
        """Records that the tree has gained (+1) or lost (-1) a copy on this tier."""
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
        """Queues a page if it is evictable. Call it when a page becomes idle or a leaf, and when its rank falls."""
        if self._is_evictable(node):
            heap = self._heaps.setdefault(node.domain, [])
            heapq.heappush(heap, (self._ranking(node, self.tier), next(self._numbers), node))
            if len(heap) > 64 + 4 * self.used_pages(node.domain):
                self._rebuild(node.domain)
            self._enqueue(node.domain)

    # ---- victims ----------------------------------------------------------------------------------------------

    def victim_domain(self, domain: Domain | None) -> Domain | None:
        """Returns the domain whose page is evicted for `domain`; None if no page may be evicted.

        `domain` is None if an adapter needs the room.
        """
        first = self._first_above_reserve()
        own = None if domain is None else self._lowest_entry(domain)
        if own is None or (first is not None and self._heaps[first][0][:2] < own[:2]):
            return first
        return domain

    def victim_domain_ignoring_reserves(self) -> Domain | None:
        """Returns the domain of the lowest-ranked idle page; None if no page is idle. O(number of domains)."""
        tops = [(top[0], top[1], one) for one in list(self._heaps) if (top := self._lowest_entry(one)) is not None]
        return min(tops)[2] if tops else None

    def lowest_rank(self, domain: Domain) -> EvictionRank:
        """Returns the lowest rank of a domain's pages. Call it only for a domain that `victim_domain` returned."""
        return self._heaps[domain][0][0]

    def pop(self, domain: Domain) -> Node:
        """Removes and returns the page with the rank that `lowest_rank` returns.

        The caller must evict it or add it again.
        """
        return heapq.heappop(self._heaps[domain])[2]

    def pop_or_none(self, domain: Domain) -> Node | None:
        """Removes and returns the first page of a domain; None if it has no evictable page."""
        return None if self._lowest_entry(domain) is None else self.pop(domain)

    def _first_above_reserve(self) -> Domain | None:
        reserve = self.reserve_pages()
        while self._domain_heap:
            bound, _, domain = self._domain_heap[0]
            if self._bounds.get(domain) != bound:
                heapq.heappop(self._domain_heap)  # outdated: a smaller bound was added later
                continue
            top = self._lowest_entry(domain) if self.used_pages(domain) > reserve else None
            if top is not None and top[0] == bound:
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
        rank = heap[0][0]
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
            rank, _, node = heap[0]
            if not self._is_evictable(node):
                heapq.heappop(heap)
            elif (now := self._ranking(node, self.tier)) > rank:
                heapq.heapreplace(heap, (now, next(self._numbers), node))
            else:
                return heap[0]
        return None

    def _is_evictable(self, node: Node) -> bool:
        page = node.page(self.tier)
        return node.in_tree and page is not None and node.is_leaf_on(self.tier) and self._pool.is_idle(page)

    def _rebuild(self, domain: Domain) -> None:
        nodes = dict.fromkeys(node for _, _, node in self._heaps[domain] if self._is_evictable(node))
        self._heaps[domain] = [(self._ranking(node, self.tier), next(self._numbers), node) for node in nodes]
        heapq.heapify(self._heaps[domain])

    def check_integrity(self, nodes: list[Node]) -> None:
        """Checks the counts, and that every evictable page is queued. `nodes` are all nodes with a copy on the tier."""
        used: dict[Domain, int] = {}
        for node in nodes:
            used[node.domain] = used.get(node.domain, 0) + 1
            if self._is_evictable(node):
                assert any(entry[2] is node for entry in self._heaps.get(node.domain, [])), (
                    "an evictable page is not queued"
                )
        assert used == self._used, "pages of domains were counted wrongly"
        queued = {(bound, domain) for bound, _, domain in self._domain_heap}
        for domain in [one for one in list(self._heaps) if self.used_pages(one) > self.reserve_pages()]:
            top = self._lowest_entry(domain)
            if top is not None:
                bound = self._bounds.get(domain)
                assert bound is not None, "a domain above its reserve cannot be found"
                assert bound <= top[0], "a domain is found too late"
                assert (bound, domain) in queued, "a domain is not in the queue"


class LeaseExpiryQueue:
    """Remembers when each lease ends, so that the rank of the leased pages is lowered then.

    A path is stored as its last node. An ended lease stays in the queue until `pop_expired` returns its path.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Node]] = []
        self._numbers = count()

    def add(self, until: float, last: Node) -> None:
        """Adds a lease on a path. The lease ends at `until`, in seconds on the monotonic clock. `last` is the path's
        last node.
        """
        heapq.heappush(self._ends, (until, next(self._numbers), last))

    def pop_expired(self, now: float) -> Iterator[Node]:
        """Removes all leases that have ended by `now`. Yields the last node of each path."""
        while self._ends and self._ends[0][0] <= now:
            yield heapq.heappop(self._ends)[2]

    def check_integrity(self) -> None:
        """Checks that the earliest end is found first."""
        for index, entry in enumerate(self._ends):
            assert self._ends[(index - 1) // 2 if index else 0][:2] <= entry[:2], "a lease's end is found too late"


class Evictable(Protocol):
    """A user of memory that can free it in parts: one page, or one adapter."""

    def next_rank(self) -> EvictionRank | None:
        """Returns the rank of the page or adapter that `evict_next` would evict; None if nothing can be evicted."""
        ...

    def evict_next(self) -> None:
        """Evicts the page or adapter whose rank the last `next_rank` returned."""
        ...


class FrameUser(Evictable, Protocol):
    """The user of device frames besides KV pages: the adapters. A frame is the memory of one page. Adapters are ranked
    for eviction together with the pages.
    """

    @property
    def evictable_pages(self) -> int:
        """How many pages would become free if as many adapters as possible were evicted."""
        ...

    @property
    def claimed_pages(self) -> int:
        """How many pages no new request may take, because adapters have waited too long for them."""
        ...


class NoFrameUser:
    """Stands for the adapters on a tier that holds only KV pages. It uses no frames and has nothing to evict."""

    evictable_pages = 0
    claimed_pages = 0

    def next_rank(self) -> EvictionRank | None:
        return None

    def evict_next(self) -> None:
        """Does nothing, because there is nothing to evict."""


def evict_one(candidates: Sequence[Evictable]) -> bool:
    """Evicts the page or adapter with the lowest rank among all candidates. At a tie, the first candidate evicts.

    Returns False if no candidate can evict anything.
    """
    ranked = [
        (rank, place) for place, candidate in enumerate(candidates) if (rank := candidate.next_rank()) is not None
    ]
    if not ranked:
        return False
    candidates[min(ranked)[1]].evict_next()
    return True


_REUSE_WITHOUT_LEASE = 0.1
"""The assumed probability that a page without a lease is used again. It is needed only to compare such pages with
leased ones.
"""


class EvictionClass(IntEnum):
    """The classes in which pages are evicted; see the table in the module docstring.

    The lowest class is evicted first.
    """

    REDUNDANT = 0
    SUPERSEDED = 1
    LAPSED = 2
    VALUED = 3


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """Ranks pages from the state of the tree, the sessions, the disk and the clock."""

    clock: Clock
    costs: CostTracker
    page_tokens: int
    is_in_history: Callable[[PageKey], bool]
    """Returns whether the history of some session contains a page."""
    is_on_disk: Callable[[PageKey], bool]
    is_in_use: Callable[[Node], bool]
    """Returns whether a running request holds a page. Such a page is not superseded, even if no history contains it."""

    def rank(self, node: Node, tier: Tier) -> EvictionRank:
        """Returns a page's rank among the pages of a tier."""
        eviction_class = self.eviction_class(node, tier)
        value = self._value(node, tier) if eviction_class is EvictionClass.VALUED else 0.0
        return eviction_class, value, node.last_used

    def eviction_class(self, node: Node, tier: Tier) -> EvictionClass:
        """Returns the eviction class of a page; see the table in the module docstring."""
        if not node.outlives_sessions and not self.is_in_history(node.key) and not self.is_in_use(node):
            return EvictionClass.SUPERSEDED
        if not self.has_copy_below(node, tier):
            return EvictionClass.VALUED
        if node.outlives_sessions and not self.is_in_history(node.key):
            return EvictionClass.REDUNDANT
        return EvictionClass.VALUED if tier is Tier.DEVICE and self._is_leased(node) else EvictionClass.LAPSED

    def has_copy_below(self, node: Node, tier: Tier) -> bool:
        """Returns whether a lower tier has a copy, so that eviction loses nothing."""
        return (tier is Tier.DEVICE and node.host is not None) or self.is_on_disk(node.key)

    def _value(self, node: Node, tier: Tier) -> float:
        lease = node.lease
        probability = lease.return_probability if lease is not None and self._is_leased(node) else _REUSE_WITHOUT_LEASE
        cost = self.costs.cost
        if self.has_copy_below(node, tier):
            on_host = tier is Tier.DEVICE and node.host is not None
            return probability * cost.of_tier(Tier.HOST if on_host else Tier.DISK).page_s
        return probability * cost.prefill.seconds(self.page_tokens, node.depth * self.page_tokens)

    def _is_leased(self, node: Node) -> bool:
        return node.lease is not None and node.lease.until > self.clock.monotonic()
