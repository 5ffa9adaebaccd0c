"""Inspects uploaded adapters in separate worker processes, so that a harmful file cannot break the gateway.

Owns what the workers are asked, and the limits for the inspection of one file: address space, processor time and
elapsed time. A worker gets only the content of the uploaded files and the description of the model (such as its shapes). A
worker that exceeds a limit is killed, and a new worker replaces it. Never blocks the gateway's event loop.
"""

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.inspection.process import InspectionProcess, WorkerEnded, WorkerTooSlow
from graftwork.adapters.inspection.turns import InspectionTurns
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import Unavailable, ValidationFailed
from graftwork.platform.worker_slots import WorkerSlots

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

    Each worker inspects one upload at a time, and further uploads wait; their tenants have the workers in turn. A worker
    process starts when it is first needed.
    """

    def __init__(self, limits: InspectionLimits | None = None, num_workers: int = 2) -> None:
        self._limits = limits or InspectionLimits()
        self._slots = WorkerSlots(InspectionProcess, _closing, num_workers, "adapter-inspection")
        self._turns = InspectionTurns(num_workers)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return self._slots.worker_pids

    async def identify(self, owner: str, files: AdapterFiles, description: EngineDescription) -> IdentifiedAdapter:
        """Validates the two files of an uploaded adapter, and returns the adapter's digest and ranks. `owner` is the tenant.

        Raises ValidationFailed if a file is wrong, or if the inspection exceeds a limit. Raises Unavailable if no
        worker process can be started, or after `close`. The caller may close the file even while a cancelled inspection
        still runs.
        """
        self._slots.check_open()
        await self._turns.acquire(owner)
        try:
            weights = os.dup(files.weights.fileno())
        except BaseException:
            self._turns.release(owner)
            raise

        def end() -> None:
            os.close(weights)
            self._turns.release(owner)

        return await self._slots.run(lambda: self._identify(files.config, weights, description), end)

    async def close(self) -> None:
        """Stops all workers. Inspections that are still running fail. A second call does nothing."""
        await self._slots.close()

    def _identify(self, config: bytes, weights: int, description: EngineDescription) -> IdentifiedAdapter:
        """Asks a worker. `weights` is the descriptor of the open file."""
        weights_bytes = os.fstat(weights).st_size
        order = {
            "config_bytes": len(config),
            "weights_bytes": weights_bytes,
            "cpu_s": self._limits.cpu_s,
            "memory_bytes": self._limits.memory_bytes + weights_bytes,
            "description": asdict(description),
        }
        with _as_file(config) as config_file:
            for attempt in range(_ATTEMPTS):
                try:
                    return self._ask(order, (config_file, weights))
                except WorkerTooSlow:
                    self._refuse(f"took longer than {self._limits.deadline_s:g} s, or {self._limits.cpu_s:g} s of work")
                except WorkerEnded as ended:
                    if attempt + 1 == _ATTEMPTS:
                        self._refuse(f"ended the process that read them, twice ({ended.reason})")
        raise AssertionError("every attempt returns or raises")

    def _ask(self, order: dict[str, Any], descriptors: tuple[int, int]) -> IdentifiedAdapter:
        """Sends the order to a worker, and reads the worker's answer. A worker that exceeded its memory is replaced."""
        with self._slots.take() as worker:
            answer = worker.ask(order, descriptors, self._limits.deadline_s)
            if answer == {"exceeded": "memory"}:
                self._refuse(f"need more than {self._limits.memory_bytes} bytes of memory beside themselves")
        return self._read(answer)

    def _read(self, answer: dict[str, Any]) -> IdentifiedAdapter:
        match answer:
            case {"refused": str(message), "param": str() | None as param, "code": str(code)}:
                raise ValidationFailed(message, param=param, code=code)
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

    def _refuse(self, what: str) -> NoReturn:
        self._slots.check_open()
        message = f"weights: reading and checking these files {what}, which is above the limit: the adapter is refused."
        raise ValidationFailed(message, param="weights", code="inspection_limit_exceeded")


def _closing() -> Unavailable:
    return Unavailable("This gateway is shutting down: send the adapter again.", code="inspection_unavailable")


@contextmanager
def _as_file(content: bytes) -> Generator[int]:
    """Writes `content` to an unnamed file, and yields its descriptor.

    The file is in memory if the system supports that.
    """
    if hasattr(os, "memfd_create"):
        opened = os.fdopen(os.memfd_create("adapter-config"), "wb", buffering=0)
    else:
        opened = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed below, as the other is
    with opened as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        yield file.fileno()
