"""Allocates large blocks of host memory: mapped from the system, in huge pages where it has them, and pinned if wanted.

A part of a block costs nothing until it is first written. Then the system clears it, in steps of its page size: with pages of
4 KiB, filling a host tier of 1 GiB took two seconds of processor time from the steps beside it, and a CPU's steps, which
read KV all over the block, took a tenth longer. A huge page has 2 MiB.

Pinned memory stays where it is, so that a CUDA device copies it at full speed. torch's own allocator of pinned memory
rounds a size up to the next power of two: 70 GB would take 128 GB. A block here takes its size, rounded up to whole pages.

Source: the allocation of SGLang's host cache (sglang, issue 36562), and torch.distributed's _state_dict_utils.
"""

import mmap
import weakref
from contextlib import suppress
from typing import Protocol

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process
_REFUSED_BY_SYSTEM = (2, 304)  # cudaErrorMemoryAllocation, cudaErrorOperatingSystem


class HostRegistry(Protocol):
    """Pins host memory and releases it. CudaRegistry implements it."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pins `num_bytes` bytes from `address` on. Raises RuntimeError if the system does not allow it."""
        ...

    def unregister(self, address: int) -> None:
        """Ends the pinning of the block at `address`. Raises RuntimeError if the block is not pinned."""
        ...


class CudaRegistry:
    """Pins host memory with the CUDA runtime."""

    def register(self, address: int, num_bytes: int) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        _check("cudaHostRegister", int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE)))

    def unregister(self, address: int) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        _check("cudaHostUnregister", int(runtime.cudaHostUnregister(address)))


def _check(call: str, status: int) -> None:
    if status:
        hint = "; is the limit of locked memory (ulimit -l) too low?" if status in _REFUSED_BY_SYSTEM else ""
        raise RuntimeError(f"{call} failed with CUDA error {status}: {torch.cuda.CudaError(status)}{hint}")


def mapped_memory(num_bytes: int) -> torch.Tensor:
    """Returns a new block of host memory, all zeros: uint8 [num_bytes]. It is given back when nothing refers to it any more.

    Raises OSError if the system does not grant it.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: the memory is the same, in small ones
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive


class PinnedBlock:
    """Owns one block of pinned memory. The pinning ends when the block is closed, or when nothing refers to it any more.

    CUDA must not hold memory as pinned that was given back to the system: the next block at its address could not be
    pinned, and later calls of CUDA fail with errors that name other causes.
    """

    def __init__(self, num_bytes: int, registry: HostRegistry) -> None:
        """`num_bytes` is at least 1. Raises RuntimeError or OSError if the memory cannot be pinned."""
        self.data = mapped_memory(num_bytes)
        registry.register(self.data.data_ptr(), num_bytes)
        self._unpin = weakref.finalize(self, registry.unregister, self.data.data_ptr())
        self._unpin.atexit = False  # the system ends all pinning of a process that ends

    def close(self) -> None:
        """Ends the pinning. No copy may use the memory any more. Closing twice does nothing."""
        self._unpin()
