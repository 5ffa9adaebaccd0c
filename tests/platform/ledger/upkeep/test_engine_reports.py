"""Tests of the reports of engines, on both databases."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import IsolationDomain, RequestId
from graftwork.platform.ledger.tables import EngineReportRow
from graftwork.platform.ledger.upkeep.engine_reports import KEPT_S, EngineReports, ledger_request

DOMAIN = IsolationDomain(b"\x07" * 32)


@dataclass(frozen=True)
class Sent:
    """A request to an engine."""

    request_id: RequestId
    domain: IsolationDomain = DOMAIN


@pytest.fixture
def reports(tmp_path: Path, database: Database, manual_clock: ManualClock) -> EngineReports:
    return EngineReports(tmp_path / "reports", database, manual_clock)


async def stored(database: Database) -> list[tuple[str, int, bool, int, int, int, int]]:
    row = EngineReportRow
    columns = (row.request_id, row.choice, row.is_whole, row.prompt_tokens, row.host_tokens, row.completion_tokens)
    async with database.read() as session:
        found = await session.execute(select(*columns, row.engine_us).order_by(row.request_id, row.choice))
        return [(a, b, c, d, e, f, g) for a, b, c, d, e, f, g in found]


async def test_a_report_has_the_sums_of_its_events(database: Database, reports: EngineReports) -> None:
    """Each answer of a request has a report with all that was added; one that never began has none."""
    for choice in range(2):
        report = reports.begin(Sent(RequestId(f"req_1.{choice}")))
        report.admit(10, 4, host_tokens=3)
        report.add(1, 100, 5)
        report.add(choice, 100, 5)
        report.end()
        report.end()
    reports.begin(Sent(RequestId("req_2.0"))).end()
    running = reports.begin(Sent(RequestId("turn_1")))
    running.admit(7, 0)

    await reports.flush()

    assert await stored(database) == [("req_1", 0, True, 10, 3, 1, 10), ("req_1", 1, True, 10, 3, 2, 10)]


async def test_the_reports_of_a_dead_process_are_stored_once(
    tmp_path: Path, database: Database, manual_clock: ManualClock, reports: EngineReports
) -> None:
    """What a process leaves in its files is stored as not whole, and once if the files are found a second time."""
    report = reports.begin(Sent(RequestId("req_1.0")))
    report.admit(10, 0)
    report.add(3)
    reports.begin(Sent(RequestId("req_2.0")))  # waits in the engine's queue
    await reports.close()
    shutil.copytree(tmp_path / "reports", tmp_path / "again")

    for folder in ("reports", "again"):
        assert await EngineReports(tmp_path / folder, database, manual_clock).recover() == 1

    assert await stored(database) == [("req_1", 0, False, 10, 0, 3, 0)]
    assert list((tmp_path / "reports").iterdir()) == []


async def test_reports_wait_for_the_database(
    database: Database, reports: EngineReports, tmp_path: Path, manual_clock: ManualClock
) -> None:
    """While the database does not answer, reports stay in the files of the process, and are stored afterwards."""
    away = EngineReports(tmp_path / "away", Database("sqlite+aiosqlite:////nowhere/at/all.db"), manual_clock)
    report = away.begin(Sent(RequestId("req_1.0")))
    report.admit(1, 0)
    report.end()
    with pytest.raises(Unavailable):
        await away.flush()
    await away.close()

    assert await EngineReports(tmp_path / "away", database, manual_clock).recover() == 1
    assert [row[0] for row in await stored(database)] == ["req_1"]


async def test_old_reports_are_deleted(database: Database, reports: EngineReports, manual_clock: ManualClock) -> None:
    """After 35 days a report is deleted, and a younger one stays."""
    for number, age in enumerate((KEPT_S - 10.0, 20.0)):
        report = reports.begin(Sent(RequestId(f"req_{number}.0")))
        report.admit(1, 0)
        report.end()
        await reports.flush()
        manual_clock.advance(age)

    await reports.drop_old()

    assert [row[0] for row in await stored(database)] == ["req_1"]


@given(st.text("ab_1.", min_size=1, max_size=12), st.integers(0, 200))
def test_the_request_of_the_ledger_is_found(request_id: str, choice: int) -> None:
    """Whatever a request is called, its answers are told from it."""
    assert ledger_request(RequestId(f"{request_id}.{choice}")) == (request_id, choice)


def test_a_turn_is_its_own_request() -> None:
    """A turn has no answers that are told apart."""
    assert ledger_request(RequestId("turn_01h2")) == ("turn_01h2", 0)
