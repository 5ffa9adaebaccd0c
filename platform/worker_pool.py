"""Runs jobs in worker processes, so that long jobs neither block the event loop nor enlarge this process.

Owns the form of a message, the time limit of a job and the turns of owners (tenants): one job of an owner at a time.
`worker_slots.py` owns the processes. Never runs a job in this process, and never starts a process before the first job.
Invariant: a worker that has much more memory after a job than at its start ends, and the pool replaces it.

    length: u64 LE ‖ kind: u8 ‖ marshal, or bytes as they are       both ways, on a socket pair; the first is the setup

`marshal` contains plain values only (texts, bytes, numbers, lists, objects), and to load them runs no code. Both ends of
the socket are this program.
"""

import asyncio
import marshal
import os
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from graftwork.platform.environment import time_zone
from graftwork.platform.errors import CapacityContended, GraftworkError, PayloadTooLarge, Unavailable, error_classes
from graftwork.platform.memory import free_large_blocks_at_once, give_memory_back, resident_bytes
from graftwork.platform.worker_slots import WorkerProcess, WorkerSlots, python_command

_HEAD = struct.Struct("<QB")
_PLAIN, _RAW = 0, 1
_STARTED_WITHIN_S = 60.0
_ATTEMPTS = 3
"""The most attempts of one job. A worker may end for a reason that has nothing to do with the job."""
_NICENESS = 10
"""The priority of a worker. The gateway and the engine use the processor first."""
_IDLE_S = 60.0
"""A worker ends after this many seconds without a job."""
_KEPT_BYTES = 64 << 20
"""A worker ends if it has this many bytes more than at its start."""


class WorkerPool:
    """The worker processes of one kind. Each starts when a job needs it."""

    def __init__(
        self,
        module: str,
        setup: Callable[[], Any],
        *,
        num_workers: int = 1,
        deadline_s: float = 30.0,
        most_waiting: int = 32,
    ) -> None:
        """`module` is the program of the workers, which calls `serve`. `setup` returns the plain data that it prepares.

        `deadline_s` is the most seconds of one job. `most_waiting` is the most unfinished jobs of one owner.
        """
        self._deadline_s = deadline_s
        self._most_waiting = most_waiting
        self._slots = WorkerSlots(
            lambda: _Worker(module, _Frame.of(setup())), _closing, num_workers, module.rpartition(".")[2]
        )
        self._num_jobs_by_owner: Counter[str] = Counter()
        self._turn_by_owner: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The ids of the processes that run now, in ascending order."""
        return self._slots.worker_pids

    async def run(self, owner: str, job: Any, *, pause_s: float = 0.0) -> Any:
        """Runs a job, which is plain data, and returns the worker's answer.

        The owner's next job starts at least `pause_s` seconds after the end of this job. If the caller is cancelled
        while a worker runs the job, the next one still waits for that end.
        Raises the worker's GraftworkError. Raises CapacityContended if the owner has too many unfinished jobs,
        PayloadTooLarge after the deadline, and Unavailable if no worker can run the job.
        """
        self._slots.check_open()
        if self._num_jobs_by_owner[owner] >= self._most_waiting:
            message = f"{self._most_waiting} of your long requests wait to be read: try again shortly."
            raise CapacityContended(message, retry_after_s=1.0)
        loop = asyncio.get_running_loop()
        self._num_jobs_by_owner[owner] += 1
        turn = self._turn_by_owner.setdefault(owner, asyncio.Lock())
        try:
            await turn.acquire()
        except BaseException:
            self._forget_job(owner)
            raise

        def end() -> None:
            self._forget_job(owner)
            loop.call_later(pause_s, turn.release)

        def ended() -> None:
            loop.call_soon_threadsafe(end)

        return await self._slots.run(lambda: self._run(job), ended)

    async def close(self) -> None:
        """Kills the workers. A running job raises Unavailable. May be called more than once."""
        await self._slots.close()

    def _forget_job(self, owner: str) -> None:
        self._num_jobs_by_owner[owner] -= 1
        if not self._num_jobs_by_owner[owner]:
            del self._num_jobs_by_owner[owner]

    def _run(self, job: Any) -> Any:
        """Runs a job on one of the pool's threads. There are as many workers as threads."""
        message = _Frame.of(job)
        for _ in range(_ATTEMPTS):
            try:
                with self._slots.take() as worker:
                    answer = worker.ask(message, self._deadline_s)
            except TimeoutError:
                too_slow = f"Reading this request took longer than {self._deadline_s:g} s: send less."
                raise PayloadTooLarge(too_slow) from None
            except OSError:  # the worker has ended; the next attempt starts another
                continue
            return _value(answer)
        raise Unavailable("The process that reads long requests ended: send this one again.", retry_after_s=1.0)


