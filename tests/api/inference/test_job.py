"""Tests of a job: its events reach its reader in order, and it is settled once."""

import asyncio
import gc
import shutil
import weakref
from pathlib import Path

import pytest
from sqlalchemy import select

from graftwork.api.deps.background import ServerTasks
from graftwork.api.inference.job import ChoiceEvent, InferenceJob
from graftwork.engine.core.events import PromptAdmitted
from graftwork.platform.database import Database
from graftwork.platform.errors import CapacityContended, Unavailable
from graftwork.platform.ids import RequestId
from graftwork.platform.ledger.backlog import UsageBacklog
from graftwork.platform.ledger.journal import UsageJournal
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.tables import UsageRow
from graftwork.platform.ledger.usage import UsageOutcome
from graftwork.sessions.generation.generator import GenerationFinished, TextDelta
from tests.api.fake_engine import FakeEngine
from tests.api.inference_jobs import TENANT, SlowReservation, make_job
from tests.platform.spending import billed_tokens
from tests.platform.throwaway_journal import throwaway_backlog


class Reader:
    """Keeps the events of a job; takes none while `may_take` is not set."""

    def __init__(self) -> None:
        self.events: list[ChoiceEvent] = []
        self.has_come = asyncio.Event()
        self.may_take = asyncio.Event()
        self.may_take.set()

    async def take(self, item: ChoiceEvent) -> None:
        self.has_come.set()
        await self.may_take.wait()
        self.events.append(item)

    @property
    def text(self) -> str:
        return "".join(item.event.text for item in self.events if isinstance(item.event, TextDelta))


async def test_events_wait_for_their_reader(sqlite_database: Database) -> None:
    """A reader that comes late gets every event from the first to the last."""
    engine, tasks, reader = FakeEngine(text="one two"), ServerTasks(), Reader()
    job = make_job(engine, sqlite_database)
    job.start(tasks)

    await job.admitted()
    await job.deliver(reader.take)
    await tasks.close()

    assert isinstance(reader.events[0].event, PromptAdmitted)
    assert isinstance(reader.events[-1].event, GenerationFinished)
    assert reader.text == "one two"


async def test_a_slow_reader_makes_the_generation_wait(sqlite_database: Database) -> None:
    """A reader gets no event while it still takes another one."""
    engine, tasks, reader = FakeEngine(text="one two"), ServerTasks(), Reader()
    reader.may_take.clear()
    job = make_job(engine, sqlite_database)
    job.start(tasks)
    reading = asyncio.create_task(job.deliver(reader.take))
    await reader.has_come.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    seen = len(reader.events)

    reader.may_take.set()
    await reading
    await tasks.close()

    assert (seen, reader.text) == (0, "one two")


async def test_a_refusal_is_raised_before_anything_is_delivered(sqlite_database: Database) -> None:
    """`admitted` raises the engine's refusal, so that the route can still answer with its status."""
    engine, tasks = FakeEngine(refusal=CapacityContended("The queue is full.")), ServerTasks()
    job = make_job(engine, sqlite_database)
    job.start(tasks)

    with pytest.raises(CapacityContended):
        await job.admitted()
    await tasks.close()


async def test_a_failure_comes_behind_the_events_before_it(sqlite_database: Database) -> None:
    """`deliver` raises the engine's error after the reader has taken what came before it."""
    engine = FakeEngine(text="one two", breaks_after=2, breakage=Unavailable("The engine is gone."))
    tasks, reader = ServerTasks(), Reader()
    job = make_job(engine, sqlite_database)
    job.start(tasks)
    await job.admitted()

    with pytest.raises(Unavailable):
        await job.deliver(reader.take)
    await tasks.close()

    assert len(reader.events) == 1 + 2


