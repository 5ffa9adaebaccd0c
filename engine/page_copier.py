"""Carries transfers out: one thread between device and host, one between host, device and disk.

Owns no page and decides nothing: every plan names what it touches, and all of it is leased until the report.
On CUDA the copies run on a stream of their own, which waits for the compute that wrote their sources and is waited
for before the report: what is reported has happened.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import torch

from graftwork.engine.attention import KvCache
from graftwork.engine.host_pages import HostPages
from graftwork.engine.page_key import PageKey
from graftwork.engine.transfers import Report, TransferDone, TransferKind, TransferPlan
from graftwork.platform.clock import Clock

_log = logging.getLogger(__name__)


class PageFiles(Protocol):
    """The disk tier, as far as bytes are concerned."""

    def write(self, owner: bytes, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Store a run of pages; returns how many are new."""
        ...

    def read_run(self, keys: Sequence[PageKey], into: memoryview) -> int:
        """Read consecutive pages into one run of bytes; returns how many are good, counted from the first."""
        ...

    def close(self) -> None:
        """Let another process have them."""
        ...


class PageCopier:
    """A CopyEngine over real memory. Reports come on its own threads."""

    def __init__(self, cache: KvCache, host: HostPages, files: PageFiles | None, report: Report, clock: Clock) -> None:
        self._cache = cache
        self._host = host
        self._files = files
        self._report = report
        self._clock = clock
        self._lanes = {True: _Lane("kv-copies", self._carry_out), False: _Lane("kv-files", self._carry_out)}

    def begin(self, plan: TransferPlan) -> None:
        """Queue a plan behind those of its lane."""
        self._lanes[plan.kind in (TransferKind.SAVE, TransferKind.LOAD)].put(plan)

    def close(self) -> None:
        """Carry out what has begun, and end the threads."""
        for lane in self._lanes.values():
            lane.close()
        if self._files is not None:
            self._files.close()

    def _carry_out(self, plan: TransferPlan) -> None:
        started = self._clock.monotonic()
        try:
            num_good = self._copy(plan)
        except Exception:  # noqa: BLE001 - a copy that cannot be made is a copy that failed: its pages are recomputed
            _log.exception("transfer_failed", extra={"kind": plan.kind, "pages": len(plan.moves)})
            num_good = 0
        self._report(TransferDone(plan, num_good, self._clock.monotonic() - started))

    @torch.inference_mode()
    def _copy(self, plan: TransferPlan) -> int:
        if self._cache.device.type != "cuda":
            return self._copy_now(plan)
        with torch.cuda.stream(torch.cuda.Stream(self._cache.device)):  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream(self._cache.device))
            num_good = self._copy_now(plan)
            torch.cuda.current_stream().synchronize()
        return num_good

    def _copy_now(self, plan: TransferPlan) -> int:
        if plan.kind is TransferKind.STORE:
            return self._store(plan)
        if plan.kind is TransferKind.FETCH:
            return self._fetch(plan)
        for move in plan.moves:
            assert move.source is not None
            assert move.target is not None
            if plan.kind is TransferKind.SAVE:
                self._cache.read_page(move.source, self._host.page(move.target))
            else:
                self._cache.write_page(move.target, self._host.page(move.source))
        return len(plan.moves)

    def _store(self, plan: TransferPlan) -> int:
        """One file for each run of pages of one path."""
        assert self._files is not None
        start = 0
        for end in range(1, len(plan.nodes) + 1):
            if end < len(plan.nodes) and plan.nodes[end].parent is plan.nodes[end - 1]:
                continue
            run = plan.moves[start:end]
            pages = [self._host.bytes_of(move.source) for move in run if move.source is not None]
            self._files.write(hashlib.sha256(plan.nodes[start].owner).digest(), [move.key for move in run], pages)
            start = end
        return len(plan.moves)

    def _fetch(self, plan: TransferPlan) -> int:
        assert self._files is not None
        scratch = HostPages(len(plan.moves), self._cache.page_shape, self._cache.dtype, pinned=False)
        num_good = self._files.read_run([move.key for move in plan.moves], scratch.all_bytes())
        for index, move in enumerate(plan.moves[:num_good]):
            assert move.target is not None
            self._cache.write_page(move.target, scratch.page(index))
        return num_good


class _Lane:
    """A thread that works through plans in their order."""

    def __init__(self, name: str, carry_out: Callable[[TransferPlan], None]) -> None:
        self._plans: SimpleQueue[TransferPlan | None] = SimpleQueue()
        self._carry_out = carry_out
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, plan: TransferPlan) -> None:
        self._plans.put(plan)

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            self._carry_out(plan)
