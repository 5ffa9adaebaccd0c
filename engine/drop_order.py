"""Which idle page of a tier is given up next, and at whose cost.

Each party is sure of a share of every tier: `reserve_share` of it, parted equally among those who are there. Room is
made from whoever holds more than that, and from the party that asks; nobody else's pages are touched. An adapter that
asks is nobody's party, and what it may have at most leaves all reserves whole (see KvSizes).
Among the pages that may go, the lowest rank goes first (see Retention); only the last pages of a path can.

Invariant: what another party keeps is never below its reserve because of this one.
"""

import heapq
from collections.abc import Callable, Iterable
from itertools import count

from graftwork.engine.pages import PagePool
from graftwork.engine.prefix_tree import PUBLIC, Node, Owner
from graftwork.engine.tier_names import Tier

Rank = tuple[int, float, int]
"""Class, value within it, and when it was last used."""
Ranking = Callable[[Node, Tier], Rank]
_Entry = tuple[Rank, int, Node]


class DropOrder:
    """The pages of one tier that could go, by party and rank. Entries may be stale: they are checked when taken."""

    def __init__(self, tier: Tier, pool: PagePool, ranking: Ranking, reserved_pages: int) -> None:
        """`reserved_pages` of the tier are parted equally among the parties that have pages there."""
        self.tier = tier
        self._pool = pool
        self._ranking = ranking
        self._reserved_pages = reserved_pages
        self._used: dict[Owner, int] = {}
        self._heaps: dict[Owner, list[_Entry]] = {}
        self._numbers = count()

    def used_pages(self, owner: Owner) -> int:
        """Pages of this party that the tree holds on this tier."""
        return self._used.get(owner, 0)

    def reserve_pages(self) -> int:
        """Pages that each party which is here keeps for sure."""
        return self._reserved_pages // max(len(self._used), 1)

    def sheltered_pages(self) -> int:
        """Pages that may have to stay whoever else needs room: up to its reserve of each party, and all that is public,
        since others' pages may hang on it."""
        reserve = self.reserve_pages()
        return sum(used if owner == PUBLIC else min(used, reserve) for owner, used in self._used.items())

    def count_copy(self, node: Node, change: int) -> None:
        """The tree has gained or lost a copy on this tier."""
        used = self._used.get(node.owner, 0) + change
        if used:
            self._used[node.owner] = used
        else:
            del self._used[node.owner]
            self._heaps.pop(node.owner, None)

    def offer(self, node: Node) -> None:
        """Consider a page whose state has changed: it became idle, the last of its path, or less worth keeping."""
        if self._may_go(node):
            heap = self._heaps.setdefault(node.owner, [])
            heapq.heappush(heap, (self._ranking(node, self.tier), next(self._numbers), node))
            if len(heap) > 64 + 4 * self.used_pages(node.owner):
                self._rebuild(node.owner)

    def parties_for(self, owner: Owner | None) -> list[Owner]:
        """Who gives way to `owner`, or to an adapter."""
        reserve = self.reserve_pages()
        return [one for one in self._heaps if one == owner or self.used_pages(one) > reserve]

    def parties(self) -> list[Owner]:
        """Everyone who may have something to give."""
        return list(self._heaps)

    def lowest_rank(self, parties: Iterable[Owner]) -> Rank | None:
        """The rank of the page that goes first of these parties'; None if they have none to give."""
        lowest = self._lowest(parties)
        return None if lowest is None else self._heaps[lowest][0][0]

    def next_among(self, parties: Iterable[Owner]) -> Node | None:
        """The page that goes first of these parties'; it must be dropped, or offered again."""
        lowest = self._lowest(parties)
        return None if lowest is None else heapq.heappop(self._heaps[lowest])[2]

    def _lowest(self, parties: Iterable[Owner]) -> Owner | None:
        tops = [(top[0], top[1], one) for one in parties if (top := self._top(one)) is not None]
        return min(tops)[2] if tops else None

    def next_of(self, owner: Owner) -> Node | None:
        """The page that goes when a party must give up one of its own."""
        return self.next_among([owner])

    def _top(self, owner: Owner) -> _Entry | None:
        """The first entry of a heap that is true now, left in place."""
        heap = self._heaps.get(owner, [])
        while heap:
            rank, _, node = heap[0]
            if not self._may_go(node):
                heapq.heappop(heap)
            elif (now := self._ranking(node, self.tier)) > rank:
                heapq.heapreplace(heap, (now, next(self._numbers), node))
            else:
                return heap[0]
        return None

    def _may_go(self, node: Node) -> bool:
        page = node.page(self.tier)
        return node.in_tree and page is not None and node.is_edge_of(self.tier) and self._pool.is_idle(page)

    def _rebuild(self, owner: Owner) -> None:
        nodes = dict.fromkeys(node for _, _, node in self._heaps[owner] if self._may_go(node))
        self._heaps[owner] = [(self._ranking(node, self.tier), next(self._numbers), node) for node in nodes]
        heapq.heapify(self._heaps[owner])

    def check_integrity(self, nodes: list[Node]) -> None:
        """Every page that may go can be found, given all nodes that have a copy here."""
        used: dict[Owner, int] = {}
        for node in nodes:
            used[node.owner] = used.get(node.owner, 0) + 1
            if self._may_go(node):
                assert any(entry[2] is node for entry in self._heaps.get(node.owner, [])), "a page cannot be dropped"
        assert used == self._used, "pages of parties were counted wrongly"
