"""Tests of the end of a job: it is settled once."""

from graftwork.api.deps.background import ServerTasks
from graftwork.platform.database import Database
from graftwork.platform.tenancy.metering import UsageMeter
from tests.api.fakes import FakeEngine
from tests.api.jobs import TENANT, SlowReservation, a_job


async def test_leaving_twice_settles_all_the_same(sqlite_database: Database) -> None:
    """A second `abandon` does not interrupt the settling that the first one began."""
    engine, tasks, reservation = FakeEngine(holds_after=2), ServerTasks(), SlowReservation()
    job = a_job(engine, sqlite_database, reservation)
    job.start(tasks)
    await engine.held.wait()

    job.abandon()
    await reservation.settling.wait()
    job.abandon()
    reservation.may_settle.set()
    await tasks.close()

    assert reservation.settled == [3 + 2]
    assert await UsageMeter(sqlite_database).tokens_since(TENANT, 0.0) == 3 + 2
