"""Copies KV pages on two threads: one copies between device and host, the other reads and writes the disk.

Owns the two threads and their queues of transfer plans. Never chooses or owns a page: a plan names all pages that it
uses. The planner marks these pages as in flight (so that nothing else reuses them) until the end of the plan is
reported. Each thread runs urgent plans first.

On CUDA the copies run on a stream of their own. This stream first waits until the compute stream has written the pages.
The end of a plan is reported only after its copies have ended on the stream. A step may use pages from the host
earlier: their layers are copied in groups, and the step waits for each layer (see LayerGates).
"""

import logging
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import count
from queue import PriorityQueue
from threading import Thread
from typing import Protocol

import torch

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.index.radix_tree import Node
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.kv.transfer.plan import (
    LayerGate,
    LoadReadable,
    PageMove,
    Report,
    StreamWait,
    TransferDone,
    TransferKind,
    TransferPlan,
    domain_digest,
)
from graftwork.platform.clock import Clock

_log = logging.getLogger(__name__)

_LOAD_GROUPS = 4
"""The number of groups into which a load divides the layers.

With more groups a step begins sooner, but each page needs more copy calls: two per group.
"""
_FETCH_BYTES = 16 * 2**20
"""Bytes that are read from the disk before they are copied to the device."""


class DiskIO(Protocol):
    """Reads and writes pages on disk. All methods may wait for the disk."""

    def write(
        self, domain: bytes, keys: Sequence[PageKey], pages: Sequence[memoryview], above: Sequence[PageKey] = ()
    ) -> int:
        """Stores pages that follow each other in one prompt. Returns how many of them were not stored before.

        `domain` is the digest of the domain (usually one tenant) that the pages are charged to. `above` are the keys of
        all pages before `keys` in the prompt.
        """
        ...

    def read_pages(self, keys: Sequence[PageKey], into: memoryview) -> int:
        """Reads consecutive pages into one buffer. Stops at the first page that cannot be read or is damaged.

        Returns the number of pages that were read correctly.
        """
        ...

    def sweep(self) -> None:
        """Removes each file from the disk if the store has forgotten all pages in it."""
        ...

    def close(self) -> None:
        """Releases the lock on the disk store's folder, so that another process may use the folder."""
        ...