class _Worker(WorkerProcess):
    """One worker process, as the pool sees it."""

    def __init__(self, module: str, setup: "_Frame") -> None:
        super().__init__(python_command(module), time_zone() | {"TOKENIZERS_PARALLELISM": "false"})
        self._setup = setup

    def prepare(self) -> None:
        """Sends the setup and waits until the worker is ready. Raises Unavailable if that fails."""
        try:
            self.ask(self._setup, _STARTED_WITHIN_S)
        except OSError as error:
            message = f"The process that reads long requests did not start ({error})."
            raise Unavailable(message, retry_after_s=5.0) from error

    def ask(self, message: "_Frame", within_s: float) -> Any:
        """Sends one frame and returns the answer. Raises TimeoutError or OSError; after either, the worker is unusable."""
        deadline = time.monotonic() + within_s
        self.connection.settimeout(within_s)
        _send(self.connection, message)
        return _receive(self.connection, deadline)


def serve(prepare: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Runs a worker: receives the setup, and answers jobs with the function that `prepare` makes of the setup.

    Returns when the parent has ended, when no job comes in time, or when a job leaves too much memory in use.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    free_large_blocks_at_once()
    with suppress(EOFError, OSError):
        work = prepare(_receive(connection))
        _send(connection, _Frame.of(True))
        most_bytes = resident_bytes() + _KEPT_BYTES
        while True:
            _send(connection, _answer(work, _receive(connection, time.monotonic() + _IDLE_S)))
            if resident_bytes() > most_bytes:
                give_memory_back()
                if resident_bytes() > most_bytes:
                    return


@dataclass(frozen=True, slots=True)
class _Frame:
    """A message on the socket. Bytes are sent unchanged, so that a long body is not copied."""

    kind: int
    content: bytes

    @classmethod
    def of(cls, value: Any) -> "_Frame":
        return cls(_RAW, value) if isinstance(value, bytes) else cls(_PLAIN, marshal.dumps(value))


def _answer(work: Callable[[Any], Any], job: Any) -> _Frame:
    try:
        return _Frame.of({"value": work(job)})
    except GraftworkError as error:
        told = {"class": type(error).__name__, "message": error.message, "param": error.param, "code": error.code}
        return _Frame.of({"error": told | {"details": error.details, "retry_after_s": error.retry_after_s}})


def _value(answer: dict[str, Any]) -> Any:
    if "error" not in answer:
        return answer["value"]
    fields = dict(answer["error"])
    message = fields.pop("message")
    raise error_classes()[fields.pop("class")](message, **fields)


def _send(connection: socket.socket, frame: _Frame) -> None:
    connection.sendall(_HEAD.pack(len(frame.content), frame.kind))
    connection.sendall(frame.content)


def _receive(connection: socket.socket, deadline: float | None = None) -> Any:
    """Returns the next value. Raises TimeoutError after the deadline, and OSError if the other side has ended."""
    length, kind = _HEAD.unpack(_read(connection, _HEAD.size, deadline))
    content = _read(connection, length, deadline)
    return content if kind == _RAW else marshal.loads(content)


def _read(connection: socket.socket, length: int, deadline: float | None) -> bytearray:
    content = bytearray(length)
    view = memoryview(content)
    while view:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        num_bytes = connection.recv_into(view)
        if not num_bytes:
            raise ConnectionResetError("the other side has ended")
        view = view[num_bytes:]
    return content


def _closing() -> Unavailable:
    return Unavailable("This gateway is shutting down: send the request again.", retry_after_s=1.0)
