"""Workers of a tensor-parallel engine as threads of the test's own process: the same code, without starting processes."""

import contextlib
import os
from threading import Thread

from graftwork.engine.build.worker import Reports, queue_commands, serve
from graftwork.engine.parallel.workers import WorkerLink


def start_thread(rank: int) -> WorkerLink:
    """Starts the worker of a rank as a thread that reads and writes real pipes."""
    commands_end, commands = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    reports, reports_end = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))

    def run() -> None:
        serve(queue_commands(commands_end, commands_end.close), Reports(reports_end))
        with contextlib.suppress(BrokenPipeError):
            reports_end.close()

    thread = Thread(target=run, name=f"rank-{rank}", daemon=True)
    thread.start()

    def wait() -> str:
        thread.join()
        return "ended"

    return WorkerLink(commands, reports, wait)
