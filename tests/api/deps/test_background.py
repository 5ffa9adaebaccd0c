"""Tests of background work: tasks that belong to the server, and periodic work."""

import asyncio

import pytest

from graftwork.api.deps.background import ServerTasks, repeating


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


class Pauses:
    """Each pause lasts until `end` is called."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[float] = asyncio.Queue()
        self._end = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.asked.put_nowait(seconds)
        await self._end.wait()
        self._end.clear()

    async def end(self) -> float:
        """Let the pause that is asked for end; how long it was to be."""
        seconds = await self.asked.get()
        self._end.set()
        return seconds


async def test_a_failed_round_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    """The work runs after each pause, also after a logged failure, until the block ends."""
    pauses, rounds = Pauses(), list[int]()

    async def work() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 1:
            raise ValueError("no luck")

    async with repeating(work, 300.0, "the sweep", pauses):
        waits = [await pauses.end(), await pauses.end()]
        waits.append(await pauses.asked.get())
        before = list(rounds)

    assert (before, waits) == ([0, 1], [300.0] * 3)
    assert "the sweep failed; the next round is in 300 s" in caplog.text
    assert rounds == before


async def test_a_round_under_way_is_cancelled() -> None:
    """The end of the block waits for the running work's clean-up."""
    pauses, begun, cleaned = Pauses(), asyncio.Event(), list[bool]()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    async with repeating(work, 1.0, "the sweep", pauses):
        await pauses.end()
        await begun.wait()

    assert cleaned == [True]
