"""Starts, asks and stops one process that inspects uploads. Runs in the parent process.

Owns the process, its socket and its time limit. Never reads the upload itself.
Calls block, so use them on a thread and never on an event loop.
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
    """Raised if the worker died or sent an invalid answer.

    `reason` says which of the two, as text for an error message.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerTooSlow(Exception):
    """Raised if the worker did not answer in time, or used up its processor time."""


class InspectionProcess:
    """One worker process that inspects uploads."""

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
        """Sends one order with the file, and returns the answer. `within_s` limits the time in seconds.

        Raises WorkerEnded or WorkerTooSlow. After such an error, do not use the worker again.
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
        """Stops the worker from another thread. The thread that called `ask` must still call `kill`."""
        self._process.kill()

    def kill(self) -> None:
        """Kills the worker if it still runs, and closes the socket. May be called again."""
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
