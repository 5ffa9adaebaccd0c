"""The KV pages of one tier, who holds them, and which are being copied.

PagePool alone hands pages out and takes them back.
A page is free (nobody holds it), in flight (a copy reads or writes it), lent (its frame is part of an adapter), or
owned (counted holders: running sequences, nodes of the prefix tree, transfers). An owned page that only the prefix tree
holds is idle: it can be dropped, so admission counts it as available. A page that loses its last holder in flight is
freed when it lands. Pages are handed out from the lowest number on, so that runs of free ones are found at the top.

    total = free + in flight + idle + active + lent

It never touches memory: what a page number means on a device is the runner's business.
"""

import heapq
from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graftwork.engine.core.tiers import PageId


class PagesExhausted(Exception):
    """More pages were taken than are free: the caller did not reserve or reclaim first."""


class Occupancy(NamedTuple):
    """By page number."""

    is_fixed: NDArray[np.bool_]  # [num_pages] lent, or under a copy: nothing may happen to it now
    is_held: NDArray[np.bool_]  # [num_pages] owned, and may be moved


class PagePool:
    """Counted pages `0 … num_pages - 1`; taking one is O(log n), everything else O(1) a page."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._queue = [PageId(page) for page in range(num_pages)]
        """A heap of all free pages, and of some that were lent or moved to since they were."""
        self._in_queue = [True] * num_pages
        self._holders = array("i", [0]) * num_pages
        self._num_copies = array("i", [0]) * num_pages
        self._in_tree = [False] * num_pages
        self._lent = bytearray(num_pages)
        self._num_free = num_pages
        self._num_lent = 0
        self._num_idle = 0
        self._num_in_flight = 0

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds and no copy touches."""
        return self._num_free

    @property
    def idle_pages(self) -> int:
        """Pages that the prefix tree alone holds, and no copy touches."""
        return self._num_idle

    @property
    def in_flight_pages(self) -> int:
        """Pages that a copy reads or writes, whoever holds them."""
        return self._num_in_flight

    @property
    def active_pages(self) -> int:
        """Pages that a sequence or a transfer holds, and no copy touches."""
        return self.num_pages - self._num_free - self._num_idle - self._num_in_flight - self._num_lent

    @property
    def lent_pages(self) -> int:
        """Pages whose frames are parts of adapters."""
        return self._num_lent

    @property
    def num_holders(self) -> int:
        """Holders of all pages together."""
        return sum(self._holders)

    def holders(self, page: PageId) -> int:
        return self._holders[page]

    def is_idle(self, page: PageId) -> bool:
        """Whether the prefix tree alone holds it and no copy touches it."""
        return self._in_tree[page] and self._holders[page] == 1 and self._num_copies[page] == 0

    def is_in_flight(self, page: PageId) -> bool:
        return self._num_copies[page] > 0

    def allocate(self, count: int) -> list[PageId]:
        """Hand out the lowest free pages, each with one holder. Raises PagesExhausted and takes none."""
        if count > self._num_free:
            raise PagesExhausted(f"{count} pages wanted, {self._num_free} free of {self.num_pages}")
        taken = [self._lowest_free() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        self._num_free -= count
        return taken

    def hold(self, pages: Iterable[PageId]) -> None:
        """Add one holder to each of some owned pages."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._num_idle -= self.is_idle(page)
            self._holders[page] += 1

    def release(self, pages: Iterable[PageId]) -> list[PageId]:
        """Take one holder from each page; the last one frees it. Returns those that only the tree holds now."""
        became_num_idle: list[PageId] = []
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was released twice"
            self._num_idle -= self.is_idle(page)
            self._holders[page] -= 1
            if self.is_idle(page):
                self._num_idle += 1
                became_num_idle.append(page)
            self._free_if_unused(page)
        return became_num_idle

    def enter_tree(self, page: PageId) -> None:
        """The prefix tree becomes one more holder of an owned page."""
        assert not self._in_tree[page], f"page {page} is in the tree already"
        self.hold([page])
        self._in_tree[page] = True

    def leave_tree(self, page: PageId) -> None:
        """The prefix tree lets go of a page; whoever else holds it keeps it."""
        assert self._in_tree[page], f"page {page} is not in the tree"
        self._num_idle -= self.is_idle(page)
        self._in_tree[page] = False
        self._holders[page] -= 1
        self._free_if_unused(page)

    def begin_copy(self, pages: Iterable[PageId]) -> None:
        """A copy begins to read or write owned pages: none of them is handed out again before it has landed."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be copied"
            self._num_idle -= self.is_idle(page)
            self._num_in_flight += self._num_copies[page] == 0
            self._num_copies[page] += 1

    def end_copy(self, pages: Iterable[PageId]) -> list[PageId]:
        """A copy's event has fired. Returns the pages that are idle now."""
        became_num_idle: list[PageId] = []
        for page in pages:
            assert self._num_copies[page] > 0, f"page {page} landed twice"
            self._num_copies[page] -= 1
            self._num_in_flight -= self._num_copies[page] == 0
            if self.is_idle(page):
                self._num_idle += 1
                became_num_idle.append(page)
            self._free_if_unused(page)
        return became_num_idle

    # ---- frames for adapters ----------------------------------------------------------------------------------

    def lend(self, pages: Iterable[PageId]) -> None:
        """Give free pages away whole: their frames become part of an adapter."""
        for page in pages:
            assert self._is_free(page), f"page {page} is not free and cannot be lent"
            self._lent[page] = True
            self._num_lent += 1
            self._num_free -= 1

    def reclaim(self, pages: Iterable[PageId]) -> None:
        """Lent pages are free again."""
        for page in pages:
            assert self._lent[page], f"page {page} was not lent"
            self._lent[page] = False
            self._num_lent -= 1
            self._set_free(page)

    def relocate(self, source: PageId, target: PageId) -> None:
        """A page's content has moved to a free one, which is held as it was; nothing may copy it meanwhile."""
        assert self._holders[source] > 0, f"page {source} is not held and cannot be moved"
        assert self._num_copies[source] == 0, f"page {source} is being copied and cannot be moved"
        assert self._is_free(target), f"page {target} is not free and cannot be moved to"
        self._holders[target], self._holders[source] = self._holders[source], 0
        self._in_tree[target], self._in_tree[source] = self._in_tree[source], False
        self._num_free -= 1
        self._set_free(source)

    def occupancy(self) -> Occupancy:
        """Where every page stands, for whoever looks for a run of them."""
        in_flight = np.frombuffer(self._num_copies, dtype=np.intc) > 0
        is_held = np.frombuffer(self._holders, dtype=np.intc) > 0
        return Occupancy(np.frombuffer(self._lent, dtype=np.bool_) | in_flight, is_held & ~in_flight)

    # ---- the free ones ----------------------------------------------------------------------------------------

    def _is_free(self, page: PageId) -> bool:
        return self._holders[page] == 0 and self._num_copies[page] == 0 and not self._lent[page]

    def _lowest_free(self) -> PageId:
        while True:
            page = heapq.heappop(self._queue)
            self._in_queue[page] = False
            if self._is_free(page):
                return page

    def _free_if_unused(self, page: PageId) -> None:
        if self._holders[page] == 0 and self._num_copies[page] == 0:
            self._set_free(page)

    def _set_free(self, page: PageId) -> None:
        self._num_free += 1
        if not self._in_queue[page]:
            heapq.heappush(self._queue, page)
            self._in_queue[page] = True

    def check_integrity(self) -> None:
        """Recount everything from scratch."""
        assert sorted(self._queue) == [page for page in range(self.num_pages) if self._in_queue[page]]
        free = idle = in_flight = 0
        for page in map(PageId, range(self.num_pages)):
            is_used = self._holders[page] > 0 or self._num_copies[page] > 0
            assert not (self._lent[page] and is_used), f"page {page} is lent, and held or copied"
            assert self._in_queue[page] or not self._is_free(page), f"page {page} is free and cannot be found"
            assert not (self._in_tree[page] and self._holders[page] == 0), f"page {page} is in the tree, unheld"
            free += self._is_free(page)
            idle += self.is_idle(page)
            in_flight += self._num_copies[page] > 0
        assert free == self._num_free, f"{self._num_free} free pages counted, {free} found"
        assert sum(self._lent) == self._num_lent, f"{self._num_lent} lent pages counted, {sum(self._lent)} found"
        assert idle == self._num_idle, f"{self._num_idle} idle pages counted, {idle} found"
        assert in_flight == self._num_in_flight, f"{self._num_in_flight} pages in flight counted, {in_flight} found"
