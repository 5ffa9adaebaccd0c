"""Measures the memory of a device: what an act takes at most, and what is free.

Owns nothing. Memory that nothing uses is given back to the driver first, so that two measurements can be compared.
"""

import gc
from collections.abc import Callable
from typing import Protocol

import torch


class DeviceMeter(Protocol):
    """Measures the memory of one device. CudaMeter implements it."""

    @property
    def device(self) -> torch.device: ...

    def peak_of(self, act: Callable[[], None]) -> int:
        """Calls `act`. Returns the most bytes that it took at a time, besides those that were taken before.

        Raises torch.OutOfMemoryError if `act` does.
        """
        ...

    def free_bytes(self) -> int:
        """Returns the free memory of the device in bytes, after memory that nothing uses was given back."""
        ...


class CudaMeter:
    """Measures the memory of a CUDA device, as the driver and torch's allocator see it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def peak_of(self, act: Callable[[], None]) -> int:
        self._give_back()
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        act()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_reserved(self.device)) - before

    def free_bytes(self) -> int:
        self._give_back()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def _give_back(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
