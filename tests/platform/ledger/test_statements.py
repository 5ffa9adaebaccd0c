"""Tests that the statements that every request runs are built once, and not anew for each request."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.engine.interfaces import CacheStats

from graftwork.platform.database import Database
from graftwork.platform.ids import EndUserId, KeyId, OrganisationId, RequestId, TenantId
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.slot_files import COUNTS
from graftwork.platform.ledger.upkeep import agreement_rows
from graftwork.platform.ledger.usage import UsageEvent

EVENT = UsageEvent(
    request_id=RequestId("req_0"),
    tenant_id=TenantId("ten_1"),
    key_id=KeyId("key_1"),
    model="base",
    adapter=None,
    session_id=None,
    prompt_tokens=7,
    cached_tokens=3,
    completion_tokens=2,
    at=0.0,
)
KINDS = {
    "plain": EVENT,
    "with an adapter": replace(EVENT, model="bot", adapter="bot@1"),
    "of an organisation's user": replace(
        EVENT, organisation_id=OrganisationId("org_1"), end_user_id=EndUserId("usr_1")
    ),
}


@pytest.fixture
def built() -> Iterator[Counter[CacheStats]]:
    """Counts the statements that are executed, by whether they were built before."""
    found = Counter[CacheStats]()

    def note(*arguments: Any) -> None:
        statement, context = arguments[2], arguments[4]
        if not statement.startswith("BEGIN"):
            found[context.cache_hit] += 1

    event.listen(Engine, "before_cursor_execute", note)
    yield found
    event.remove(Engine, "before_cursor_execute", note)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bill_is_two_statements_that_were_built_before(
    database: Database, built: Counter[CacheStats], kind: str
) -> None:
    """The second request of a kind, and every later one, runs two statements that need no building."""
    meter = UsageMeter(database)
    await meter.record(replace(KINDS[kind], request_id=RequestId("req_1")))
    built.clear()

    recorded = [await meter.record(replace(KINDS[kind], request_id=RequestId(f"req_{number}"))) for number in (2, 3)]

    assert (recorded, built) == ([True, True], {CacheStats.CACHE_HIT: 4})


async def test_any_number_of_reports_is_one_statement(database: Database, built: Counter[CacheStats]) -> None:
    """However many reports are stored at once, it is one statement that was built before."""

    def rows(number: int, size: int) -> list[dict[str, Any]]:
        counts = dict.fromkeys(COUNTS, 1)
        own = {"choice": 0, "domain": "ab", "at": 1.0, "is_whole": True}
        return [{"id": f"rep_{number}_{one}", "request_id": f"req_{one}", **own, **counts} for one in range(size)]

    for number, size in enumerate((1, 2, 3, 7, 1000)):
        async with database.write() as session:
            await agreement_rows.add_reports(session, rows(number, size))
        if size == 2:  # one row and several are two forms
            built.clear()

    assert built == {CacheStats.CACHE_HIT: 3}
