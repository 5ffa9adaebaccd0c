"""Runs the work of a command that starts processes of its own, so that a signal ends them too.

Never ends a process itself: the work does, in its `finally`.
"""

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import typer

Result = TypeVar("Result")

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Windows has no SIGHUP


def run_and_clean_up(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs `work` as `asyncio.run` does. SIGINT, SIGTERM and SIGHUP cancel it, so that it ends what it has started.

    A second signal changes nothing, because it would interrupt that. Then SIGINT raises KeyboardInterrupt, and the other
    signals end the program with the status that a shell expects, such as 143 for SIGTERM.
    """
    received: list[signal.Signals] = []

    async def interruptible() -> Result:
        task = asyncio.current_task()
        assert task is not None

        def stop(number: signal.Signals) -> None:
            if not received:
                task.cancel()
            received.append(number)

        for number in _SIGNALS:
            with suppress(NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
                asyncio.get_running_loop().add_signal_handler(number, stop, number)
        return await work

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        if not received:
            raise
    if received[0] == signal.SIGINT:
        raise KeyboardInterrupt
    raise typer.Exit(128 + received[0])
