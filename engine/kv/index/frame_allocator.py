"""Runs of consecutive frames for adapters, on a device whose frames they share with KV pages.

Free frames are found anywhere; a run of them is made. Pages that stand where a run is to be are carried to free frames
elsewhere and renamed, active ones too; where adapters lie so scattered that no run is left between them, they are slid
to the top of the device. All of it happens on the loop's thread between steps, in the order of the device's stream, so
a step sees either all old numbers or all new ones.

Invariants: a page under a copy is never moved, no frame belongs to two, and whoever lists a page or views a run has
been told of its new place when `allocate` returns.
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
    """Frames [first, end)."""

    first: int
    num_frames: int

    @property
    def end(self) -> int:
        return self.first + self.num_frames

    @property
    def pages(self) -> Iterator[PageId]:
        return map(PageId, range(self.first, self.end))


class FrameMover(Protocol):
    """The memory itself; see DeviceMemory."""

    def move(self, moves: Iterable[tuple[int, int]]) -> None: ...


class FrameAllocator:
    """Gives out runs of a device's frames, and takes them back."""

    def __init__(self, page_store: PageStore, frames: FrameMover) -> None:
        self._page_store = page_store
        self._frames = frames
        self._runs: set[FrameRun] = set()
        self.on_pages_moved: Callable[[Mapping[PageId, PageId]], None] = lambda moves: None
        """Told of pages that have new numbers, by their old ones; the tree knows already."""
        self.on_runs_moved: Callable[[Mapping[FrameRun, FrameRun]], None] = lambda moves: None
        """Told of runs whose content stands elsewhere now."""
        self.num_relocated_pages = 0
        self.num_moved_runs = 0

    def allocate(self, num_frames: int) -> FrameRun | None:
        """A run of frames; so many must be free, wherever they are.

        None, and nothing has changed, while copies that are under way stand in the way of every run. They end by
        themselves: whoever waits asks again after the next message.
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
        """The run's frames are free again."""
        self._runs.remove(run)
        self._page_store.device.reclaim(run.pages)

    def _clear(self, run: FrameRun) -> None:
        """Carry the pages within a run to be to the lowest free frames outside."""
        occupancy = self._page_store.device.occupancy()
        inside = np.zeros_like(occupancy.is_held)
        inside[run.first : run.end] = True
        sources = np.flatnonzero(occupancy.is_held & inside).tolist()
        targets = np.flatnonzero(~occupancy.is_held & ~occupancy.is_fixed & ~inside).tolist()
        moves = dict(zip(_pages(sources), _pages(targets), strict=False))
        self._frames.move(moves.items())
        self._rename_pages(moves)

    def _compact(self, num_frames: int) -> bool:
        """Slide runs upwards if that opens a window of `num_frames`; False, and nothing has changed, if it does not."""
        pool = self._page_store.device
        occupancy = pool.occupancy()
        is_lent = np.zeros_like(occupancy.is_fixed)
        for run in self._runs:
            is_lent[run.first : run.end] = True
        in_flight = occupancy.is_fixed & ~is_lent
        moves = compacted_runs(self._runs, in_flight)
        will_be_lent = np.zeros_like(is_lent)
        for run in self._runs:
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
        """No two runs overlap, and every lent frame is in one."""
        frames = [page for run in self._runs for page in run.pages]
        assert len(set(frames)) == len(frames), "a frame belongs to two adapters"
        assert len(frames) == self._page_store.device.lent_pages, "a lent frame belongs to nobody"


def cheapest_window(occupancy: Occupancy, num_frames: int) -> int | None:
    """Where `num_frames` frames stand of which none is fixed and the fewest are held; the highest of several."""
    if num_frames > len(occupancy.is_fixed):
        return None
    num_held = np.where(_in_windows(occupancy.is_fixed, num_frames) > 0, -1, _in_windows(occupancy.is_held, num_frames))
    can_be = num_held >= 0
    if not can_be.any():
        return None
    fewest = num_held[can_be].min()
    return int(np.flatnonzero(num_held == fewest)[-1])


def _in_windows(marks: NDArray[np.bool_], width: int) -> NDArray[np.int64]:
    """Marks within each window of a width, by where it begins."""
    sums = np.zeros(len(marks) + 1, dtype=np.int64)
    np.cumsum(marks, out=sums[1:])
    return np.subtract(sums[width:], sums[:-width])


def compacted_runs(runs: Iterable[FrameRun], in_flight: NDArray[np.bool_]) -> dict[FrameRun, FrameRun]:
    """Where runs come to stand when each is slid to the top as far as those above it and pages under copies let it;
    only of those that move."""
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
