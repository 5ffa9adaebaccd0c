"""Starts a worker process that inspects uploaded adapters, sends it the uploads, and stops it. Runs in the parent
process.

Owns the worker process, its socket and its time limit. Never reads the uploaded files itself: the worker does. The
calls block, so use them on a thread and never on an event loop.
"""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import graftwork
from graftwork.adapters.inspection.frames import receive, send
from graftwork.platform.errors import Unavailable

_STARTED_WITHIN_S = 60.0
_MODULE = "graftwork.adapters.inspection.worker"


class WorkerEnded(Exception):
    """Raised if the worker process died, or sent an answer that cannot be read.

    `reason` is text for an error message. It tells which of the two happened.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerTooSlow(Exception):
    """Raised if the worker process did not answer in time, or reached its limit of processor time."""


class InspectionProcess:
    """One worker process that inspects uploaded adapters, and the socket through which the parent process talks to it."""

    def __init__(self, command: tuple[str, ...] = (sys.executable, "-P", "-s", "-m", _MODULE)) -> None:
        """Starts the worker, and waits until it is ready. Raises Unavailable if the worker does not start."""
        self._connection, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env=_environment(),
                    start_new_session=True,  # a Ctrl-C at the terminal is for the gateway, which then ends the worker
                )
            except OSError as error:
                self._connection.close()
                raise _absent(str(error.strerror)) from error
        try:
            self._receive(time.monotonic() + _STARTED_WITHIN_S)
        except (WorkerEnded, WorkerTooSlow) as error:
            self.kill()
            raise _absent(str(error) or "it took too long") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, order: dict[str, Any], descriptor: int, within_s: float) -> dict[str, Any]:
        """Sends the worker one upload, and returns the worker's answer.

        `order` has the limits, the lengths of the two files and the description of the model. `descriptor` is an open
        file that contains both files. `within_s` is the most time in seconds that the worker may take.
        Raises WorkerEnded if the worker dies, and WorkerTooSlow if it takes too long. After an error, call `kill` and
        do not use this worker again.
        """
        deadline = time.monotonic() + within_s
        self._connection.settimeout(within_s)
        try:
            send(self._connection, order, descriptor)
        except TimeoutError:
            raise WorkerTooSlow from None
        except OSError:
            raise WorkerEnded(self._end()) from None
        return self._receive(deadline)

    def interrupt(self) -> None:
        """Kills the worker process. Another thread may call this while one thread waits in `ask`.

        The thread that called `ask` must still call `kill`, which closes the socket.
        """
        self._process.kill()

    def kill(self) -> None:
        """Kills the worker process if it still runs, and closes the socket. A second call does nothing."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _receive(self, deadline: float) -> dict[str, Any]:
        self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            answer, _ = receive(self._connection)
        except TimeoutError:
            raise WorkerTooSlow from None
        except (EOFError, OSError):
            end = self._end()
            if self._process.returncode == -signal.SIGPROF:
                raise WorkerTooSlow from None
            raise WorkerEnded(end) from None
        except ValueError as error:
            raise WorkerEnded(f"it answered {error}") from None
        return answer

    def _end(self) -> str:
        """Kills the process, and returns a text that says how it ended."""
        self._process.kill()
        code = self._process.wait()
        return f"it exited with status {code}" if code >= 0 else f"it was ended by {signal.Signals(-code).name}"


def _environment() -> dict[str, str]:
    """Returns the worker's environment: the path of the code, and nothing else of the parent's environment."""
    return {"PYTHONPATH": str(Path(graftwork.__file__).parent.parent), "OPENBLAS_NUM_THREADS": "1"}


def _absent(why: str) -> Unavailable:
    message = f"Adapters cannot be inspected now: no worker process could be started ({why}). Try again later."
    return Unavailable(message, code="inspection_unavailable", retry_after_s=5.0)
