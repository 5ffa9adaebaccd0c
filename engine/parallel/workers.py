"""Starts the worker processes of a tensor-parallel engine, sends them commands, and notices when one of them ends.

Rank 0 is the engine's own process. It has the only scheduler, page pool and prefix tree, and writes to each other rank
what to do. A worker ends when its pipe from rank 0 closes, so no worker outlives the engine. If a worker ends first, the
engine cannot compute any more: `on_lost` is called once, with the cause.
"""

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, Thread
from typing import IO, Any

from graftwork.engine.parallel.commands import DiskReport, Envelope, disk_report_of, receive
from graftwork.platform.errors import InternalFailure, InvalidRequest

_log = logging.getLogger(__name__)


class WorkerLost(Exception):
    """A worker of this engine has ended or failed, so no step can be computed any more."""


@dataclass(frozen=True, slots=True)
class WorkerLink:
    """The connection of rank 0 to one worker: two pipes, and how to learn why the worker has ended."""

    commands: IO[bytes]
    reports: IO[bytes]
    wait: Callable[[], str]
    """Waits for the end of the worker. Returns how it ended, as the end of a sentence that begins with its name."""


StartWorker = Callable[[int], WorkerLink]
"""Starts the worker of a rank."""


def start_process(rank: int) -> WorkerLink:
    """Starts the worker of a rank as a process of its own, which Ctrl-C in a terminal does not reach."""
    process = subprocess.Popen(
        [sys.executable, "-m", "graftwork.engine.build.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return WorkerLink(process.stdin, process.stdout, lambda: f"ended with status {process.wait()}")


class Workers:
    """The ranks above 0 of one engine, as rank 0 sees them.

    Commands are sent by the thread of the engine's loop. Reports are read by one thread for each worker.
    """

    def __init__(self, links: Sequence[WorkerLink]) -> None:
        """`links` are those of the ranks 1, 2, … in order. The workers must have been started just now."""
        self._links = links
        self._lock = Lock()
        self._is_closing = False
        self._loss: str | None = None
        self._kept: list[object] = []
        self._threads: list[Thread] = []
        self.on_transfer: Callable[[int, int], None] = lambda number, num_good: None
        """Called on a reading thread when a worker has ended a transfer: its number, and how many pages are good."""
        self.on_lost: Callable[[str], None] = lambda cause: None
        """Called once, on a reading thread, if a worker ends before `close`."""
        self.disks: dict[int, DiskReport] = {}
        """By rank: what the worker said about its disk at the end of its last transfer."""

    @property
    def num_workers(self) -> int:
        return len(self._links)

    def introduce(self, orders: Mapping[str, Any]) -> None:
        """Sends each worker its orders: the settings of the engine, and its own rank."""
        for rank, link in enumerate(self._links, start=1):
            self._write(link, Envelope("orders", {**orders, "rank": rank}).encoded())

    def await_reports(self) -> list[dict[str, Any]]:
        """Waits for the next report of all workers, while they build their parts of the engine. Returns the reports.

        Raises InvalidRequest with a worker's own words if it cannot serve, and InternalFailure if it ended.
        """
        return [self._next_report(rank, link) for rank, link in enumerate(self._links, start=1)]

    def watch(self) -> None:
        """Starts the threads that read the workers' reports."""
        for rank, link in enumerate(self._links, start=1):
            thread = Thread(target=self._read, args=(rank, link), name=f"rank-{rank}-reports", daemon=True)
            thread.start()
            self._threads.append(thread)

    def send(self, command: Envelope, keeping: object = None) -> None:
        """Sends one command to all workers. `keeping` lives until they have surely carried it out."""
        content = command.encoded()
        with self._lock:
            if keeping is not None:
                self._kept.append(keeping)
            for link in self._links:
                self._write(link, content)

    def send_each(self, commands: Sequence[Envelope], keeping: object = None) -> None:
        """Sends each worker a command of its own, in the order of ranks. See `send`."""
        with self._lock:
            self._kept.append(keeping)
            for link, command in zip(self._links, commands, strict=True):
                self._write(link, command.encoded())

    def commands_done(self) -> None:
        """Frees what was kept for commands. Must be called only when a step has landed that was sent after them."""
        with self._lock:
            self._kept.clear()

    def check(self) -> None:
        """Raises WorkerLost if a worker has ended or failed."""
        if self._loss is not None:
            raise WorkerLost(self._loss)

    def abandon(self) -> None:
        """Closes the pipes of workers that were not watched yet, so that they end. Does not wait for their end."""
        for link in self._links:
            with contextlib.suppress(BrokenPipeError):
                link.commands.close()
            link.reports.close()

    def close(self) -> None:
        """Lets the workers carry out all commands, ends them, and waits for their end."""
        with self._lock:
            self._is_closing = True
        for link in self._links:
            self._write(link, Envelope("stop").encoded())
            link.commands.close()
        for thread in self._threads:
            thread.join()
        for link in self._links:
            link.wait()
            link.reports.close()

    def _next_report(self, rank: int, link: WorkerLink) -> dict[str, Any]:
        report = receive(link.reports)
        if report is None:
            raise InternalFailure(f"The worker of rank {rank} {link.wait()} before it was ready; its log says why.")
        if report.kind == "refused":
            raise InvalidRequest(f"Rank {rank}: {report.values['message']}", param=report.values["param"])
        if report.kind == "failed":
            raise InternalFailure(f"The worker of rank {rank} could not start: {report.values['cause']}")
        return report.values

    def _read(self, rank: int, link: WorkerLink) -> None:
        while (report := receive(link.reports)) is not None and report.kind != "failed":
            assert report.kind == "transferred", f"a worker reports {report.kind!r}"
            self.disks[rank] = disk_report_of(report.values)
            self.on_transfer(report.values["number"], report.values["num_good"])
        link.reports.close()
        how = link.wait() if report is None else f"failed: {report.values['cause']}"
        with self._lock:
            is_first = self._loss is None and not self._is_closing
            if is_first:
                self._loss = f"The worker of rank {rank} {how}."
        if is_first:
            _log.critical("worker_lost", extra={"rank": rank, "cause": how})
            self.on_lost(f"The worker of rank {rank} {how}.")

    @staticmethod
    def _write(link: WorkerLink, content: bytes) -> None:
        """Writes to one worker. Does nothing if it has ended: the thread that reads its reports notices the end."""
        try:
            link.commands.write(content)
            link.commands.flush()
        except (BrokenPipeError, ValueError):
            _log.debug("worker_gone", exc_info=True)
