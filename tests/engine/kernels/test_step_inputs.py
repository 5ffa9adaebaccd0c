"""Tests of the block of memory in which the numbers of a step travel to the device."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.kernels.step_inputs import PinnedMemory, SharedWords, StepInputs, WordLayout, Words

CPU = torch.device("cpu")


def words(*numbers: int) -> Words:
    return np.array(numbers, np.int32)


@given(st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_every_array_arrives_where_its_view_is(sizes: dict[str, tuple[int, int]]) -> None:
    """Arrays of any sizes arrive whole, begin at multiples of 16 bytes and are filled up with -1."""
    layout = WordLayout({name: used + spare for name, (used, spare) in sizes.items()})
    arrays = {name: np.arange(used, dtype=np.int32) for name, (used, _) in sizes.items()}
    inputs = StepInputs(layout.num_words, CPU, PinnedMemory(CPU))

    inputs.send(layout, arrays)

    views = inputs.views(layout)
    assert {name: view.tolist() for name, view in views.items()} == {
        name: [*range(used), *[-1] * spare] for name, (used, spare) in sizes.items()
    }
    assert all(view.storage_offset() % 4 == 0 for view in views.values())


def test_an_array_beyond_its_capacity_is_refused() -> None:
    """An array that is longer than its place is refused, with both lengths."""
    with pytest.raises(ValueError, match="pages has 3 entries, but its capacity is 2"):
        WordLayout({"pages": 2}).write(words(0, 0, 0, 0), {"pages": words(1, 2, 3)})


def test_a_block_that_is_large_enough_does_not_move() -> None:
    """Reserving what is there already keeps the addresses; reserving more makes the block larger."""
    inputs = StepInputs(16, CPU, PinnedMemory(CPU))
    layout = WordLayout({"a": 16})
    address = inputs.views(layout)["a"].data_ptr()

    inputs.reserve(16)
    assert inputs.views(layout)["a"].data_ptr() == address
    inputs.reserve(17)
    assert inputs.num_words == 32


@dataclass
class LateDevice:
    """Host memory of a device whose copies end only when somebody waits for them."""

    num_started: int = 0
    ended: list[int] = field(default_factory=list)

    def words(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int32)

    def mark(self) -> Callable[[], None]:
        self.num_started += 1
        number = self.num_started
        return lambda: self.ended.append(number)


def test_host_memory_is_written_again_only_after_its_copy_has_ended() -> None:
    """Two steps are sent without waiting; the third waits for the first, and for nothing else."""
    device, layout = LateDevice(), WordLayout({"a": 4})
    inputs = StepInputs(4, CPU, device)

    for number in (1, 2):
        inputs.send(layout, {"a": words(number)})
    assert device.ended == []

    inputs.send(layout, {"a": words(3)})
    assert device.ended == [1]
    assert inputs.views(layout)["a"].tolist() == [3, -1, -1, -1]


def test_shared_memory_is_filled_again_only_after_its_kernels_have_ended() -> None:
    """Two steps lend their words without waiting; the third waits for the first and gets its memory. A larger step waits
    for all kernels, and both blocks get new memory."""
    device = LateDevice()
    shared = SharedWords(device)
    shared.next_words(4)
    device.ended.clear()

    lent = []
    for _ in range(2):
        lent.append(shared.next_words(4).data_ptr())
        shared.lent(device.mark())
    assert device.ended == []
    assert lent[0] != lent[1]

    assert shared.next_words(4).data_ptr() == lent[0]
    assert device.ended == [1]
    assert len(shared.next_words(5)) == 5
    assert device.ended[1:3] == [1, 2]
