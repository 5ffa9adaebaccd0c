"""Tests runs of frames: where they are placed, what is moved for them, and how they are compacted."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from graftwork.engine.kv.index.frame_allocator import FrameRun, cheapest_window, compacted_runs
from graftwork.engine.kv.index.page_pool import Occupancy
from graftwork.engine.kv.transfer.device_memory import DeviceMemory

marks = st.text(alphabet=".#x", min_size=1, max_size=14)
"""A device: `.` is a free frame, `#` a page that may be moved, `x` a frame that must stay."""


def standing(device: str) -> Occupancy:
    return Occupancy(are(device, "x"), are(device, "#"))


def are(device: str, mark: str) -> NDArray[np.bool_]:
    return np.array([one == mark for one in device])


@given(st.permutations(range(12)), st.integers(0, 12))
def test_frames_move_as_if_all_at_once(order: list[int], num_moved: int) -> None:
    """For chains and cycles of moves, every target gets its source's content and nothing else changes."""
    device_memory = DeviceMemory(12, 100, torch.device("cpu"))
    device_memory.frames[:12] = torch.arange(12, dtype=torch.uint8)[:, None]
    moves = list(enumerate(order))[:num_moved]
    expected = list(range(12))
    for source, target in moves:
        expected[target] = source

    device_memory.move(moves)

    assert device_memory.frames[:12, 0].tolist() == device_memory.frames[:12, -1].tolist() == expected
    device_memory.check_integrity()


def test_a_block_begins_where_its_frame_does_and_frames_are_aligned() -> None:
    """A frame for 100 bytes has 128, and writing to a buffer at frame 3 writes to that frame's memory."""
    device_memory = DeviceMemory(6, 100, torch.device("cpu"))

    device_memory.frames.zero_()
    device_memory.buffer(3, 130).fill_(7)

    assert device_memory.frame_bytes == 128
    assert device_memory.frames_for(130) == 2
    assert device_memory.frames[3:5].flatten().eq(7).nonzero().flatten().tolist() == list(range(130))


@given(marks, st.integers(1, 6))
def test_the_cheapest_window_is_the_best_of_all(device: str, width: int) -> None:
    """The window found is the best in a search of all: no fixed frame, then the fewest pages, then the highest."""
    windows = [(first, device[first : first + width]) for first in range(len(device) - width + 1)]
    possible = [(-window.count("#"), first) for first, window in windows if "x" not in window]

    found = cheapest_window(standing(device), width)

    assert found == (max(possible)[1] if possible else None)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=5), st.data())
def test_compacted_runs_pass_no_frame_that_must_stay(gaps: list[tuple[int, int]], data: st.DataObject) -> None:
    """Runs keep their order and size, only move up, and overlap neither each other nor a page in flight; without such
    pages they are packed at the top."""
    runs: list[FrameRun] = []
    end = 0
    for gap, size in gaps:
        runs.append(FrameRun(end + gap, size))
        end = runs[-1].end
    num_frames = end + 4
    outside = [frame for frame in range(num_frames) if not any(run.first <= frame < run.end for run in runs)]
    in_flight = np.zeros(num_frames, dtype=np.bool_)
    in_flight[data.draw(st.lists(st.sampled_from(outside), max_size=3))] = True

    moves = compacted_runs(runs, in_flight)

    slid = [moves.get(run, run) for run in runs]
    assert [run.num_frames for run in slid] == [run.num_frames for run in runs]
    assert all(new.first >= old.first for new, old in zip(slid, runs, strict=True))
    assert all(low.end <= high.first for low, high in pairwise(slid))
    assert not any(in_flight[run.first : run.end].any() for run in slid)
    if not in_flight.any() and slid:
        assert slid[-1].end == num_frames
        assert slid[-1].end - slid[0].first == sum(run.num_frames for run in runs)
