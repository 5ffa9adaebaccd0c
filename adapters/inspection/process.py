"""Starts a worker process that inspects uploaded adapters, and sends it the uploads. Runs in the parent process.

Owns the time limit of a worker, and the errors of one that ends. Never reads the uploaded files itself: the worker does. The
calls block, so use them on a thread and never on an event loop.
"""

import signal
import time
from typing import Any

from graftwork.adapters.inspection.frames import receive, send
from graftwork.platform.errors import Unavailable
from graftwork.platform.worker_slots import WorkerProcess, how_it_ended, python_command

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


class InspectionProcess(WorkerProcess):
    """One worker process that inspects uploaded adapters, and the socket through which the parent process talks to it."""

    def __init__(self, command: tuple[str, ...] = python_command(_MODULE)) -> None:
        """Starts the worker. Raises Unavailable if the system cannot start it."""
        try:
            super().__init__(command, {"OPENBLAS_NUM_THREADS": "1"})
        except OSError as error:
            raise _absent(str(error.strerror)) from error

    def prepare(self) -> None:
        """Waits until the worker is ready. Raises Unavailable if it does not become ready."""
        try:
            self._receive(time.monotonic() + _STARTED_WITHIN_S)
        except (WorkerEnded, WorkerTooSlow) as error:
            raise _absent(str(error) or "it took too long") from error

    def ask(self, order: dict[str, Any], descriptors: tuple[int, int], within_s: float) -> dict[str, Any]:
        """Sends the worker one upload, and returns the worker's answer.

        `order` has the limits, the lengths of the two files and the description of the model. `descriptors`
        are the two open files. `within_s` is the most time in seconds that the worker may take.
        Raises WorkerEnded if the worker dies, and WorkerTooSlow if it takes too long. After an error, call `kill` and
        do not use this worker again.
        """
        deadline = time.monotonic() + within_s
        self.connection.settimeout(within_s)
        try:
            send(self.connection, order, descriptors)
        except TimeoutError:
            raise WorkerTooSlow from None
        except OSError:
            raise WorkerEnded(how_it_ended(self.end())) from None
        return self._receive(deadline)

    def _receive(self, deadline: float) -> dict[str, Any]:
        self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            answer = receive(self.connection)
        except TimeoutError:
            raise WorkerTooSlow from None
        except (EOFError, OSError):
            status = self.end()
            if status == -signal.SIGPROF:
                raise WorkerTooSlow from None
            raise WorkerEnded(how_it_ended(status)) from None
        except ValueError as error:
            raise WorkerEnded(f"it answered {error}") from None
        return answer


def _absent(why: str) -> Unavailable:
    message = f"Adapters cannot be inspected now: no worker process could be started ({why}). Try again later."
    return Unavailable(message, code="inspection_unavailable", retry_after_s=5.0)