async def test_an_answer_that_the_server_could_not_finish_costs_nothing(sqlite_database: Database) -> None:
    """After an engine's death, and after a shutdown, the usage has a row without tokens, and the quota is refunded."""
    dead = FakeEngine(text="one two", breaks_after=2, breakage=Unavailable("The engine is gone."))
    held = FakeEngine(holds_after=2)
    backlog = throwaway_backlog(UsageMeter(sqlite_database))
    for engine in (dead, held):
        tasks, reservation = ServerTasks(patience_s=0.0), SlowReservation()
        reservation.may_settle.set()
        job = make_job(engine, sqlite_database, reservation, RequestId(f"req_{id(engine)}"), backlog)
        job.start(tasks)
        reading = asyncio.create_task(job.deliver(Reader().take))
        await asyncio.wait([reading, asyncio.create_task(engine.held.wait())], return_when=asyncio.FIRST_COMPLETED)

        await tasks.close()

        with pytest.raises(Unavailable):
            await reading
        assert reservation.num_refunds == 1
    await backlog.flush()
    async with sqlite_database.read() as session:
        rows = (
            await session.execute(select(UsageRow.outcome, UsageRow.prompt_tokens, UsageRow.completion_tokens))
        ).all()
    assert [tuple(row) for row in rows] == [("server_error", 0, 0)] * 2


async def test_leaving_twice_settles_all_the_same(sqlite_database: Database) -> None:
    """A second `abandon` does not interrupt the settling that the first one began."""
    engine, tasks, reservation = FakeEngine(holds_after=2), ServerTasks(), SlowReservation()
    ledger = UsageMeter(sqlite_database)
    job = make_job(engine, sqlite_database, reservation, backlog=throwaway_backlog(ledger))
    job.start(tasks)
    reading = asyncio.create_task(job.deliver(Reader().take))
    await engine.held.wait()

    job.abandon()
    await reservation.settling.wait()
    job.abandon()
    reservation.may_settle.set()
    await tasks.close()

    assert reservation.settled == [3 + 2]
    assert await billed_tokens(ledger, TENANT) == 3 + 2
    with pytest.raises(Unavailable):
        await reading


async def test_what_a_dead_gateway_delivered_is_in_its_journal(sqlite_database: Database, tmp_path: Path) -> None:
    """The journal has the prompt and every token that has come from the engine, and nothing after the end."""
    engine, tasks, reader = FakeEngine(text="one two three", holds_after=3), ServerTasks(), Reader()
    journal = UsageJournal(tmp_path / "alive")
    backlog = UsageBacklog(UsageMeter(sqlite_database), journal)
    job = make_job(engine, sqlite_database, backlog=backlog)
    job.start(tasks)
    reading = asyncio.create_task(job.deliver(reader.take))
    await engine.held.wait()
    while not reader.text:
        reader.has_come.clear()
        await reader.has_come.wait()

    shutil.copytree(tmp_path / "alive", tmp_path / "dead")  # what is left of a gateway that dies here
    so_far = job.usage
    engine.release.set()
    await reading
    await tasks.close()
    await backlog.flush()

    ((left,),) = UsageJournal(tmp_path / "dead").recover()
    assert so_far.completion_tokens == 3
    assert (left.prompt_tokens, left.completion_tokens) == (so_far.prompt_tokens, 3)
    assert left.outcome is UsageOutcome.INTERRUPTED
    journal.close()
    assert not list((tmp_path / "alive").iterdir())


async def test_a_cancelled_job_needs_no_garbage_collector(sqlite_database: Database) -> None:
    """A job that its client has left is freed at its end: no cycle keeps it until a full collection."""
    tasks = ServerTasks()

    async def leave_a_job() -> "weakref.ref[InferenceJob]":
        engine = FakeEngine(holds_after=2)
        job = make_job(engine, sqlite_database)
        job.start(tasks)
        reading = asyncio.create_task(job.deliver(Reader().take))
        await engine.held.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        job.abandon()
        return weakref.ref(job)

    gc.disable()
    try:
        left = await leave_a_job()
        await tasks.close()
        await asyncio.sleep(0)
        assert left() is None
    finally:
        gc.enable()
