"""Starts, lends, replaces and ends the worker processes of one pool.

Owns the threads that talk to the workers, the set of running workers, and what `close` does. A pool has as many slots
as threads; each slot holds one worker, or none before its first job. Never knows what a worker is asked.
Invariant: after `close`, no worker runs, also none that was just starting.

    run(job) ──► thread: with take() as worker: worker.ask(…)      an error in the block ends this worker
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread, Timer
from typing import Generic, TypeVar

import graftwork
from graftwork.platform.errors import Unavailable

T = TypeVar("T")
_GRACE_S = 10.0
"""The seconds that a process may take to end after its parent has ended."""


class WorkerProcess:
    """One worker process, and the socket through which this process talks to it. The methods may block their thread."""

    def __init__(self, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
        """Starts a process. Its last argument is the number of its end of the socket. Raises OSError."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env={"PYTHONPATH": str(Path(graftwork.__file__).parent.parent), **environment},
                    start_new_session=True,  # a Ctrl-C at the terminal is for the gateway, which then ends the worker
                )
            except OSError:
                self.connection.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def prepare(self) -> None:
        """Waits until the worker is ready for its first job. Raises Unavailable if that fails."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Ends the process. A thread that waits for its answer gets an error, and must still call `kill`."""
        self._process.kill()

    def kill(self) -> None:
        """Ends the process and closes the socket. May be called more than once."""
        self._process.kill()
        self._process.wait()
        self.connection.close()

    def end(self) -> int:
        """Ends the process if it still runs, and returns its exit status; minus the number of a signal that ended it."""
        self._process.kill()
        return self._process.wait()


W = TypeVar("W", bound=WorkerProcess)


class WorkerSlots(Generic[W]):
    """The workers of one pool. Each starts when a job needs it."""

    def __init__(self, start: Callable[[], W], closed: Callable[[], Unavailable], num_workers: int, name: str) -> None:
        """`start` starts the process of a worker. `closed` makes the error of jobs after `close`."""
        self._start = start
        self._closed = closed
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix=name)
        self._slots: SimpleQueue[W | None] = SimpleQueue()
        for _ in range(num_workers):
            self._slots.put(None)
        self._lock = Lock()
        self._starting: set[W] = set()
        self._ready: set[W] = set()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The ids of the workers that are ready for jobs or run one, in ascending order."""
        with self._lock:
            return tuple(sorted(worker.pid for worker in self._ready))

    def check_open(self) -> None:
        """Raises Unavailable after `close`."""
        if self._is_closed:
            raise self._closed()

    async def run(self, job: Callable[[], T], ended: Callable[[], None]) -> T:
        """Runs a job on one of the threads. Raises Unavailable after `close`.

        Calls `ended` once, also after an error, when no thread runs the job any more. This may be on another thread, and
        long after the caller was cancelled.
        """
        return await asyncio.wrap_future(self._submitted(job, ended))  # a variable would close a cycle with the error

    @contextmanager
    def take(self) -> Generator[W]:
        """Waits for a free slot, and lends its worker for the `with` block. Starts the worker if the slot has none.

        An error in the block ends the worker; the next job gets another. Call this only on a thread of `run`. Raises
        Unavailable if the worker does not start, and after `close`.
        """
        worker = self._slots.get()
        kept: W | None = None
        try:
            self.check_open()
            worker = worker or self._started()
            yield worker
            kept = worker
        finally:
            if worker is not None and kept is None:
                self._discard(worker)
            self._slots.put(kept)

    async def close(self) -> None:
        """Ends all workers, and waits for the threads. Jobs that run or wait fail. May be called more than once."""
        with self._lock:
            self._is_closed = True
        for worker in self._running():
            worker.interrupt()
        await asyncio.to_thread(self._threads.shutdown)
        for worker in self._running():
            self._discard(worker)

    def _submitted(self, job: Callable[[], T], ended: Callable[[], None]) -> "Future[T]":
        try:
            with self._lock:
                self.check_open()
                future = self._threads.submit(job)
        except BaseException:
            ended()
            raise
        future.add_done_callback(lambda _: ended())
        return future

    def _running(self) -> list[W]:
        with self._lock:
            return [*self._starting, *self._ready]

    def _started(self) -> W:
        worker = self._start()
        with self._lock:
            self._starting.add(worker)
        try:
            self.check_open()  # `close` ends only the workers that it finds
            worker.prepare()
            with self._lock:
                self._starting.discard(worker)
                self._ready.add(worker)
        except BaseException:
            self._discard(worker)
            self.check_open()
            raise
        return worker

    def _discard(self, worker: W) -> None:
        with self._lock:
            self._starting.discard(worker)
            self._ready.discard(worker)
        worker.kill()


def python_command(module: str) -> tuple[str, ...]:
    """Returns the command that runs a module of this program as a worker."""
    return (sys.executable, "-P", "-s", "-m", module)


def watch_parent(lifeline: int) -> None:
    """Starts a thread that ends this process when the writer of the pipe `lifeline` has closed it, or has ended.

    The thread sends SIGTERM first, and ends the process at once if that takes too long.
    """
    Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()


def _end_with_parent(lifeline: int) -> None:
    while os.read(lifeline, 1024):
        continue
    Timer(_GRACE_S, os._exit, args=(1,)).start()
    os.kill(os.getpid(), signal.SIGTERM)


def how_it_ended(status: int) -> str:
    """Returns a text that says how a process ended. `status` is what `WorkerProcess.end` returned."""
    return f"it exited with status {status}" if status >= 0 else f"it was ended by {signal.Signals(-status).name}"
