"""Carries the numbers of a step to the device: named int32 arrays in one block of memory, by one copy a step.

    WordLayout     where each array is in the block; it follows from the arrays' capacities alone
    StepInputs     the block on the device, and two blocks in pinned host memory, which take turns
    SharedWords    two blocks in pinned host memory that kernels read where they are, without a copy

A step's arrays are filled by numpy. One copy, for which the host does not wait, carries them to the device. The block on
the device stays where it is, so a CUDA graph may hold addresses in it. While the device still copies the numbers of one
step, the host fills the other host block.

Invariant: a host block is written again only after the copy from it has ended. Copies and kernels run in the order of
one stream, so a block on the device is overwritten only after the kernels of the step before have read it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.int32]

_ALIGNMENT = 4
"""Words. Each array begins at a multiple of 16 bytes, so kernels are compiled once for all steps."""
_UNUSED = -1


class HostMemory(Protocol):
    """Gives host memory from which, and to which, a device copies without the host waiting."""

    def words(self, num_words: int) -> torch.Tensor:
        """Returns uninitialised memory: [num_words] int32, pinned if the device is a GPU."""
        ...

    def mark(self) -> Callable[[], None]:
        """Returns a function that waits until the device has ended all work that was started before this call."""
        ...


class Passenger(Protocol):
    """Numbers that travel to the device along with those of a step. They are sent once, by the object that calls `board`."""

    @property
    def words(self) -> Words:
        """The numbers, on the host."""
        ...

    def board(self, on_device: torch.Tensor) -> None:
        """Takes the place on the device where a copy of `words` has, or will have, arrived. [len(words)] int32."""
        ...


class PinnedMemory:
    """The host memory of a CUDA device. For any other device, plain memory: there every copy ends at once."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def words(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int32, pin_memory=self._on_gpu)

    def mark(self) -> Callable[[], None]:
        if not self._on_gpu:
            return _no_wait
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize


def _no_wait() -> None:
    return


class WordLayout:
    """Says where named int32 arrays are in a block. Equal capacities give equal places."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes` are the capacities of the arrays, in words, in the order of their places."""
        self._places: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self._places[name] = slice(end, end + size)
            end += -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        self.num_words = end

    @classmethod
    def of(cls, arrays: Mapping[str, Words]) -> "WordLayout":
        """Returns a layout in which each array has room for itself alone."""
        return cls({name: len(array) for name, array in arrays.items()})

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns each array as a view of a block: int32 [its capacity]."""
        return {name: block[place] for name, place in self._places.items()}

    def view(self, block: torch.Tensor, name: str) -> torch.Tensor:
        """Returns one array as a view of a block."""
        return block[self._places[name]]

    def write(self, block: Words, arrays: Mapping[str, Words]) -> None:
        """Writes arrays into a block. What an array does not fill of its capacity becomes -1.

        Raises ValueError if an array exceeds its capacity, and KeyError if it has no place.
        """
        for name, place in self._places.items():
            array = arrays[name]
            room = place.stop - place.start
            if len(array) > room:
                raise ValueError(f"{name} has {len(array)} entries, but its capacity is {room}")
            block[place.start : place.start + len(array)] = array
            block[place.start + len(array) : place.stop] = _UNUSED


@dataclass(slots=True)
class _HostBlock:
    """A block in host memory, and how to wait until the device has copied it."""

    words: torch.Tensor  # [num_words] int32
    wait: Callable[[], None]


class StepInputs:
    """The block of memory on the device that holds the numbers of a step."""

    def __init__(self, num_words: int, device: torch.device, host: HostMemory) -> None:
        """`num_words` is the size of the block, and `host` gives memory for its two counterparts on the host."""
        self._host = host
        self._device = device
        self._block = torch.empty(0, dtype=torch.int32, device=device)
        self._host_blocks: list[_HostBlock] = []
        self._next = 0
        self._allocate(num_words)

    @property
    def num_words(self) -> int:
        return len(self._block)

    def reserve(self, num_words: int) -> None:
        """Makes the block large enough. It grows to a power of two and then has other addresses.

        What a CUDA graph needs must be reserved before the graph is captured.
        """
        if num_words > self.num_words:
            self._allocate(1 << (num_words - 1).bit_length())

    def views(self, layout: WordLayout) -> dict[str, torch.Tensor]:
        """Returns the arrays of a layout on the device. They hold the numbers of the step that was sent last."""
        return layout.views(self._block)

    def view(self, layout: WordLayout, name: str) -> torch.Tensor:
        """Returns one array of a layout on the device."""
        return layout.view(self._block, name)

    def send(self, layout: WordLayout, arrays: Mapping[str, Words]) -> None:
        """Copies the arrays of a step to the device. The host does not wait for the copy.

        Raises ValueError if an array exceeds its capacity. The block must be large enough for the layout.
        """
        layout.write(self.next_words(layout.num_words), arrays)
        self.send_next(layout.num_words)

    def next_words(self, num_words: int) -> Words:
        """Returns the first words of the host block that is sent next. They may be filled until `send_next`."""
        block = self._host_blocks[self._next]
        block.wait()
        words: Words = block.words.numpy()
        return words[:num_words]

    def send_next(self, num_words: int) -> torch.Tensor:
        """Copies the first words of the next host block to the device, and returns them there: [num_words] int32.

        The host does not wait for the copy.
        """
        block = self._host_blocks[self._next]
        self._next = 1 - self._next
        on_device = self._block[:num_words]
        on_device.copy_(block.words[:num_words], non_blocking=True)
        block.wait = self._host.mark()
        return on_device

    def _allocate(self, num_words: int) -> None:
        for block in self._host_blocks:
            block.wait()
        self._block = torch.empty(num_words, dtype=torch.int32, device=self._device)
        self._host_blocks = [_HostBlock(self._host.words(num_words), _no_wait) for _ in range(2)]


class SharedWords:
    """Numbers that kernels read from pinned host memory, because they are not known when the step's copy is made.

    CUDA maps pinned memory into the addresses of the device, so a kernel reads it over the bus without a copy. Two
    blocks take turns: the host fills one while kernels still read the other.
    """

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._blocks = [_HostBlock(host.words(0), _no_wait) for _ in range(2)]
        self._next = 0

    def next_words(self, num_words: int) -> torch.Tensor:
        """Returns the first words of the block that is lent next, to be filled. Waits until no kernel reads it.

        Blocks that are too small grow to a power of two.
        """
        if num_words > len(self._blocks[self._next].words):
            for block in self._blocks:
                block.wait()
                block.words = self._host.words(1 << (num_words - 1).bit_length())
        block = self._blocks[self._next]
        block.wait()
        return block.words[:num_words]

    def lent(self, wait: Callable[[], None]) -> None:
        """Records that kernels were launched that read the block. `wait` waits until they have ended."""
        self._blocks[self._next].wait = wait
        self._next = 1 - self._next
