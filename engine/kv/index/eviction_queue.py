"""Which idle page of a tier is given up next, and at whose cost.

Each party is sure of a share of every tier: `reserve_share` of it, parted equally among those who are there. Room is
made from whoever holds more than that, and from the party that asks; nobody else's pages are touched. An adapter that
asks is nobody's party, and what it may have at most leaves all reserves whole (see KvSizes).
Among the pages that may go, the lowest rank goes first (see Retention); only the last pages of a path can.

To find it, the parties stand in a queue by bounds that are raised only when they are met: what a page costs does not
grow with the number of parties.

Invariant: what another party keeps is never below its reserve because of this one.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Protocol

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.page_pool import PagePool
from graftwork.engine.kv.index.radix_tree import PUBLIC, Node, Owner

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
        self._queue: list[tuple[Rank, int, Owner]] = []
        """Parties above their reserve, each by a rank that none of its pages is below; entries may be stale."""
        self._bounds: dict[Owner, Rank] = {}
        """The rank by which each of them is found in the queue."""
        self._sheltered: set[Owner] = set()
        """Parties that were found at or below their reserve, and left out since."""
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
        owner, is_new = node.owner, node.owner not in self._used
        used = self._used.get(owner, 0) + change
        if used:
            self._used[owner] = used
            self._reconsider_shelter(self._sheltered if is_new else [owner])  # one party more, and reserves are smaller
        else:
            del self._used[owner]
            self._heaps.pop(owner, None)
            self._bounds.pop(owner, None)
            self._sheltered.discard(owner)

    def offer(self, node: Node) -> None:
        """Consider a page whose state has changed: it became idle, the last of its path, or less worth keeping."""
        if self._may_go(node):
            heap = self._heaps.setdefault(node.owner, [])
            heapq.heappush(heap, (self._ranking(node, self.tier), next(self._numbers), node))
            if len(heap) > 64 + 4 * self.used_pages(node.owner):
                self._rebuild(node.owner)
            self._queue_up(node.owner)

    # ---- who gives --------------------------------------------------------------------------------------------

    def giver_for(self, owner: Owner | None) -> Owner | None:
        """The party whose page goes first to make room for `owner`, or for an adapter; None if there is none to give."""
        first = self._first_above_reserve()
        own = None if owner is None else self._top(owner)
        if own is None or (first is not None and self._heaps[first][0][:2] < own[:2]):
            return first
        return owner

    def giver_of_all(self) -> Owner | None:
        """The same, with no regard for reserves. Looks at every party."""
        tops = [(top[0], top[1], one) for one in list(self._heaps) if (top := self._top(one)) is not None]
        return min(tops)[2] if tops else None

    def rank_of(self, giver: Owner) -> Rank:
        """Of the page that goes first of a party that has one to give."""
        return self._heaps[giver][0][0]

    def pop(self, giver: Owner) -> Node:
        """That page; it must be dropped, or offered again."""
        return heapq.heappop(self._heaps[giver])[2]

    def next_of(self, owner: Owner) -> Node | None:
        """The page that goes when a party must give up one of its own."""
        return None if self._top(owner) is None else self.pop(owner)

    def _first_above_reserve(self) -> Owner | None:
        reserve = self.reserve_pages()
        while self._queue:
            bound, _, owner = self._queue[0]
            if self._bounds.get(owner) != bound:
                heapq.heappop(self._queue)  # it was offered something lower since
                continue
            top = self._top(owner) if self.used_pages(owner) > reserve else None
            if top is not None and top[0] == bound:
                return owner
            heapq.heappop(self._queue)
            del self._bounds[owner]
            if top is not None:
                self._queue_up(owner)
            elif self.used_pages(owner) <= reserve:
                self._sheltered.add(owner)
        return None

    def _queue_up(self, owner: Owner) -> None:
        """See that the queue knows of a party no later than by its first entry."""
        heap = self._heaps.get(owner)
        if not heap or owner in self._sheltered:
            return
        rank = heap[0][0]
        if owner not in self._bounds or rank < self._bounds[owner]:
            self._bounds[owner] = rank
            heapq.heappush(self._queue, (rank, next(self._numbers), owner))

    def _reconsider_shelter(self, owners: Iterable[Owner]) -> None:
        reserve = self.reserve_pages()
        for owner in [one for one in owners if one in self._sheltered and self.used_pages(one) > reserve]:
            self._sheltered.remove(owner)
            self._queue_up(owner)

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
        queued = {(bound, owner) for bound, _, owner in self._queue}
        for owner in [one for one in list(self._heaps) if self.used_pages(one) > self.reserve_pages()]:
            top = self._top(owner)
            if top is not None:
                bound = self._bounds.get(owner)
                assert bound is not None, "a party above its reserve cannot be found"
                assert bound <= top[0], "a party is found too late"
                assert (bound, owner) in queued, "a party is not in the queue"


class Giver(Protocol):
    """Holds something that it could do without."""

    def rank(self) -> Rank | None:
        """Of what it would give next; None if it has nothing to give."""
        ...

    def give(self) -> None:
        """Give up what `rank` has just spoken of."""
        ...


class Lodger(Giver, Protocol):
    """Lives in the frames of a tier beside its pages, and gives way like them."""

    @property
    def spare_pages(self) -> int:
        """Pages that would be free once it had given all it can."""
        ...

    @property
    def claimed_pages(self) -> int:
        """Pages that it has waited for so long that nobody new is let in at their cost."""
        ...


class NoLodger:
    """A tier of pages alone."""

    spare_pages = 0
    claimed_pages = 0

    def rank(self) -> Rank | None:
        return None

    def give(self) -> None:
        """There is nothing to give."""


def give_way(givers: Sequence[Giver]) -> bool:
    """The lowest of what all of them would give goes, the first named at a tie; False if nobody has anything."""
    ranked = [(rank, place) for place, giver in enumerate(givers) if (rank := giver.rank()) is not None]
    if not ranked:
        return False
    givers[min(ranked)[1]].give()
    return True
