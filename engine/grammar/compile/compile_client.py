"""Talks to the compile server, a separate process that compiles grammars.

CompileClient owns this process. It starts the process at first use, and again if it has died. One thread writes jobs,
and one reads answers and delivers them. Invariant: every job gets an answer. If the server dies or does not answer in
time, the client kills it and answers its jobs as failed.
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
"""Seconds that are added to each job's deadline, because the server may first import both grammar engines on a busy
machine.
"""
_POLL_S = 0.5


class CompileClient:
    """Owns the process of the compile server, and two threads: one writes jobs to it, the other reads its answers."""

    def __init__(
        self, folder: Path, vocabulary: Vocabulary, niceness: int, deliver: Callable[[CompileAnswer], None]
    ) -> None:
        """`deliver` is called with each answer, on the reading thread."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._niceness = niceness
        self._deliver = deliver
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """A lock that is held while a job is written and while the pipes are closed. Writing may block until the server
        reads.
        """
        self._handing_in = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-jobs")
        self._process: subprocess.Popen[bytes] | None = None
        self._due: dict[int, float] = {}
        """The deadline of each job that the server has, by job number: seconds on the monotonic clock."""

    @property
    def pid(self) -> int | None:
        """The process id of the compile server; None while no server runs."""
        process = self._process
        return None if process is None else process.pid

    @property
    def has_room(self) -> bool:
        """Whether the compile server can start another job now, because it runs fewer than `CHILDREN` jobs."""
        return len(self._due) < CHILDREN

    def start(self, job: CompileJob) -> None:
        """Hands a compile job to the writing thread, and returns at once.

        The job always gets an answer. If the compile server dies, the answer is a failure.
        """
        with self._lock:
            try:
                process = self._process or self._spawn()
            except OSError as error:
                self._deliver(_died(job.number, error))
                return
            self._due[job.number] = time.monotonic() + _START_S + job.wall_seconds
        self._handing_in.submit(self._send, process, job)

    def close(self) -> None:
        """Kills the compile server and its child processes. Then the reading and the writing thread end too."""
        with self._lock:
            if self._process is not None:
                _kill(self._process)
        self._handing_in.shutdown(wait=False, cancel_futures=True)

    def _send(self, process: subprocess.Popen[bytes], job: CompileJob) -> None:
        """Writes a job to the server. If the server has died, the reading thread answers the job."""
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
        threading.Thread(target=self._read, args=(process,), name="grammar-compile", daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        try:
            self._read_answers(process)
        finally:
            self._reap(process)

    def _read_answers(self, process: subprocess.Popen[bytes]) -> None:
        """Delivers answers until the server ends. Kills the server if an answer is too late."""
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
            answer = _answer(stream)
            if answer is None:
                return
            with self._lock:
                self._due.pop(answer.number, None)
            self._deliver(answer)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
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
            _log.error("grammar_compile_server_died", extra={"returncode": process.returncode, "jobs": len(lost)})
        for number in lost:
            self._deliver(_died(number, process.returncode))


def _answer(stream: int) -> CompileAnswer | None:
    """Reads the next answer. Returns None if the server has ended, or wrote what is no answer."""
    try:
        message = receive(stream)
    except ValueError as error:
        _log.error("grammar_answer_unreadable", extra={"reason": str(error)})
        return None
    return message if isinstance(message, CompileAnswer) else None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the server and its children, which share its process group. Must be called before the process is reaped."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Returns whether the process has ended. Does not reap the process, because its id still names the group of its
    children.
    """
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _died(number: int, reason: object) -> CompileAnswer:
    return CompileAnswer(number, 0.0, refusal=f"The compiling process died: {reason}.", code="compile_server_died")
