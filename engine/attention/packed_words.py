"""Packs the int32 arrays of a step into one block of memory, so that a step copies them to the device at once."""

from collections.abc import Mapping

import torch

from graftwork.engine.attention.tiles import Words
from graftwork.engine.kernels.step_inputs import WordLayout


class PackedWords:
    """Named int32 arrays on a device, in one block of memory. A CUDA graph may hold their addresses."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """`sizes` are the capacities of the arrays, in words. The arrays are not initialised."""
        self._layout = WordLayout(sizes)
        self._block = torch.empty(self._layout.num_words, dtype=torch.int32, device=device)
        self.arrays = self._layout.views(self._block)

    @classmethod
    def of(cls, arrays: Mapping[str, Words], device: torch.device) -> "PackedWords":
        """Returns the arrays on a device, each with room for itself alone."""
        packed = cls({name: len(array) for name, array in arrays.items()}, device)
        packed.fill(arrays)
        return packed

    def fill(self, arrays: Mapping[str, Words]) -> None:
        """Writes all arrays by one copy, which does not block. What an array does not fill of its capacity is -1.

        Raises ValueError if an array exceeds its capacity.
        """
        # torch does not use pinned memory again before the copy from it has ended.
        host = torch.empty(len(self._block), dtype=torch.int32, pin_memory=self._block.is_cuda)
        self._layout.write(host.numpy(), arrays)
        self._block.copy_(host, non_blocking=True)
