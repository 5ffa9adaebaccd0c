"""Allocates the KV pages of one tier, and counts the holders of each page.

A holder is a user that keeps the page allocated: a request, a transfer or the prefix tree. PagePool owns the state of
every page number. It never reads or writes memory: the code in kv/transfer maps page numbers to memory.

A page is in one of these states:

    free       the page has no holder, and no copy uses it
    in flight  a copy reads or writes the page
    idle       only the prefix tree holds the page, so it can be evicted; admission counts it as available
    active     a request or a transfer holds the page
    lent       the device memory of the page is part of an adapter

If a page loses its last holder while it is in flight, it becomes free when the copy ends. Allocation takes the lowest
page numbers first. So free pages with high numbers are often consecutive.

Invariant: total = free + in flight + idle + active + lent.
"""

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graftwork.engine.core.tiers import PageId

_BLOCK_PAGES = 4096
"""The free page with the lowest number is searched first among blocks of so many pages, then in its block."""


class PagesExhausted(Exception):
    """More pages were requested than are free. The caller must free pages first."""


class Occupancy(NamedTuple):
    """Tells for each page whether it must stay in its place in memory, and whether it contains KV that may be moved."""

    is_fixed: NDArray[np.bool_]  # [num_pages] lent or in flight: must stay where it is
    is_held: NDArray[np.bool_]  # [num_pages] has a holder and may be moved


