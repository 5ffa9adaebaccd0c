"""The KV pages of one tier, who holds them, and which are being copied.

PagePool alone hands pages out and takes them back.
A page is free (nobody holds it), in flight (a copy reads or writes it), or owned (counted holders: running
sequences, nodes of the prefix tree, transfers). An owned page that only the prefix tree holds is idle: it can be
dropped, so admission counts it as available. A page that loses its last holder in flight is freed when it lands.

    total = free + in flight + idle + active

It never touches memory: what a page number means on a device is the runner's business.
"""

from collections.abc import Iterable
from typing import NewType

PageId = NewType("PageId", int)


class PagesExhausted(Exception):
    """More pages were taken than are free: the caller did not reserve or reclaim first."""


class PagePool:
    """Counted pages `0 … num_pages - 1`; every operation is O(1) a page."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = [PageId(page) for page in range(num_pages - 1, -1, -1)]
        self._holders = [0] * num_pages
        self._flights = [0] * num_pages
        self._in_tree = [False] * num_pages
        self._idle = 0
        self._in_flight = 0

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds and no copy touches."""
        return len(self._free)

    @property
    def idle_pages(self) -> int:
        """Pages that the prefix tree alone holds, and no copy touches."""
        return self._idle

    @property
    def in_flight_pages(self) -> int:
        """Pages that a copy reads or writes, whoever holds them."""
        return self._in_flight

    @property
    def active_pages(self) -> int:
        """Pages that a sequence or a transfer holds, and no copy touches."""
        return self.num_pages - len(self._free) - self._idle - self._in_flight

    @property
    def num_holders(self) -> int:
        """Holders of all pages together."""
        return sum(self._holders)

    def holders(self, page: PageId) -> int:
        return self._holders[page]

    def is_idle(self, page: PageId) -> bool:
        """Whether the prefix tree alone holds it and no copy touches it."""
        return self._in_tree[page] and self._holders[page] == 1 and self._flights[page] == 0

    def is_in_flight(self, page: PageId) -> bool:
        return self._flights[page] > 0

    def take(self, count: int) -> list[PageId]:
        """Hand out `count` free pages, each with one holder. Raises PagesExhausted and takes none."""
        if count > len(self._free):
            raise PagesExhausted(f"{count} pages wanted, {len(self._free)} free of {self.num_pages}")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[PageId]) -> None:
        """Add one holder to each of some owned pages."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._idle -= self.is_idle(page)
            self._holders[page] += 1

    def release(self, pages: Iterable[PageId]) -> list[PageId]:
        """Take one holder from each page; the last one frees it. Returns those that only the tree holds now."""
        became_idle: list[PageId] = []
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was released twice"
            self._idle -= self.is_idle(page)
            self._holders[page] -= 1
            if self.is_idle(page):
                self._idle += 1
                became_idle.append(page)
            self._free_if_forgotten(page)
        return became_idle

    def enter_tree(self, page: PageId) -> None:
        """The prefix tree becomes one more holder of an owned page."""
        assert not self._in_tree[page], f"page {page} is in the tree already"
        self.hold([page])
        self._in_tree[page] = True

    def leave_tree(self, page: PageId) -> None:
        """The prefix tree lets go of a page; whoever else holds it keeps it."""
        assert self._in_tree[page], f"page {page} is not in the tree"
        self._idle -= self.is_idle(page)
        self._in_tree[page] = False
        self._holders[page] -= 1
        self._free_if_forgotten(page)

    def take_off(self, pages: Iterable[PageId]) -> None:
        """A copy begins to read or write owned pages: none of them is handed out again before it has landed."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be copied"
            self._idle -= self.is_idle(page)
            self._in_flight += self._flights[page] == 0
            self._flights[page] += 1

    def land(self, pages: Iterable[PageId]) -> list[PageId]:
        """A copy's event has fired. Returns the pages that are idle now."""
        became_idle: list[PageId] = []
        for page in pages:
            assert self._flights[page] > 0, f"page {page} landed twice"
            self._flights[page] -= 1
            self._in_flight -= self._flights[page] == 0
            if self.is_idle(page):
                self._idle += 1
                became_idle.append(page)
            self._free_if_forgotten(page)
        return became_idle

    def _free_if_forgotten(self, page: PageId) -> None:
        if self._holders[page] == 0 and self._flights[page] == 0:
            self._free.append(page)

    def check_integrity(self) -> None:
        """Recount everything from scratch."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        idle = in_flight = 0
        for page in map(PageId, range(self.num_pages)):
            is_unused = self._holders[page] == 0 and self._flights[page] == 0
            assert is_unused == (page in free), f"page {page}: holders, copies and free list disagree"
            assert not (self._in_tree[page] and self._holders[page] == 0), f"page {page} is in the tree, unheld"
            idle += self.is_idle(page)
            in_flight += self._flights[page] > 0
        assert idle == self._idle, f"{self._idle} idle pages counted, {idle} found"
        assert in_flight == self._in_flight, f"{self._in_flight} pages in flight counted, {in_flight} found"
