"""The engine's side of the nursery: starts it when it is first needed, and starts another where it has died.

Answers arrive on a thread of its own and are handed on as they are. Every job is answered: a nursery that dies or
falls silent is killed, and what it had in hand is answered as a failure.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from graftwork.engine.grammar.compile.compile_jobs import CHILDREN, CompileAnswer, CompileJob, receive, send
from graftwork.engine.grammar.matching.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

_START_S = 60.0
"""For importing both engines on a busy machine."""
_POLL_S = 0.5


class CompileClient:
    """Owns one process, the thread that reads from it and the one that writes to it."""

    def __init__(
        self, folder: Path, vocabulary: Vocabulary, niceness: int, deliver: Callable[[CompileAnswer], None]
    ) -> None:
        """`deliver` is called on the reading thread."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._niceness = niceness
        self._deliver = deliver
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """Held while a job is written, which may take until the nursery reads, and while its pipes are closed."""
        self._handing_in = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-jobs")
        self._process: subprocess.Popen[bytes] | None = None
        self._due: dict[int, float] = {}
        """When each job that is in hand must have been answered."""

    @property
    def pid(self) -> int | None:
        """The process that compiles; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    @property
    def has_room(self) -> bool:
        """Whether another job would begin at once."""
        return len(self._due) < CHILDREN

    def start(self, job: CompileJob) -> None:
        """Hand a job in, without waiting for the nursery to read it; its answer is delivered, whatever happens."""
        with self._lock:
            try:
                process = self._process or self._spawn()
            except OSError as error:
                self._deliver(_died(job.number, error))
                return
            self._due[job.number] = time.monotonic() + _START_S + job.wall_seconds
        self._handing_in.submit(self._hand_in, process, job)

    def close(self) -> None:
        """End the process and its children; the threads follow."""
        with self._lock:
            if self._process is not None:
                _kill(self._process)
        self._handing_in.shutdown(wait=False, cancel_futures=True)

    def _hand_in(self, process: subprocess.Popen[bytes], job: CompileJob) -> None:
        """To a process that may have died: the reading thread answers for it then."""
        assert process.stdin is not None
        with self._writing:
            if process.stdin.closed:
                return
            try:
                send(process.stdin.fileno(), job)
            except BrokenPipeError:
                _kill(process)

    def _spawn(self) -> subprocess.Popen[bytes]:
        eos = ",".join(map(str, self._vocabulary.eos_token_ids))
        command = [
            sys.executable,
            "-m",
            "graftwork.engine.grammar.compile.compile_server",
            str(self._folder.absolute()),
        ]
        self._process = process = subprocess.Popen(
            [*command, str(self._vocabulary.size), eos, str(self._niceness)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C at the terminal is for the engine
        )
        threading.Thread(target=self._read, args=(process,), name="grammar-nursery", daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        try:
            self._read_answers(process)
        finally:
            self._bury(process)

    def _read_answers(self, process: subprocess.Popen[bytes]) -> None:
        """Until the process ends, or is ended because it owes an answer for too long."""
        assert process.stdout is not None
        stream = process.stdout.fileno()
        while True:
            ready, _, _ = select.select([stream], [], [], _POLL_S)
            if not ready:
                if _has_ended(process):  # its children keep the pipe open
                    return
                if any(time.monotonic() > due for due in self._due.copy().values()):
                    _kill(process)
                continue
            answer = receive(stream)
            if answer is None:
                return
            with self._lock:
                self._due.pop(answer.number, None)
            self._deliver(answer)

    def _bury(self, process: subprocess.Popen[bytes]) -> None:
        _kill(process)
        process.wait()
        with self._lock:
            lost = list(self._due)
            self._due.clear()
            self._process = None
        with self._writing:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        if lost:
            _log.error("grammar_nursery_died", extra={"returncode": process.returncode, "jobs": len(lost)})
        for number in lost:
            self._deliver(_died(number, process.returncode))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The nursery and its children, which are of its session; not once it has been waited for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without burying it: its number still names its children's group."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _died(number: int, reason: object) -> CompileAnswer:
    return CompileAnswer(number, 0.0, refusal=f"The compiling process died: {reason}.", code="nursery_died")
