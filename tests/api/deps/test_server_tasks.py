"""Work that belongs to the server."""

import asyncio

import pytest

from graftwork.api.deps.background import ServerTasks


async def test_close_waits() -> None:
    """Closing waits for what runs."""
    tasks, release, done = ServerTasks(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await release.wait()
        done.set()

    tasks.start(work(), "work")
    closing = asyncio.create_task(tasks.close())
    release.set()
    await closing

    assert done.is_set()


async def test_close_ends_what_is_late() -> None:
    """Work that takes longer than the patience is cancelled, and its clean-up awaited."""
    tasks, cleaned = ServerTasks(patience_s=0.01), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    tasks.start(work(), "work")
    await tasks.close()

    assert cleaned.is_set()


async def test_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A task's failure is logged with its name."""
    tasks = ServerTasks()

    async def work() -> None:
        raise ZeroDivisionError

    tasks.start(work(), "the work")
    await tasks.close()

    assert "the work" in caplog.text
