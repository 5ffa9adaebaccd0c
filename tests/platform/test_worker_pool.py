"""Tests of worker processes in a pool: whose job runs when, and what `close` ends."""

import asyncio
import threading
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from graftwork.platform.errors import Unavailable
from graftwork.platform.worker_pool import WorkerPool

MODULE = "graftwork.platform.json_worker"


class HeldSetup:
    """The setup of a pool. Its first call waits until the test releases it, so that the first worker starts late."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()

    def __call__(self) -> dict[str, Any]:
        if not self.entered.is_set():
            self.entered.set()
            self.released.wait()
        return {}


async def test_a_worker_that_starts_while_the_pool_closes_ends() -> None:
    """After `close` no worker runs, even if one was starting when `close` was called; its job is refused."""
    setup = HeldSetup()
    pool = WorkerPool(MODULE, setup)
    before = set(psutil.Process().children())
    job = asyncio.create_task(pool.run("ten_1", b"1"))
    await asyncio.to_thread(setup.entered.wait)

    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    setup.released.set()
    await closing

    with pytest.raises(Unavailable, match="shutting down"):
        await job
    assert pool.worker_pids == ()
    assert set(psutil.Process().children()) == before


async def test_jobs_that_wait_while_the_pool_closes_are_refused() -> None:
    """A job that no worker has begun when the pool closes is refused as unavailable."""
    setup = HeldSetup()
    pool = WorkerPool(MODULE, setup)
    jobs = [asyncio.create_task(pool.run(f"ten_{number}", b"1")) for number in range(3)]
    await asyncio.to_thread(setup.entered.wait)

    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    setup.released.set()
    await closing

    assert [type(error) for error in await asyncio.gather(*jobs, return_exceptions=True)] == [Unavailable] * 3


async def test_a_cancelled_job_keeps_its_owners_turn_until_it_ends() -> None:
    """While a cancelled job still runs, the next job of its owner waits, and another owner's job runs."""
    setup = HeldSetup()
    pool = WorkerPool(MODULE, setup, num_workers=2)
    cancelled = asyncio.create_task(pool.run("ten_1", b"1"))
    await asyncio.to_thread(setup.entered.wait)

    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    following = asyncio.create_task(pool.run("ten_1", b"2"))
    await asyncio.sleep(0)
    other = await pool.run("ten_2", b"3")
    has_waited = not following.done()
    setup.released.set()
    found = await following
    await pool.close()

    assert (cancelled.cancelled(), other, has_waited, found) == (True, 3, True, 2)


async def test_a_cancelled_job_that_no_worker_has_begun_frees_its_turn() -> None:
    """A job that is cancelled before a worker begins it never runs, and its owner's next job runs."""
    setup = HeldSetup()
    pool = WorkerPool(MODULE, setup, most_waiting=1)
    first = asyncio.create_task(pool.run("ten_1", b"1"))
    await asyncio.to_thread(setup.entered.wait)
    waiting = asyncio.create_task(pool.run("ten_2", b"2"))
    await asyncio.sleep(0)

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    following = asyncio.create_task(pool.run("ten_2", b"3"))
    setup.released.set()

    assert (await first, await following) == (1, 3)
    await pool.close()
