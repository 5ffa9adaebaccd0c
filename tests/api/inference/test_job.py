"""A job's end: whoever leaves, and however often, it is settled once."""

import asyncio

from graftwork.api.deps.background import ServerTasks
from graftwork.api.inference.usage import UsageFigures
from tests.api.fakes import FakeEngine
from tests.api.jobs import a_job


async def test_leaving_twice_settles_all_the_same() -> None:
    """A second `abandon` does not break off the settling that the first one began."""
    engine, tasks = FakeEngine(holds_after=2), ServerTasks()
    settling, may_settle = asyncio.Event(), asyncio.Event()
    settled: list[tuple[int, str]] = []

    async def settle(usage: UsageFigures | None, outcome: str) -> None:
        settling.set()
        await may_settle.wait()
        settled.append((usage.completion_tokens if usage else 0, outcome))

    job = a_job(engine, settle)
    job.start(tasks)
    await engine.held.wait()

    job.abandon()
    await settling.wait()
    job.abandon()
    may_settle.set()
    await tasks.close()

    assert settled == [(2, "cancelled")]
