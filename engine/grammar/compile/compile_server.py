"""Runs the compile server: a process that forks a child for each grammar, and kills the child at its deadline.

    python -m graftwork.engine.grammar.compile.compile_server MODEL_FOLDER VOCAB_SIZE EOS_ID[,EOS_ID…]

The server reads jobs on stdin and writes answers on stdout (compile_jobs.py). It has only one thread, because forking
is not safe with several. The server itself imports the grammar engines, so that a child starts at once. A child reads,
checks and compiles one grammar under a memory limit. Invariant: each child answers or is killed. Two children run at a
time.
"""

import math
import os
import resource
import selectors
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from graftwork.engine.core.requests import GrammarKind
from graftwork.engine.grammar.compile.compile_jobs import (
    BUSY,
    CHILDREN,
    CompileAnswer,
    CompileJob,
    forward,
    receive,
    send,
)
from graftwork.engine.grammar.compile.failures import compile_refusal
from graftwork.engine.grammar.matching.backends import Backends
from graftwork.engine.grammar.matching.matcher import GrammarBackend
from graftwork.engine.grammar.matching.vocabulary import Vocabulary, read_vocabulary
from graftwork.engine.grammar.schema.lint import GrammarEngine, LintedGrammar, lint
from graftwork.platform.errors import GraftworkError, InvalidRequest

_OUT_OF_TIME = (-signal.SIGKILL, -signal.SIGXCPU)
_COLD = 3
"""The exit status of a child that needs a grammar engine which the server has not imported.

xgrammar takes seconds to import and is often not needed, so the server imports it only after such an exit.
"""


@dataclass(slots=True)
class _Child:
    job: CompileJob
    pid: int
    pipe: int
    started: float
    content: bytes = b""
    is_late: bool = False
    """Whether the child was killed at its wall-time limit before its processor time was used up, because the machine
    was busy.
    """


class CompileServer:
    """Runs compile jobs. Each job runs in its own child process, and this class owns these processes."""

    def __init__(self, vocabulary: Vocabulary, answers: int) -> None:
        """`answers` is the file descriptor to which answers are written."""
        self._answers = answers
        self._vocabulary = vocabulary
        self._backends = Backends(vocabulary)
        self._waiting: list[CompileJob] = []
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Reads jobs from stdin and runs them. When stdin ends, kills all child processes and returns."""
        self._backends.of(GrammarEngine.LLGUIDANCE)
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fd != 0:
                    self._read_child(self._children[key.fd])
                elif isinstance(job := receive(0), CompileJob):
                    self._waiting.append(job)
                else:
                    return self._kill_all()
            self._kill_late()
            while self._waiting and len(self._children) < CHILDREN:
                self._start(self._waiting.pop(0))

    def _patience(self) -> float | None:
        deadlines = [child.started + child.job.wall_seconds for child in self._children.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _start(self, job: CompileJob) -> None:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            self._run_child(job, theirs)
        os.close(theirs)
        self._children[ours] = _Child(job, pid, ours, time.monotonic())
        self._selector.register(ours, selectors.EVENT_READ)

    def _run_child(self, job: CompileJob, pipe: int) -> None:
        """Compiles one grammar in the child process, and sends the answer through `pipe`.

        Never returns, and closes no file, because open files belong to the parent process.
        """
        try:
            limit = _mapped_bytes() + job.memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(job.seconds),) * 2)
            answer = self._compile(job)
            if answer is None:
                os._exit(_COLD)
            send(pipe, answer)
        finally:
            os._exit(0)

    def _compile(self, job: CompileJob) -> CompileAnswer | None:
        """Compiles one grammar. Returns None if its grammar engine is not imported: the parent process must import the
        engine, so that this happens only once.
        """
        started = time.monotonic()
        try:
            linted = lint(job.source, specials=self._vocabulary.specials)
            if not self._backends.has(linted.engine):
                return None
            backend = self._backends.of(linted.engine)
            payload = backend.compile(linted)
            compact = _compact(backend, linted)
        except InvalidRequest as error:
            seconds = time.monotonic() - started
            return CompileAnswer(job.number, seconds, refusal=error.message, param=error.param or "#", code=error.code)
        except (ValueError, RuntimeError) as error:
            if "bad_alloc" in str(error):
                raise MemoryError from None
            refusal = compile_refusal(job.source, error, self._compile_part)
            seconds = time.monotonic() - started
            return CompileAnswer(job.number, seconds, refusal=refusal.message, param=refusal.param or "#")
        return CompileAnswer(job.number, time.monotonic() - started, linted.engine, payload, compact)

    def _compile_part(self, linted: LintedGrammar) -> None:
        """Compiles a part of a schema. Does nothing if the part is for a grammar engine that is not imported yet."""
        if self._backends.has(linted.engine):
            self._backends.of(linted.engine).compile(linted)

    def _read_child(self, child: _Child) -> None:
        part = os.read(child.pipe, 1 << 20)
        child.content += part
        if not part:
            self._end(child)

    def _kill_late(self) -> None:
        now = time.monotonic()
        for child in list(self._children.values()):
            if now >= child.started + child.job.wall_seconds:
                os.kill(child.pid, signal.SIGKILL)
                child.is_late = True
                self._end(child)

    def _end(self, child: _Child) -> None:
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        _, status = os.waitpid(child.pid, 0)
        del self._children[child.pipe]
        code = os.waitstatus_to_exitcode(status)
        if code == _COLD:
            self._backends.warm()
            self._waiting.insert(0, child.job)
            return
        if code == 0 and child.content:
            forward(self._answers, child.content)
            return
        what = f"time than {child.job.seconds} s" if code in _OUT_OF_TIME else "memory than it may have"
        reason = f"The grammar needs more {what} to compile (#). Simplify it."
        verdict = BUSY if child.is_late else "grammar_too_costly"
        send(
            self._answers,
            CompileAnswer(child.job.number, time.monotonic() - child.started, refusal=reason, code=verdict),
        )

    def _kill_all(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(arguments: list[str]) -> int:
    folder, size, eos, niceness = arguments
    os.nice(int(niceness))
    answers = os.dup(1)
    os.dup2(2, 1)  # a library's prints must not mix with the answers
    vocabulary = read_vocabulary(Path(folder), int(size), tuple(int(part) for part in eos.split(",")))
    if vocabulary is None:
        raise GraftworkError(f"{folder} has no tokenizer.json.")
    CompileServer(vocabulary, answers).serve()
    return 0


def _compact(backend: GrammarBackend, linted: LintedGrammar) -> bytes:
    """Compiles the form of a JSON grammar that has only one spelling of each answer. Drafts are made from it.

    Returns b"" if there is none or if it cannot be compiled. Then answers are the same, but slower.
    """
    if linted.kind in (GrammarKind.REGEX, GrammarKind.EBNF):
        return b""
    try:
        return backend.compile(linted, compact=True)
    except (ValueError, RuntimeError):
        return b""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
