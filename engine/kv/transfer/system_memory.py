"""Allocates large blocks of host memory: mapped from the system, in huge pages where it has them, and pinned if wanted.

A part of a block costs nothing until it is first written. Then the system clears it, in steps of its page size: with pages of
4 KiB, filling a host tier of 1 GiB took two seconds of processor time from the steps beside it, and a CPU's steps, which
read KV all over the block, took a tenth longer. A huge page has 2 MiB.

`ClearedAhead` lets the system clear the next part before it is used: a step that writes to a huge page for the first time
waits for all of it, on nested virtual machines 7.5 ms, as long as the step takes otherwise.

Pinned memory stays where it is, so that a CUDA device copies it at full speed. torch's own allocator of pinned memory
rounds a size up to the next power of two: 70 GB would take 128 GB. A block here takes its size, rounded up to whole pages.

Source: the allocation of SGLang's host cache (sglang, issue 36562), and torch.distributed's _state_dict_utils.
"""

import ctypes
import mmap
import os
import sys
import threading
import weakref
from contextlib import suppress
from typing import Protocol, Self

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


_MADV_POPULATE_WRITE = 23  # Linux 5.14: clears pages, and keeps the content of those that were written
_AHEAD_BYTES = 16 * 2**20
_CHUNK_BYTES = 2**21  # a huge page: other calls that map memory wait for one chunk
_NICE = 10


class ClearedAhead:
    """Keeps the next part of a block of memory ready for writing. Never changes what the block holds.

    A thread that yields to others does it, and ends with this object. If the system refuses (Linux before 5.14), parts are
    cleared when they are first written, as without this class.
    """

    def __init__(self, block: torch.Tensor, ahead_bytes: int = _AHEAD_BYTES) -> None:
        """`block` is what `mapped_memory` has returned: uint8 [num_bytes]. Call `start` then."""
        self._block = block
        self._ahead_bytes = ahead_bytes
        self._cleared = self._wanted = 0
        self._wake = threading.Event()

    def start(self) -> Self:
        """Starts the thread, unless the block is small or the system is not Linux. Call it once.

        It clears nothing before the first use is announced: an engine that starts has other work for its cores.
        """
        if sys.platform == "linux" and self._block.numel() > 2 * _CHUNK_BYTES:
            weakref.finalize(self, self._wake.set).atexit = False
            parts = weakref.ref(self), self._wake
            threading.Thread(target=_clear_ahead, args=parts, name="clear-memory", daemon=True).start()
        return self

    def used_up_to(self, num_bytes: int) -> None:
        """Says that the first `num_bytes` bytes are in use, or will be in a moment. Any thread may say so."""
        self._wanted = max(self._wanted, min(num_bytes + self._ahead_bytes, self._block.numel()))
        if self._wanted - self._cleared >= _CHUNK_BYTES:
            self._wake.set()

    def clear_chunk(self) -> bool:
        """Lets the system clear the next chunk. Returns whether one was wanted, and the system has done it."""
        start, end = self._cleared, min(self._cleared + _CHUNK_BYTES, self._block.numel())
        if start >= self._wanted:
            return False
        self._cleared = end
        address = ctypes.c_void_p(self._block.data_ptr() + start)
        status: int = ctypes.CDLL(None).madvise(address, ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE)
        return status == 0


def _clear_ahead(reference: "weakref.ref[ClearedAhead]", wake: threading.Event) -> None:
    """Clears what is wanted, until the object has gone."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    while (memory := reference()) is not None:
        while memory.clear_chunk():
            pass
        del memory  # so that it can go
        wake.wait()
        wake.clear()


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
