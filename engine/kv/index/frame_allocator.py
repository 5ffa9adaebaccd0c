"""Allocates runs of consecutive frames to adapters.

A frame is device memory of the size of one KV page. Adapters and KV pages share the frames of one device. An adapter
needs consecutive frames (a run), but the free frames may be anywhere. So the allocator first chooses a run. Then it
moves the KV pages inside this run to free frames, even pages that requests use. A moved page gets a new page number. If
adapters leave no run of the needed length, the allocator first moves the adapters to the highest frame numbers.

All moves run between steps, on the thread of the engine's loop and in the order of the device's stream. So one step
uses either only the old page numbers or only the new ones.

Invariants: a page that is being copied never moves, nor does a fixed run. No frame has two users. When `allocate` returns, the callbacks that
report the moves have run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.page_pool import Occupancy
from graftwork.engine.kv.index.page_store import PageStore


@dataclass(frozen=True, slots=True, order=True)
class FrameRun:
    """The consecutive frames (device memory of one page each) that one adapter uses: `first` to `end` - 1."""

    first: int
    num_frames: int

    @property
    def end(self) -> int:
        return self.first + self.num_frames

    @property
    def pages(self) -> Iterator[PageId]:
        return map(PageId, range(self.first, self.end))


class FrameMover(Protocol):
    """Moves the content of frames (device memory of one page each). DeviceMemory implements it."""

    def move(self, moves: Iterable[tuple[int, int]]) -> None: ...


class FrameAllocator:
    """Owns the runs of frames (device memory of one page each) that adapters use.

    Moves KV pages and adapters to make room for new runs.
    """

    def __init__(self, page_store: PageStore, frames: FrameMover) -> None:
        self._page_store = page_store
        self._frames = frames
        self._runs: set[FrameRun] = set()
        self._fixed: set[FrameRun] = set()
        """The runs that are being written, so that they cannot be moved."""
        self.on_pages_moved: Callable[[Mapping[PageId, PageId]], None] = lambda moves: None
        """A callback that runs after pages were moved and the tree was updated.

        Its argument maps the old number of each moved page to the new one.
        """
        self.on_runs_moved: Callable[[Mapping[FrameRun, FrameRun]], None] = lambda moves: None
        """A callback that runs after adapters were moved. Its argument maps the old run of each moved adapter to the
        new one.
        """
        self.num_relocated_pages = 0
        self.num_moved_runs = 0

    def allocate(self, num_frames: int) -> FrameRun | None:
        """Allocates and returns `num_frames` consecutive frames (device memory of one page each) for an adapter.

        At least `num_frames` frames must be free, anywhere on the device. Returns None and changes nothing if every
        possible choice of frames contains a page that is being copied. Then try again after the next message to the
        engine's loop, because a message reports the end of a copy.
        """
        pool = self._page_store.device
        assert num_frames <= pool.free_pages, f"{num_frames} frames wanted, {pool.free_pages} free"
        first = cheapest_window(pool.occupancy(), num_frames)
        if first is None and self._compact(num_frames):
            first = cheapest_window(pool.occupancy(), num_frames)
        if first is None:
            return None
        run = FrameRun(first, num_frames)
        self._clear(run)
        pool.lend(run.pages)
        self._runs.add(run)
        return run

    def free(self, run: FrameRun) -> None:
        """Makes the frames (device memory of one page each) free that an adapter has used."""
        self._runs.remove(run)
        self._page_store.device.reclaim(run.pages)

    def fix(self, run: FrameRun) -> None:
        """Keeps a run in its place until `unfix`, because something else than the loop writes into it."""
        self._fixed.add(run)

    def unfix(self, run: FrameRun) -> None:
        """Allows a run to be moved again."""
        self._fixed.remove(run)

    def _clear(self, run: FrameRun) -> None:
        """Moves the pages inside a run to the lowest free frames outside the run."""
        occupancy = self._page_store.device.occupancy()
        inside = np.zeros_like(occupancy.is_held)
        inside[run.first : run.end] = True
        sources = np.flatnonzero(occupancy.is_held & inside).tolist()
        targets = np.flatnonzero(~occupancy.is_held & ~occupancy.is_fixed & ~inside).tolist()
        moves = dict(zip(_pages(sources), _pages(targets), strict=False))
        self._frames.move(moves.items())
        self._rename_pages(moves)

    def _compact(self, num_frames: int) -> bool:
        """Moves runs to the highest frames if that makes room for a run of `num_frames`. Returns whether it did.

        Changes nothing if it does not.
        """
        pool = self._page_store.device
        occupancy = pool.occupancy()
        movable = self._runs - self._fixed
        is_lent = np.zeros_like(occupancy.is_fixed)
        for run in movable:
            is_lent[run.first : run.end] = True
        in_flight = occupancy.is_fixed & ~is_lent  # the fixed runs too
        moves = compacted_runs(movable, in_flight)
        will_be_lent = np.zeros_like(is_lent)
        for run in movable:
            new = moves.get(run, run)
            will_be_lent[new.first : new.end] = True
        if cheapest_window(Occupancy(in_flight | will_be_lent, occupancy.is_held), num_frames) is None:
            return False
        displaced = np.flatnonzero(occupancy.is_held & will_be_lent).tolist()
        vacated = np.flatnonzero(is_lent & ~will_be_lent).tolist()
        pages = dict(zip(_pages(displaced), _pages(vacated), strict=False))
        slides = [slide for run, target in moves.items() for slide in zip(run.pages, target.pages, strict=True)]
        self._frames.move([*slides, *pages.items()])
        for run in moves:
            self.free(run)
        self._rename_pages(pages)
        for run in moves.values():
            pool.lend(run.pages)
            self._runs.add(run)
        self.num_moved_runs += len(moves)
        self.on_runs_moved(moves)
        return True

    def _rename_pages(self, moves: Mapping[PageId, PageId]) -> None:
        tree = self._page_store.tree
        for source, target in moves.items():
            self._page_store.device.relocate(source, target)
            node = tree.node_of(Tier.DEVICE, source)
            if node is not None:
                tree.move_copy(node, Tier.DEVICE, target)
        self.num_relocated_pages += len(moves)
        self.on_pages_moved(moves)

    def check_integrity(self) -> None:
        """Checks that no two adapters use the same frame, and that the page pool has lent as many frames as adapters
        use.
        """
        assert self._fixed <= self._runs, "a run that was freed is being written"
        frames = [page for run in self._runs for page in run.pages]
        assert len(set(frames)) == len(frames), "a frame belongs to two adapters"
        assert len(frames) == self._page_store.device.lent_pages, "a lent frame is in no run"


def cheapest_window(occupancy: Occupancy, num_frames: int) -> int | None:
    """Returns the first frame of a window: `num_frames` consecutive frames that can be made free for an adapter.

    Chooses the window that needs the fewest moves of KV pages. At a tie, chooses the highest frame numbers. A frame is
    device memory of one page. A window never contains a frame of an adapter, or a page that is being copied. Returns
    None if there is no window.
    """
    if num_frames > len(occupancy.is_fixed):
        return None
    num_held = np.where(
        _count_in_windows(occupancy.is_fixed, num_frames) > 0, -1, _count_in_windows(occupancy.is_held, num_frames)
    )
    can_be = num_held >= 0
    if not can_be.any():
        return None
    fewest = num_held[can_be].min()
    return int(np.flatnonzero(num_held == fewest)[-1])


def _count_in_windows(marks: NDArray[np.bool_], width: int) -> NDArray[np.int64]:
    """Returns how many marks are true in each window of `width` frames, by the window's first frame."""
    sums = np.zeros(len(marks) + 1, dtype=np.int64)
    np.cumsum(marks, out=sums[1:])
    return np.subtract(sums[width:], sums[:-width])


def compacted_runs(runs: Iterable[FrameRun], in_flight: NDArray[np.bool_]) -> dict[FrameRun, FrameRun]:
    """Returns where adapters must move, so that all adapters have the highest possible frame numbers.

    A frame is device memory of one page. `runs` are the consecutive frames of each adapter. `in_flight` is True for
    each frame whose page is being copied.  # [num_frames]

    The result maps the old run of each adapter that moves to its new run. Adapters keep their order. An adapter never
    moves past a page that is being copied.
    """
    moves: dict[FrameRun, FrameRun] = {}
    top = len(in_flight)
    for run in sorted(runs, reverse=True):
        first = top - run.num_frames
        while first > run.first and in_flight[first : first + run.num_frames].any():
            first = int(np.flatnonzero(in_flight[: first + run.num_frames])[-1]) - run.num_frames
        top = max(first, run.first)
        if top != run.first:
            moves[run] = FrameRun(top, run.num_frames)
    return moves


def _pages(numbers: Iterable[int]) -> Iterator[PageId]:
    return map(PageId, numbers)
