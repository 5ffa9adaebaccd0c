"""The parent's hold on one inspection worker.

Owns the process, its socket, and the clock that runs against it. Blocking: for a thread, never for an event loop.
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
from graftwork.platform.errors import CapacityAbsent

_STARTED_WITHIN_S = 60.0
_MODULE = "graftwork.adapters.inspection.worker"


class WorkerEnded(Exception):
    """The worker is gone or makes no sense; `reason` says how, for a message."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerTooSlow(Exception):
    """The worker has not answered in time, or has used up its processor time."""


class InspectionProcess:
    """One worker, from its start to its end."""

    def __init__(self, command: tuple[str, ...] = (sys.executable, "-P", "-s", "-m", _MODULE)) -> None:
        """Start it and wait until it can work. Raises CapacityAbsent where that fails."""
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
        """The answer to one order. Raises WorkerEnded or WorkerTooSlow; either way the worker is of no more use."""
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
        """End it from another thread than the one that may be asking; that one must still `kill`."""
        self._process.kill()

    def kill(self) -> None:
        """End it at once, if it has not ended; may be repeated."""
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
        """How the process ended, once its socket has."""
        self._process.kill()
        code = self._process.wait()
        return f"it exited with status {code}" if code >= 0 else f"it was ended by {signal.Signals(-code).name}"


def _environment() -> dict[str, str]:
    """Where the code is, and nothing of the parent's own."""
    return {"PYTHONPATH": str(Path(graftwork.__file__).parent.parent), "OPENBLAS_NUM_THREADS": "1"}


def _absent(why: str) -> CapacityAbsent:
    message = f"Adapters cannot be inspected now: no worker process could be started ({why}). Try again later."
    return CapacityAbsent(message, code="inspection_unavailable", retry_after_s=5.0)
