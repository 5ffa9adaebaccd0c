"""Copies adapters from the host to the device.

On a CPU a copy ends at once. On CUDA the engine loop never waits for a copy: a thread moves the bytes through two small
blocks of pinned memory, on a stream of its own, and tells the loop when they have arrived. The order is:

    compute stream:  … moves of frames | event A           steps …
    copy stream:                         waits for A | block 1 | block 2 | block 1 | … | event B
    copy thread:                                                                   waits for B, then tells the loop

So a copy never writes into frames that earlier work still reads or moves. The caller makes sure that nobody else uses or
moves the target before the loop is told.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from graftwork.engine.kv.transfer.system_memory import CudaRegistry, PinnedBlock
from graftwork.platform.errors import InternalFailure

_log = logging.getLogger(__name__)

_BLOCK_BYTES = 16 * 2**20
"""Bytes of one pinned block. At 25 GB/s it takes 0.7 ms to the device, so starting a copy costs little beside it."""
_NUM_BLOCKS = 2
"""While the device reads one block, the thread fills the other."""


@dataclass(frozen=True, slots=True)
class AdapterCopied:
    """Tells the engine loop that the copy of an adapter to the device has ended, or has failed."""

    digest: str
    failure: InternalFailure | None = None


class AdapterCopies(Protocol):
    """Copies adapters to the device."""

    def begin(self, digest: str, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Starts to copy an adapter. Returns True if the copy has ended already, else an AdapterCopied follows.

        source: [num_bytes] uint8 on the host, target: [num_bytes] uint8 on the device. Nothing else may write to either
        until the copy has ended, and work that starts later must not read the target.
        """
        ...

    def close(self) -> None:
        """Waits for the copies that have begun, and frees what they use."""
        ...


class DirectCopies:
    """Copies at once, on the caller's thread. For devices whose memory is the host's."""

    def begin(self, digest: str, source: torch.Tensor, target: torch.Tensor) -> bool:
        target.copy_(source)
        return True

    def close(self) -> None:
        """Does nothing, because no copy runs."""


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Waits on the host until the stream has reached this point."""
        ...


class CopyStream(Protocol):
    """A stream of copies beside the stream that computes. CudaCopyStream implements it."""

    def event_of_compute(self) -> Event:
        """Returns a point after all work that the calling thread has given to the compute stream so far."""
        ...

    def wait(self, event: Event) -> None:
        """Makes later copies of this stream wait for `event`. Does not wait on the host."""
        ...

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queues a copy from pinned memory to the device, and returns at once."""
        ...

    def event(self) -> Event:
        """Returns a point after all copies that were queued so far."""
        ...


class CudaCopyStream:
    """A CUDA stream of copies. It computes nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def event_of_compute(self) -> torch.cuda.Event:
        return self._record(torch.cuda.current_stream(self._device))

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def event(self) -> torch.cuda.Event:
        return self._record(self._stream)

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # A blocking event lets a waiting thread sleep.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


class StreamedCopies:
    """Copies on a stream and a thread of their own. One adapter is copied at a time, in the order of `begin`."""

    def __init__(
        self, stream: CopyStream, blocks: Sequence[PinnedBlock], deliver: Callable[[AdapterCopied], None]
    ) -> None:
        """Owns `blocks`. `deliver` is called on the copy thread, and must hand the message over to the loop."""
        self._stream = stream
        self._blocks = blocks
        self._deliver = deliver
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-copy")

    def begin(self, digest: str, source: torch.Tensor, target: torch.Tensor) -> bool:
        self._thread.submit(self._carry_out, digest, source, target, self._stream.event_of_compute())
        return False

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        for block in self._blocks:
            block.close()

    def _carry_out(self, digest: str, source: torch.Tensor, target: torch.Tensor, after: Event) -> None:
        try:
            self._copy(source, target, after)
        except Exception as error:  # noqa: BLE001 - whatever a copy meets, the requests that wait for it must hear of it
            _log.exception("adapter_copy_failed", extra={"digest": digest})
            failure = InternalFailure(f"Adapter {digest} could not be copied to the device: {type(error).__name__}.")
            self._deliver(AdapterCopied(digest, failure))
        else:
            self._deliver(AdapterCopied(digest))

    @torch.inference_mode()
    def _copy(self, source: torch.Tensor, target: torch.Tensor, after: Event) -> None:
        self._stream.wait(after)
        block_bytes, reads = len(self._blocks[0].data), list[Event]()
        try:
            for number, start in enumerate(range(0, len(source), block_bytes)):
                if number >= len(self._blocks):
                    reads[number - len(self._blocks)].synchronize()  # the device has read what the block held before
                piece = source[start : start + block_bytes]
                staged = self._blocks[number % len(self._blocks)].data[: len(piece)]
                staged.copy_(piece)
                self._stream.copy(staged, target[start : start + block_bytes])
                reads.append(self._stream.event())
        finally:
            if reads:
                reads[-1].synchronize()  # the target is free for others, even if the copy failed


def build_adapter_copies(device: torch.device, deliver: Callable[[AdapterCopied], None]) -> AdapterCopies:
    """Builds what copies adapters to this device. On CUDA it takes 32 MiB of pinned memory."""
    if device.type != "cuda":
        return DirectCopies()
    blocks = [PinnedBlock(_BLOCK_BYTES, CudaRegistry()) for _ in range(_NUM_BLOCKS)]
    return StreamedCopies(CudaCopyStream(device), blocks, deliver)
