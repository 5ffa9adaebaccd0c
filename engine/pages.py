"""The KV pages of one tier, and who holds them.

PagePool alone hands pages out and takes them back.
A page is free (nobody holds it) or owned (counted holders: running sequences, nodes of the prefix tree).
A page that only the prefix tree holds is idle: it can be reclaimed, so admission counts it as available.

    total = free + idle + active

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
        self._in_tree = [False] * num_pages
        self._idle = 0

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def idle_pages(self) -> int:
        """Pages that the prefix tree alone holds."""
        return self._idle

    @property
    def active_pages(self) -> int:
        """Pages that at least one sequence holds."""
        return self.num_pages - len(self._free) - self._idle

    @property
    def num_holders(self) -> int:
        """Holders of all pages together."""
        return sum(self._holders)

    def holders(self, page: PageId) -> int:
        return self._holders[page]

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
            self._holders[page] += 1
            if self._in_tree[page] and self._holders[page] == 2:
                self._idle -= 1

    def release(self, pages: Iterable[PageId]) -> None:
        """Take one holder from each page; the last one frees it."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was released twice"
            self._holders[page] -= 1
            if self._in_tree[page] and self._holders[page] == 1:
                self._idle += 1
            elif self._holders[page] == 0:
                self._free.append(page)

    def enter_tree(self, page: PageId) -> None:
        """The prefix tree becomes one more holder of a page that a sequence owns."""
        assert not self._in_tree[page], f"page {page} is in the tree already"
        self.hold([page])
        self._in_tree[page] = True

    def leave_tree(self, page: PageId) -> None:
        """The prefix tree lets go of an idle page, which frees it."""
        assert self._in_tree[page], f"page {page} is not in the tree"
        assert self._holders[page] == 1, f"page {page} is in use"
        self._in_tree[page] = False
        self._idle -= 1
        self.release([page])

    def check_integrity(self) -> None:
        """Recount everything from scratch."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        idle = 0
        for page in map(PageId, range(self.num_pages)):
            assert (self._holders[page] == 0) == (page in free), f"page {page}: holders and free list disagree"
            assert not (self._in_tree[page] and page in free), f"page {page} is free and in the tree"
            idle += self._in_tree[page] and self._holders[page] == 1
        assert idle == self._idle, f"{self._idle} idle pages counted, {idle} found"