class PagePool:
    """Owns the state of the pages `0 … num_pages - 1` of one tier, in 11 bytes a page.

    Allocating a page searches some kilobytes, whatever the number of pages. Everything else is O(1) per page.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = bytearray(b"\1") * num_pages
        """1 for each free page, else 0."""
        self._free_blocks = bytearray(b"\1") * -(-num_pages // _BLOCK_PAGES)
        """1 for each block of `_BLOCK_PAGES` pages that has a free page, and for some that have none."""
        self._holders = array("i", [0]) * num_pages
        self._num_copies = array("i", [0]) * num_pages
        self._in_tree = bytearray(num_pages)
        self._lent = bytearray(num_pages)
        self._num_free = num_pages
        self._num_lent = 0
        self._num_idle = 0
        self._num_in_flight = 0
        self.on_taken: Callable[[int], None] = lambda page: None
        """A callback that gets the highest number of the pages that were allocated together."""

    @property
    def free_pages(self) -> int:
        """The number of free pages: nothing holds them, and no copy reads or writes them."""
        return self._num_free

    @property
    def idle_pages(self) -> int:
        """The number of pages that only the prefix tree holds and that no copy reads or writes. They can be evicted."""
        return self._num_idle

    @property
    def in_flight_pages(self) -> int:
        """The number of pages that a copy reads or writes now, even if nothing else uses them any more."""
        return self._num_in_flight

    @property
    def active_pages(self) -> int:
        """The number of pages that a request or a transfer holds and that no copy reads or writes now."""
        return self.num_pages - self._num_free - self._num_idle - self._num_in_flight - self._num_lent

    @property
    def lent_pages(self) -> int:
        """The number of lent pages. The device memory of a lent page is part of an adapter."""
        return self._num_lent

    @property
    def num_holders(self) -> int:
        """The number of holders of each page, summed over all pages. A holder keeps a page allocated."""
        return sum(self._holders)

    def holders(self, page: PageId) -> int:
        return self._holders[page]

    def is_cached(self, page: PageId) -> bool:
        """Returns whether the prefix tree holds the page."""
        return bool(self._in_tree[page])

    def is_idle(self, page: PageId) -> bool:
        """Returns whether only the prefix tree holds the page and no copy uses it."""
        return self._holders[page] == 1 and self._num_copies[page] == 0 and self._in_tree[page] == 1

    def is_in_flight(self, page: PageId) -> bool:
        return self._num_copies[page] > 0

    def allocate(self, count: int) -> list[PageId]:
        """Allocates the `count` free pages with the lowest numbers. The caller becomes the one holder of each page.

        Raises PagesExhausted if fewer than `count` pages are free.
        """
        if count > self._num_free:
            raise PagesExhausted(f"{count} pages wanted, {self._num_free} free of {self.num_pages}")
        taken = [self._lowest_free() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        self._num_free -= count
        if taken:
            self.on_taken(taken[-1])
        return taken

    def hold(self, pages: Iterable[PageId]) -> None:
        """Adds one holder to each page. A holder keeps the page allocated. The pages must have a holder already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._num_idle -= self.is_idle(page)
            self._holders[page] += 1

    def release(self, pages: Iterable[PageId]) -> list[PageId]:
        """Removes one holder from each page. A holder keeps the page allocated: a page without holders becomes free.

        Returns the pages that are now idle, which means that only the prefix tree holds them.
        """
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
        """Records that the prefix tree holds the page, which keeps the page allocated. The page must have a holder
        already.
        """
        assert not self._in_tree[page], f"page {page} is in the tree already"
        self.hold([page])
        self._in_tree[page] = True

    def leave_tree(self, page: PageId) -> None:
        """Records that the prefix tree no longer holds the page. Without other holders, the page becomes free."""
        assert self._in_tree[page], f"page {page} is not in the tree"
        self._num_idle -= self.is_idle(page)
        self._in_tree[page] = False
        self._holders[page] -= 1
        self._free_if_unused(page)

    def begin_copy(self, pages: Iterable[PageId]) -> None:
        """Records that a copy operation, which reads or writes each page, has begun. The pages must be allocated.

        None of these pages is allocated again before the operation ends. A page may take part in several operations.
        """
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be copied"
            self._num_idle -= self.is_idle(page)
            self._num_in_flight += self._num_copies[page] == 0
            self._num_copies[page] += 1

    def end_copy(self, pages: Iterable[PageId]) -> list[PageId]:
        """Records that a copy operation, which has read or written each page, has ended.

        Returns the pages that are now idle, which means that only the prefix tree holds them.
        """
        became_num_idle: list[PageId] = []
        for page in pages:
            assert self._num_copies[page] > 0, f"page {page} ended a copy that had not begun"
            self._num_copies[page] -= 1
            self._num_in_flight -= self._num_copies[page] == 0
            if self.is_idle(page):
                self._num_idle += 1
                became_num_idle.append(page)
            self._free_if_unused(page)
        return became_num_idle

    # ---- frames for adapters ----------------------------------------------------------------------------------

    def lend(self, pages: Iterable[PageId]) -> None:
        """Makes free pages unavailable to requests, because their device memory becomes part of an adapter."""
        for page in pages:
            assert self._is_free(page), f"page {page} is not free and cannot be lent"
            self._lent[page] = True
            self._free[page] = False
            self._num_lent += 1
            self._num_free -= 1

    def reclaim(self, pages: Iterable[PageId]) -> None:
        """Makes lent pages free again, because their device memory is no longer part of an adapter."""
        for page in pages:
            assert self._lent[page], f"page {page} was not lent"
            self._lent[page] = False
            self._num_lent -= 1
            self._set_free(page)

    def relocate(self, source: PageId, target: PageId) -> None:
        """Moves a page from number `source` to the free number `target`: its users now hold `target`, and `source` is
        free.

        The caller has copied the content already. No other copy may use `source`.
        """
        assert self._holders[source] > 0, f"page {source} is not held and cannot be moved"
        assert self._num_copies[source] == 0, f"page {source} is being copied and cannot be moved"
        assert self._is_free(target), f"page {target} is not free and cannot be moved to"
        self._holders[target], self._holders[source] = self._holders[source], 0
        self._in_tree[target], self._in_tree[source] = self._in_tree[source], False
        self._free[target] = False
        self._num_free -= 1
        self._set_free(source)

    def occupancy(self) -> Occupancy:
        """Returns, for each page, whether it must stay in its place in memory, and whether it contains KV that may be
        moved.
        """
        in_flight = np.frombuffer(self._num_copies, dtype=np.intc) > 0
        is_held = np.frombuffer(self._holders, dtype=np.intc) > 0
        return Occupancy(np.frombuffer(self._lent, dtype=np.bool_) | in_flight, is_held & ~in_flight)

    # ---- free pages -------------------------------------------------------------------------------------------

    def _is_free(self, page: PageId) -> bool:
        return self._holders[page] == 0 and self._num_copies[page] == 0 and not self._lent[page]

    def _lowest_free(self) -> PageId:
        """Takes the free page with the lowest number. At least one page must be free."""
        while True:
            block = self._free_blocks.index(1)
            page = self._free.find(1, block * _BLOCK_PAGES, (block + 1) * _BLOCK_PAGES)
            if page >= 0:
                self._free[page] = False
                return PageId(page)
            self._free_blocks[block] = False

    def _free_if_unused(self, page: PageId) -> None:
        if self._holders[page] == 0 and self._num_copies[page] == 0:
            self._set_free(page)

    def _set_free(self, page: PageId) -> None:
        self._num_free += 1
        self._free[page] = self._free_blocks[page // _BLOCK_PAGES] = True

    def check_integrity(self) -> None:
        """Recounts the pages in each state, and checks that the results equal the stored counts."""
        free = idle = in_flight = 0
        for page in map(PageId, range(self.num_pages)):
            is_used = self._holders[page] > 0 or self._num_copies[page] > 0
            assert not (self._lent[page] and is_used), f"page {page} is lent, and held or copied"
            assert bool(self._free[page]) == self._is_free(page), f"page {page} is free and cannot be found, or is not"
            assert self._free_blocks[page // _BLOCK_PAGES] or not self._free[page], f"page {page} is in a block to skip"
            assert not (self._in_tree[page] and self._holders[page] == 0), f"page {page} is in the tree, unheld"
            free += self._is_free(page)
            idle += self.is_idle(page)
            in_flight += self._num_copies[page] > 0
        assert free == self._num_free, f"{self._num_free} free pages counted, {free} found"
        assert sum(self._lent) == self._num_lent, f"{self._num_lent} lent pages counted, {sum(self._lent)} found"
        assert idle == self._num_idle, f"{self._num_idle} idle pages counted, {idle} found"
        assert in_flight == self._num_in_flight, f"{self._num_in_flight} pages in flight counted, {in_flight} found"
