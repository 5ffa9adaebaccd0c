"""Inspects uploaded adapters in separate worker processes, so that a harmful file cannot break the gateway.

Owns what the workers are asked, and the limits for the inspection of one file: address space, processor time and
elapsed time. A worker gets only the content of the uploaded files and the description of the model (such as its shapes). A
worker that exceeds a limit is killed, and a new worker replaces it. Never blocks the gateway's event loop.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, NoReturn, TypeVar

from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.inspection.process import InspectionProcess, WorkerEnded, WorkerTooSlow
from graftwork.adapters.inspection.turns import InspectionTurns
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import Unavailable, ValidationFailed
from graftwork.platform.worker_slots import WorkerSlots

Result = TypeVar("Result")

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
        """Validates the two files of an uploaded adapter, and returns the adapter's digest and ranks. `owner` is the
        tenant.

        Raises ValidationFailed if a file is wrong, or if the inspection exceeds a limit. Raises Unavailable if no
        worker process can be started, or after `close`. The caller may close the file even while a cancelled inspection
        still runs.
        """
        return await self._run(
            owner, (files.weights,), lambda opened: self._identify(files.config, opened[0], description)
        )

    @asynccontextmanager
    async def peft_files(
        self, owner: str, files: AdapterFiles, description: EngineDescription
    ) -> AsyncGenerator[AdapterFiles]:
        """Yields the two files as PEFT would have saved them: a GGUF file without a configuration is converted, into a
        temporary file, and others are yielded as they are. Raises the errors of `identify`.
        """
        if files.config or not await asyncio.to_thread(files.is_gguf):
            yield files
            return
        with tempfile.TemporaryFile() as weights:
            config = await self._run(
                owner, (files.weights, weights), lambda opened: self._convert(opened[0], opened[1], description)
            )
            yield AdapterFiles(config, weights)

    async def close(self) -> None:
        """Stops all workers. Inspections that are still running fail. A second call does nothing."""
        await self._slots.close()

    async def _run(self, owner: str, files: Sequence[BinaryIO], work: Callable[[tuple[int, ...]], Result]) -> Result:
        """Does work with a worker on a thread, in the owner's turn. `work` gets descriptors of the files of its own, so the
        caller may close the files even while a cancelled call still runs.
        """
        self._slots.check_open()
        await self._turns.acquire(owner)
        try:
            opened = tuple(os.dup(file.fileno()) for file in files)
        except BaseException:
            self._turns.release(owner)
            raise

        def end() -> None:
            for descriptor in opened:
                os.close(descriptor)
            self._turns.release(owner)

        return await self._slots.run(lambda: work(opened), end)

    def _convert(self, gguf: int, weights: int, description: EngineDescription) -> bytes:
        """Asks a worker to write the weights of a GGUF file to `weights`. Returns the configuration."""
        order = self._order(gguf, description) | {"converts": True}

        def ask() -> bytes:
            os.ftruncate(weights, 0)  # what an earlier attempt has left
            os.lseek(weights, 0, os.SEEK_SET)
            return _read_converted(self._ask(order, (gguf, weights)))

        return self._tried(ask)

    def _identify(self, config: bytes, weights: int, description: EngineDescription) -> IdentifiedAdapter:
        """Asks a worker. `weights` is the descriptor of the open file."""
        order = self._order(weights, description) | {"config_bytes": len(config)}
        with _as_file(config) as config_file:
            return self._tried(lambda: _read_identified(self._ask(order, (config_file, weights))))

    def _order(self, weights: int, description: EngineDescription) -> dict[str, Any]:
        weights_bytes = os.fstat(weights).st_size
        return {
            "weights_bytes": weights_bytes,
            "cpu_s": self._limits.cpu_s,
            "memory_bytes": self._limits.memory_bytes + weights_bytes,
            "description": asdict(description),
        }

    def _tried(self, ask: Callable[[], Result]) -> Result:
        """Calls `ask` until a worker has answered. Refuses files that cost too much, or that end every worker."""
        for attempt in range(_ATTEMPTS):
            try:
                return ask()
            except WorkerTooSlow:
                self._refuse(f"took longer than {self._limits.deadline_s:g} s, or {self._limits.cpu_s:g} s of work")
            except WorkerEnded as ended:
                if attempt + 1 == _ATTEMPTS:
                    self._refuse(f"ended the process that read them, twice ({ended.reason})")
        raise AssertionError("every attempt returns or raises")

    def _ask(self, order: dict[str, Any], descriptors: tuple[int, int]) -> dict[str, Any]:
        """Sends the order to a worker, and reads the worker's answer. A worker that exceeded its memory is replaced."""
        with self._slots.take() as worker:
            answer = worker.ask(order, descriptors, self._limits.deadline_s)
            if answer == {"exceeded": "memory"}:
                self._refuse(f"need more than {self._limits.memory_bytes} bytes of memory beside themselves")
        match answer:
            case {"refused": str(message), "param": str() | None as param, "code": str(code)}:
                raise ValidationFailed(message, param=param, code=code)
        return answer

    def _refuse(self, what: str) -> NoReturn:
        self._slots.check_open()
        message = f"weights: reading and checking these files {what}, which is above the limit: the adapter is refused."
        raise ValidationFailed(message, param="weights", code="inspection_limit_exceeded")


def _read_identified(answer: dict[str, Any]) -> IdentifiedAdapter:
    match answer:
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


def _read_converted(answer: dict[str, Any]) -> bytes:
    match answer:
        case {"converted": str(config)}:
            return config.encode()
    raise WorkerEnded("it answered what cannot be read")


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
