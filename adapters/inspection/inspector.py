"""Inspects uploaded adapters in separate worker processes, so that a harmful file cannot break the gateway.

Owns the worker processes, and the limits for the inspection of one file: address space, processor time and elapsed
time. A worker gets only the content of the uploaded files and the description of the model (such as its shapes). A
worker that exceeds a limit is killed, and a new worker replaces it. Never blocks the gateway's event loop.
"""

import asyncio
import os
import tempfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from threading import Lock
from typing import Any, NoReturn

from graftwork.adapters.inspection.process import InspectionProcess, WorkerEnded, WorkerTooSlow
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import Unavailable, ValidationFailed

_ATTEMPTS = 2
"""How often a file is tried. A worker may end for a reason that has nothing to do with the file."""


@dataclass(frozen=True, slots=True)
class InspectionLimits:
    """The most time and memory that the inspection of one uploaded adapter may use. Above a limit, the upload is
    refused.
    """

    deadline_s: float = 30.0
    """The most elapsed time in seconds. It is counted from the moment when the worker gets the file."""
    cpu_s: float = 20.0
    memory_bytes: int = 1024 * 1024 * 1024
    """The most address space of the worker in bytes, in addition to the size of the file. An idle worker uses about 110
    MB.
    """


@dataclass(frozen=True, slots=True)
class IdentifiedAdapter:
    """The result of inspecting an uploaded adapter: its digest, its ranks and the names of the modules that it changes."""

    digest: str
    r: int
    """The field `r` of the configuration, which is the default rank. `rank_pattern` may give a module another rank."""
    rank: int
    """The largest rank among the modules of the adapter."""
    target_modules: tuple[str, ...]


class AdapterInspector:
    """Validates uploaded adapters in worker processes, and computes their digests.

    Each worker inspects one upload at a time, and further uploads wait. A worker process starts when it is first
    needed.
    """

    def __init__(self, limits: InspectionLimits | None = None, num_workers: int = 2) -> None:
        self._limits = limits or InspectionLimits()
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="adapter-inspection")
        self._slots: SimpleQueue[InspectionProcess | None] = SimpleQueue()
        for _ in range(num_workers):
            self._slots.put(None)
        self._lock = Lock()
        self._live: set[InspectionProcess] = set()
        self._is_closed = False

    @property
    def worker_pids(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(worker.pid for worker in self._live))

    async def identify(self, config: bytes, weights: bytes, description: EngineDescription) -> IdentifiedAdapter:
        """Validates the two files of an uploaded adapter, and returns the adapter's digest and ranks.

        Raises ValidationFailed if a file is wrong, or if the inspection exceeds a limit. Raises Unavailable if no
        worker process can be started, or after `close`.
        """
        if self._is_closed:
            raise _closing()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._identify, config, weights, description)

    async def close(self) -> None:
        """Stops all workers. Inspections that are still running fail. A second call does nothing."""
        with self._lock:
            self._is_closed = True
            live = list(self._live)
        for worker in live:
            worker.interrupt()
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        with self._lock:
            live = list(self._live)
        for worker in live:
            self._discard(worker)

    def _identify(self, config: bytes, weights: bytes, description: EngineDescription) -> IdentifiedAdapter:
        order = {
            "config_bytes": len(config),
            "weights_bytes": len(weights),
            "cpu_s": self._limits.cpu_s,
            "memory_bytes": self._limits.memory_bytes + len(weights),
            "description": asdict(description),
        }
        with _as_file(config, weights) as descriptor:
            for attempt in range(_ATTEMPTS):
                try:
                    return self._read(self._ask(order, descriptor))
                except WorkerTooSlow:
                    self._refuse(f"took longer than {self._limits.deadline_s:g} s, or {self._limits.cpu_s:g} s of work")
                except WorkerEnded as ended:
                    if attempt + 1 == _ATTEMPTS:
                        self._refuse(f"ended the process that read them, twice ({ended.reason})")
        raise AssertionError("every attempt returns or raises")

    def _ask(self, order: dict[str, Any], descriptor: int) -> dict[str, Any]:
        """Sends the order to a worker, and returns the worker's answer.

        Keeps the worker for later files if it still works. There are as many workers as threads that call this method.
        """
        worker = self._slots.get()
        keep: InspectionProcess | None = None
        try:
            worker = worker or self._start()
            answer = worker.ask(order, descriptor, self._limits.deadline_s)
            keep = None if "exceeded" in answer else worker
            return answer
        finally:
            if worker is not None and keep is None:
                self._discard(worker)
            self._slots.put(keep)

    def _read(self, answer: dict[str, Any]) -> IdentifiedAdapter:
        match answer:
            case {"refused": str(message), "param": str() | None as param, "code": str(code)}:
                raise ValidationFailed(message, param=param, code=code)
            case {"exceeded": "memory"}:
                self._refuse(f"need more than {self._limits.memory_bytes} bytes of memory beside themselves")
            case {
                "identified": {
                    "digest": str(digest),
                    "r": int(r),
                    "rank": int(rank),
                    "target_modules": list(target_modules),
                }
            }:
                return IdentifiedAdapter(digest, r, rank, tuple(map(str, target_modules)))
        raise WorkerEnded("it answered what cannot be read")

    def _start(self) -> InspectionProcess:
        with self._lock:
            if self._is_closed:
                raise _closing()
        worker = InspectionProcess()
        with self._lock:
            self._live.add(worker)
        return worker

    def _discard(self, worker: InspectionProcess) -> None:
        with self._lock:
            self._live.discard(worker)
        worker.kill()

    def _refuse(self, what: str) -> NoReturn:
        if self._is_closed:
            raise _closing()
        message = f"weights: reading and checking these files {what}, which is above the limit: the adapter is refused."
        raise ValidationFailed(message, param="weights", code="inspection_limit_exceeded")


def _closing() -> Unavailable:
    return Unavailable("This gateway is shutting down: send the adapter again.", code="inspection_unavailable")


@contextmanager
def _as_file(config: bytes, weights: bytes) -> Generator[int]:
    """Writes both contents, one after the other, to an unnamed file, and yields its descriptor.

    The file is in memory if the system supports that.
    """
    if hasattr(os, "memfd_create"):
        opened = os.fdopen(os.memfd_create("adapter-upload"), "wb", buffering=0)
    else:
        opened = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed below, as the other is
    with opened as file:
        for content in (config, weights):
            view = memoryview(content)
            while view:
                view = view[file.write(view) :]
        yield file.fileno()
