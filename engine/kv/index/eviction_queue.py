"""Which idle page of a tier is given up next, and at whose cost.

Each domain is sure of a share of every tier: `reserve_share` of it, parted equally among those who are there. Room is
made from whoever holds more than that, and from the domain that asks; nobody else's pages are touched. An adapter that
asks is nobody's domain, and what it may have at most leaves all reserves whole (see KvSizes).
Among the pages that may go, the lowest rank goes first (see EvictionPolicy); only the last pages of a path can.

To find it, the domains stand in a queue by bounds that are raised only when they are met: what a page costs does not
grow with the number of domains.

Invariant: what another domain keeps is never below its reserve because of this one.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Protocol

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.page_pool import PagePool
from graftwork.engine.kv.index.radix_tree import PUBLIC, Domain, Node

EvictionRank = tuple[int, float, int]
"""Class, value within it, and when it was last used."""


Ranking = Callable[[Node, Tier], EvictionRank]


_Entry = tuple[EvictionRank, int, Node]


class EvictionQueue:
    """The pages of one tier that could go, by domain and rank. Entries may be stale: they are checked when taken."""

    def __init__(self, tier: Tier, pool: PagePool, ranking: Ranking, reserved_pages: int) -> None:
        """`reserved_pages` of the tier are parted equally among the domains that have pages there."""
        self.tier = tier
        self._pool = pool
        self._ranking = ranking
        self._reserved_pages = reserved_pages
        self._used: dict[Domain, int] = {}
        self._heaps: dict[Domain, list[_Entry]] = {}
        self._queue: list[tuple[EvictionRank, int, Domain]] = []
        """Parties above their reserve, each by a rank that none of its pages is below; entries may be stale."""
        self._bounds: dict[Domain, EvictionRank] = {}
        """The rank by which each of them is found in the queue."""
        self._protected: set[Domain] = set()
        """Parties that were found at or below their reserve, and left out since."""
        self._numbers = count()

    def used_pages(self, domain: Domain) -> int:
        """Pages of this domain that the tree holds on this tier."""
        return self._used.get(domain, 0)

    def reserve_pages(self) -> int:
        """Pages that each domain which is here keeps for sure."""
        return self._reserved_pages // max(len(self._used), 1)

    def protected_pages(self) -> int:
        """Pages that may have to stay whoever else needs room: up to its reserve of each domain, and all that is public,
        since others' pages may hang on it."""
        reserve = self.reserve_pages()
        return sum(used if domain == PUBLIC else min(used, reserve) for domain, used in self._used.items())

    def count_copy(self, node: Node, change: int) -> None:
        """The tree has gained or lost a copy on this tier."""
        domain, is_new = node.domain, node.domain not in self._used
        used = self._used.get(domain, 0) + change
        if used:
            self._used[domain] = used
            self._recheck_protected(
                self._protected if is_new else [domain]
            )  # one domain more, and reserves are smaller
        else:
            del self._used[domain]
            self._heaps.pop(domain, None)
            self._bounds.pop(domain, None)
            self._protected.discard(domain)

    def add(self, node: Node) -> None:
        """Consider a page whose state has changed: it became idle, the last of its path, or less worth keeping."""
        if self._is_evictable(node):
            heap = self._heaps.setdefault(node.domain, [])
            heapq.heappush(heap, (self._ranking(node, self.tier), next(self._numbers), node))
            if len(heap) > 64 + 4 * self.used_pages(node.domain):
                self._rebuild(node.domain)
            self._enqueue(node.domain)

    # ---- who gives --------------------------------------------------------------------------------------------

    def victim_domain(self, domain: Domain | None) -> Domain | None:
        """The domain whose page goes first to make room for `domain`, or for an adapter; None if there is none to give."""
        first = self._first_above_reserve()
        own = None if domain is None else self._top(domain)
        if own is None or (first is not None and self._heaps[first][0][:2] < own[:2]):
            return first
        return domain

    def victim_domain_ignoring_reserves(self) -> Domain | None:
        """The same, with no regard for reserves. Looks at every domain."""
        tops = [(top[0], top[1], one) for one in list(self._heaps) if (top := self._top(one)) is not None]
        return min(tops)[2] if tops else None

    def lowest_rank(self, domain: Domain) -> EvictionRank:
        """Of the page that goes first of a domain that has one to give."""
        return self._heaps[domain][0][0]

    def pop(self, domain: Domain) -> Node:
        """That page; it must be dropped, or offered again."""
        return heapq.heappop(self._heaps[domain])[2]

    def pop_or_none(self, domain: Domain) -> Node | None:
        """The page that goes when a domain must give up one of its own."""
        return None if self._top(domain) is None else self.pop(domain)

    def _first_above_reserve(self) -> Domain | None:
        reserve = self.reserve_pages()
        while self._queue:
            bound, _, domain = self._queue[0]
            if self._bounds.get(domain) != bound:
                heapq.heappop(self._queue)  # it was offered something lower since
                continue
            top = self._top(domain) if self.used_pages(domain) > reserve else None
            if top is not None and top[0] == bound:
                return domain
            heapq.heappop(self._queue)
            del self._bounds[domain]
            if top is not None:
                self._enqueue(domain)
            elif self.used_pages(domain) <= reserve:
                self._protected.add(domain)
        return None

    def _enqueue(self, domain: Domain) -> None:
        """See that the queue knows of a domain no later than by its first entry."""
        heap = self._heaps.get(domain)
        if not heap or domain in self._protected:
            return
        rank = heap[0][0]
        if domain not in self._bounds or rank < self._bounds[domain]:
            self._bounds[domain] = rank
            heapq.heappush(self._queue, (rank, next(self._numbers), domain))

    def _recheck_protected(self, domains: Iterable[Domain]) -> None:
        reserve = self.reserve_pages()
        for domain in [one for one in domains if one in self._protected and self.used_pages(one) > reserve]:
            self._protected.remove(domain)
            self._enqueue(domain)

    def _top(self, domain: Domain) -> _Entry | None:
        """The first entry of a heap that is true now, left in place."""
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
        """Every page that may go can be found, given all nodes that have a copy here."""
        used: dict[Domain, int] = {}
        for node in nodes:
            used[node.domain] = used.get(node.domain, 0) + 1
            if self._is_evictable(node):
                assert any(entry[2] is node for entry in self._heaps.get(node.domain, [])), "a page cannot be dropped"
        assert used == self._used, "pages of domains were counted wrongly"
        queued = {(bound, domain) for bound, _, domain in self._queue}
        for domain in [one for one in list(self._heaps) if self.used_pages(one) > self.reserve_pages()]:
            top = self._top(domain)
            if top is not None:
                bound = self._bounds.get(domain)
                assert bound is not None, "a domain above its reserve cannot be found"
                assert bound <= top[0], "a domain is found too late"
                assert (bound, domain) in queued, "a domain is not in the queue"


class Evictable(Protocol):
    """Holds something that it could do without."""

    def next_rank(self) -> EvictionRank | None:
        """Of what it would give next; None if it has nothing to give."""
        ...

    def evict_next(self) -> None:
        """Give up what `rank` has just spoken of."""
        ...


class FrameUser(Evictable, Protocol):
    """Lives in the frames of a tier beside its pages, and gives way like them."""

    @property
    def evictable_pages(self) -> int:
        """Pages that would be free once it had given all it can."""
        ...

    @property
    def claimed_pages(self) -> int:
        """Pages that it has waited for so long that nobody new is let in at their cost."""
        ...


class NoFrameUser:
    """A tier of pages alone."""

    evictable_pages = 0
    claimed_pages = 0

    def next_rank(self) -> EvictionRank | None:
        return None

    def evict_next(self) -> None:
        """There is nothing to give."""


def evict_one(candidates: Sequence[Evictable]) -> bool:
    """The lowest of what all of them would give goes, the first named at a tie; False if nobody has anything."""
    ranked = [(rank, place) for place, domain in enumerate(candidates) if (rank := domain.next_rank()) is not None]
    if not ranked:
        return False
    candidates[min(ranked)[1]].evict_next()
    return True
