"""Tests of usage records that wait for each other, and for the database."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from graftwork.platform.database import Database
from graftwork.platform.ids import RequestId, TenantId
from graftwork.platform.ledger.backlog import UsageBacklog
from graftwork.platform.ledger.journal import UsageJournal
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.usage import UsageEvent, UsageKey
from tests.platform.ledger.test_metering import EVENT


class CountingMeter(UsageMeter):
    """A ledger that notes its transactions."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.groups: list[int] = []

    async def record_all(self, events: Sequence[UsageEvent]) -> set[UsageKey]:
        self.groups.append(len(events))
        return await super().record_all(events)


def request(number: int) -> UsageEvent:
    return replace(EVENT, request_id=RequestId(f"req_{number}"))


async def num_recorded(meter: UsageMeter, tenant_id: TenantId = EVENT.tenant_id) -> int:
    return sum(summary.requests for summary in await meter.summarise(tenant_id, 0, math.inf))


async def test_records_that_wait_together_are_one_transaction(sqlite_database: Database, tmp_path: Path) -> None:
    """A reading of the same process finds the records that wait, each once, and frees their slots of the journal."""
    meter, journal, stored = CountingMeter(sqlite_database), UsageJournal(tmp_path), list[int]()
    backlog = UsageBacklog(meter, journal)

    for number in range(7):
        backlog.record(request(number), lambda number=number: stored.append(number), journal.begin(request(number)))  # type: ignore[misc]
    backlog.record(request(3), lambda: stored.append(-1))

    assert await num_recorded(meter) == 7
    assert meter.groups == [7]
    assert stored == list(range(7))
    assert (backlog.num_waiting, journal.num_open) == (0, 0)


async def test_a_killed_process_leaves_what_waits(sqlite_database: Database, tmp_path: Path) -> None:
    """Records that waited for others when their process died are stored by the next one as they were."""
    journal = UsageJournal(tmp_path)
    killed = UsageBacklog(CountingMeter(sqlite_database), journal)
    for number in range(3):
        killed.record(request(number), lambda: None, journal.begin(replace(request(number), completion_tokens=0)))
    journal.close()  # as its process ends

    meter = UsageMeter(sqlite_database)
    restarted = UsageBacklog(meter, UsageJournal(tmp_path))

    assert await restarted.recover() == 3
    (summary,) = await meter.summarise(EVENT.tenant_id, 0, math.inf)
    assert (summary.requests, summary.completion_tokens) == (3, 30)


async def test_a_record_that_the_database_refuses_does_not_keep_others_out(
    sqlite_database: Database, tmp_path: Path
) -> None:
    """It stays in the journal and is in the log; the others of its group are stored."""
    meter, journal = UsageMeter(sqlite_database), UsageJournal(tmp_path)
    backlog = UsageBacklog(meter, journal)
    too_large = replace(request(1), drafted_tokens=2**70)

    backlog.record(request(0), lambda: None, journal.begin(request(0)))
    backlog.record(too_large, lambda: None, journal.begin(request(1)))
    backlog.record(request(2), lambda: None, journal.begin(request(2)))

    assert await num_recorded(meter) == 2
    assert (backlog.num_waiting, journal.num_open) == (0, 1)
    backlog.check()


async def test_a_full_backlog_is_stored_in_several_transactions(sqlite_database: Database, tmp_path: Path) -> None:
    """No transaction has more records than a statement takes values."""
    meter = CountingMeter(sqlite_database)
    backlog = UsageBacklog(meter, UsageJournal(tmp_path))

    for number in range(450):
        backlog.record(request(number), lambda: None)

    assert await num_recorded(meter) == 450
    assert sum(meter.groups) == 450
    assert max(meter.groups) <= 200