class PageCopier:
    """The CopyEngine that copies pages in device memory, host memory and files. It calls `report` on its own threads."""

    def __init__(
        self,
        cache: KvCache,
        host: HostMemory,
        disk: DiskIO | None,
        report: Report,
        clock: Clock,
        *,
        overlaps_loads: bool = False,
    ) -> None:
        """If `overlaps_loads` is true, a load from the host is reported as readable when it begins."""
        self._cache = cache
        self._host = host
        self._disk = disk
        self._report = report
        self._clock = clock
        self._overlaps_loads = overlaps_loads
        self._device_thread, self._disk_thread = _CopyThread("kv-copies"), _CopyThread("kv-files")

    def begin(self, plan: TransferPlan) -> None:
        """Queues the transfer `plan` for one of the two threads.

        Copies to the device are urgent: they run before copies to the host and to disk.
        """
        thread = self._device_thread if plan.kind in (TransferKind.SAVE, TransferKind.LOAD) else self._disk_thread
        is_waited_for = plan.kind in (TransferKind.LOAD, TransferKind.FETCH)
        thread.put(_Priority.URGENT if is_waited_for else _Priority.BACKGROUND, lambda: self._carry_out(plan))

    def sweep(self) -> None:
        """Queues a cleanup of the disk: it removes each file if the disk store has forgotten all pages in this file.

        The cleanup happens after all writes that are queued already.
        """
        if self._disk is not None:
            self._disk_thread.put(_Priority.BACKGROUND, self._disk.sweep)

    def close(self) -> None:
        """Runs all queued plans, ends the two threads, and closes the disk store and the host memory."""
        self._device_thread.close()
        self._disk_thread.close()
        self._host.close()
        if self._disk is not None:
            self._disk.close()

    def _carry_out(self, plan: TransferPlan) -> None:
        started = self._clock.monotonic()
        gate = self._announce(plan)
        try:
            num_good = self._copy(plan, gate)
        except Exception:  # noqa: BLE001 - a copy that cannot be made is a copy that failed: its pages are recomputed
            _log.exception("transfer_failed", extra={"kind": plan.kind, "pages": len(plan.moves)})
            num_good = 0
            if gate is not None:
                gate.fail()
        self._report(TransferDone(plan, num_good, self._clock.monotonic() - started))

    def _announce(self, plan: TransferPlan) -> LayerGate | None:
        """Reports a load from the host as readable and returns its gate, if steps may use loads before they end.

        Else returns None.
        """
        if not self._overlaps_loads or plan.kind is not TransferKind.LOAD:
            return None
        gate = LayerGate(self._cache.num_layers)
        self._report(LoadReadable(plan, gate))
        return gate

    @torch.inference_mode()
    def _copy(self, plan: TransferPlan, gate: LayerGate | None) -> int:
        if self._cache.device.type != "cuda":
            return self._copy_now(plan, gate)
        with torch.cuda.stream(torch.cuda.Stream(self._cache.device)):  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream(self._cache.device))
            num_good = self._copy_now(plan, gate)
            torch.cuda.current_stream().synchronize()
        return num_good

    def _copy_now(self, plan: TransferPlan, gate: LayerGate | None) -> int:
        if plan.kind is TransferKind.STORE:
            return self._store(plan)
        if plan.kind is TransferKind.FETCH:
            return self._fetch(plan)
        if gate is not None:
            return self._load_by_layers(plan, gate)
        for move in plan.moves:
            assert move.source is not None
            assert move.target is not None
            if plan.kind is TransferKind.SAVE:
                self._cache.read_page(move.source, self._host.page(move.target))
            else:
                self._cache.write_page(move.target, self._host.page(move.source))
        return len(plan.moves)

    def _load_by_layers(self, plan: TransferPlan, gate: LayerGate) -> int:
        num_layers = self._cache.num_layers
        step = -(-num_layers // _LOAD_GROUPS)
        for start in range(0, num_layers, step):
            layers = range(start, min(start + step, num_layers))
            for move in plan.moves:
                assert move.source is not None
                assert move.target is not None
                self._cache.write_layers(move.target, self._host.page(move.source), layers)
            gate.open_layers(layers.stop, self._stream_wait())
        return len(plan.moves)

    def _stream_wait(self) -> StreamWait:
        """Returns a function that makes the caller's stream wait for all copies that this thread has queued so far."""
        if self._cache.device.type != "cuda":
            return _no_wait
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.wait

    def _store(self, plan: TransferPlan) -> int:
        """Writes one file for each run of consecutive pages of one domain."""
        start = 0
        for end in range(1, len(plan.nodes) + 1):
            if end == len(plan.nodes) or not _is_next(plan.nodes[end - 1], plan.nodes[end]):
                self._store_file(plan.nodes[start:end], plan.moves[start:end])
                start = end
        return len(plan.moves)

    def _store_file(self, nodes: Sequence[Node], moves: Sequence[PageMove]) -> None:
        assert self._disk is not None
        pages = [self._host.bytes_of(move.source) for move in moves if move.source is not None]
        keys = [move.key for move in moves]
        self._disk.write(domain_digest(nodes[0].domain), keys, pages, _keys_above(nodes[0]))

    def _fetch(self, plan: TransferPlan) -> int:
        """Copies pages from the disk to the device. Returns how many are correct, counted from the first.

        Reads a limited number of pages at a time, because the host's budget does not include the buffer.
        """
        assert self._disk is not None
        at_once = min(max(_FETCH_BYTES // self._host.page_bytes, 1), len(plan.moves))
        scratch = HostMemory(at_once, self._cache.page_shape, self._cache.dtype)
        for start in range(0, len(plan.moves), at_once):
            moves = plan.moves[start : start + at_once]
            space = scratch.all_bytes()[: len(moves) * scratch.page_bytes]
            num_good = self._disk.read_pages([move.key for move in moves], space)
            for index, move in enumerate(moves[:num_good]):
                assert move.target is not None
                self._cache.write_page(move.target, scratch.page(index))
            if num_good < len(moves):
                return start + num_good
        return len(plan.moves)


def _no_wait() -> None:
    """Does nothing: without CUDA a copy is complete when its call returns."""


class _Priority(IntEnum):
    """The order of jobs on a thread. The lowest number runs first."""

    URGENT = 0
    """The priority of a job that a request waits for."""
    BACKGROUND = 1
    SHUTDOWN = 2


class _CopyThread:
    """Runs jobs by priority on one thread. Jobs of the same priority keep their order. No job may raise.

    Plans may run in any order, because no page is a source of one queued plan and a target of another.
    """

    def __init__(self, name: str) -> None:
        self._jobs: PriorityQueue[tuple[_Priority, int, Callable[[], None] | None]] = PriorityQueue()
        self._numbers = count()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, priority: _Priority, job: Callable[[], None] | None) -> None:
        self._jobs.put((priority, next(self._numbers), job))

    def close(self) -> None:
        self.put(_Priority.SHUTDOWN, None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            job()


def _is_next(node: Node, following: Node) -> bool:
    """Returns whether two pages may be in the same file: both have the same domain, and one follows the other or is that
    of a windowed layer group.
    """
    return (following.parent is node or following.window_group is not None) and following.domain == node.domain


def _keys_above(node: Node) -> list[PageKey]:
    """Returns the keys of all pages before a page, first page first."""
    keys: list[PageKey] = []
    while node.parent is not None:
        node = node.parent
        keys.append(node.key)
    return keys[::-1]
