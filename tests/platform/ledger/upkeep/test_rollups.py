"""Tests of the sums of the usage ledger, on both databases."""

import csv
import gzip
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, func, select, text

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import KeyId, RequestId, SessionId, TenantId
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.tables import RollupStateRow, UnrolledUsageRow, UsageRow, UsageSumRow
from graftwork.platform.ledger.upkeep.rollups import UsageRollups
from graftwork.platform.ledger.usage import UsageEvent, UsageGroup, UsageSummary, Work
from graftwork.platform.prices import repository as prices
from graftwork.platform.prices.price_list import PriceList
from graftwork.platform.prices.rates import Rates
from tests.hypothesis_profiles import examples

TENANT = TenantId("ten_1")
DAY = 86_400
START = 1_763_596_800.0
"""The beginning of a day in UTC."""
LIST = PriceList(
    "prc_1",
    None,
    None,
    "USD",
    Rates.read({"input": "0.512345", "output": "1.999999", "kv_gb_hour": "0.333333"}),
    0.0,
    0.0,
)
EVENT = UsageEvent(
    request_id=RequestId("req_0"),
    tenant_id=TENANT,
    key_id=KeyId("key_1"),
    model="agent@prod",
    adapter="agent@3",
    session_id=SessionId("ses_1"),
    prompt_tokens=100,
    cached_tokens=64,
    completion_tokens=10,
    at=START,
    kv_byte_seconds=123_456_789_012,
    engine_us=77,
)


@pytest.fixture
def meter(database: Database) -> UsageMeter:
    return UsageMeter(database)


@pytest.fixture
def rollups(database: Database, manual_clock: ManualClock) -> UsageRollups:
    return UsageRollups(database, manual_clock)


async def count(database: Database, table: type) -> int:
    async with database.read() as session:
        return int(await session.scalar(select(func.count()).select_from(table)) or 0)


def archived_figures(folder: Path, name: str) -> dict[str, str]:
    """A column of all files of an archive, by request."""
    found: dict[str, str] = {}
    for path in folder.rglob("*.csv.gz"):
        with gzip.open(path, "rt") as file:
            found |= {row["request_id"]: row[name] for row in csv.DictReader(file)}
    return found


def brute_force(
    events: list[UsageEvent], tenant_id: TenantId | None, start: float, end: float, field: str
) -> dict[str | None, UsageSummary]:
    """The sums by addition, one event after the other."""
    found: dict[str | None, UsageSummary] = {}
    for event in events:
        if start <= event.at < end and tenant_id in (None, event.tenant_id):
            name = getattr(event, field)
            costs = {} if event.currency is None else {event.currency: event.cost}
            work = Work(event.drafted_tokens, event.forced_tokens, event.reasoning_tokens, event.engine_us)
            one = UsageSummary(name, 1, event.quantities, costs, work)
            found[name] = found.get(name, UsageSummary(name)) + one
    return found


FIELDS = {
    UsageGroup.DAY: "day",
    UsageGroup.ADAPTER: "adapter",
    UsageGroup.KEY: "key_id",
    UsageGroup.TENANT: "tenant_id",
    UsageGroup.TIER: "service_tier",
    UsageGroup.PRICE: "price_id",
    UsageGroup.ORGANISATION: "organisation_id",
    UsageGroup.USER: "end_user_id",
    UsageGroup.BATCH: "batch_id",
    UsageGroup.MODEL: "model",
    UsageGroup.SESSION: "session_id",
}


def some(*names: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(names)


@st.composite
def ledgers(draw: st.DrawFn) -> list[UsageEvent]:
    """4 to 16 requests of two tenants in five days, some at the edges of hours and days."""
    moments = st.one_of(
        st.integers(0, 5 * 24).map(lambda hour: START + 3600.0 * hour),
        st.floats(START, START + 5 * DAY, exclude_max=True),
        st.integers(1, 5 * 24).map(lambda hour: math.nextafter(START + 3600.0 * hour, 0.0)),
    )
    large = st.integers(0, 2**62)
    events = []
    for number in range(draw(st.integers(4, 16))):
        cached = draw(st.integers(0, 50))
        event = replace(
            EVENT,
            request_id=RequestId(f"req_{number}"),
            tenant_id=TenantId(draw(st.sampled_from(["ten_1", "ten_2"]))),
            key_id=KeyId(draw(st.sampled_from(["key_1", "key_2"]))),
            adapter=draw(some(None, "agent@3", "agent@4")),
            session_id=draw(some(None, "ses_1", "ses_2")),
            end_user_id=draw(some(None, "usr_1")),
            organisation_id=draw(some(None, "org_1")),
            batch_id=draw(some(None, "batch_1")),
            service_tier=draw(some(None, "flex")),
            prompt_tokens=cached + draw(st.integers(0, 1000)),
            cached_tokens=cached,
            completion_tokens=draw(st.integers(0, 1000)),
            kv_byte_seconds=draw(large),
            at=draw(moments),
        )
        events.append(event if draw(st.booleans()) else _priced(event))
    return events


def _priced(event: UsageEvent) -> UsageEvent:
    return replace(event, kv_byte_seconds=event.kv_byte_seconds // 10**6).priced(LIST)


@settings(max_examples=examples(10), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(ledgers(), st.data())
async def test_reports_are_sums_of_the_requests_however_many_are_rolled_up(
    database: Database, manual_clock: ManualClock, events: list[UsageEvent], data: st.DataObject
) -> None:
    """For every group, span and tenant, the report is the sum of the requests to the last digit, with none, some or all
    of them in the sums, and with those that come later."""
    meter, rollups = UsageMeter(database), UsageRollups(database, manual_clock)
    async with database.write() as session:
        for table in (UsageRow, UsageSumRow, UnrolledUsageRow, RollupStateRow):
            await session.execute(delete(table))
        if not await prices.find_price_lists(session):
            await prices.add_price_list(session, LIST)
    num_rolled = data.draw(st.one_of(st.just(len(events)), st.integers(0, len(events))))
    for event in events[:num_rolled]:
        await meter.record(event)
    assert await rollups.roll_up(part=data.draw(st.integers(3, 7))) == num_rolled
    for event in events[num_rolled:]:
        await meter.record(event)
    anywhere = st.one_of(st.floats(START - DAY, START + 6 * DAY), st.integers(-1, 6).map(lambda day: START + day * DAY))
    some_span = sorted((data.draw(anywhere), data.draw(st.one_of(anywhere, st.just(math.inf)))))
    hours = st.integers(0, 47).map(lambda hour: hour * 3600.0 + 1800.0)
    long_span = (START + data.draw(hours), START + 5 * DAY - data.draw(hours))
    for start, end in (tuple(some_span), long_span):
        for group, tenant_id in product(FIELDS, (None, TENANT)):
            found = {one.group: one for one in await meter.summarise(tenant_id, start, end, group)}

            assert found == brute_force(events, tenant_id, start, end, FIELDS[group])


async def test_all_rows_leave_the_queue_once(database: Database, meter: UsageMeter, rollups: UsageRollups) -> None:
    """A roll-up takes each row once, and a second one finds nothing."""
    for number in range(7):
        await meter.record(replace(EVENT, request_id=RequestId(f"req_{number}"), at=START + number * 1000))
    assert await count(database, UnrolledUsageRow) == 7

    assert await rollups.roll_up(part=3) == 7
    assert await rollups.roll_up() == 0
    assert await count(database, UnrolledUsageRow) == 0
    async with database.read() as session:
        of_keys = select(UsageSumRow.span, UsageSumRow.requests).where(UsageSumRow.dimension == "day")
        assert sorted((await session.execute(of_keys)).all()) == [("day", 7), ("hour", 3), ("hour", 4)]
    (found,) = await meter.summarise(TENANT, START, START + DAY)
    assert (found.requests, found.used.kv_byte_seconds) == (7, 7 * EVENT.kv_byte_seconds)


async def test_a_row_that_comes_late_counts(meter: UsageMeter, rollups: UsageRollups) -> None:
    """A request of an hour that is rolled up already counts at once, and still once after the next roll-up."""
    await meter.record(EVENT)
    await rollups.roll_up()
    await meter.record(replace(EVENT, request_id=RequestId("req_late")))

    (before,) = await meter.summarise(TENANT, START, START + DAY)
    await rollups.roll_up()
    (after,) = await meter.summarise(TENANT, START, START + DAY)

    assert before == after
    assert before.requests == 2


async def test_rows_that_are_older_than_the_sums_are_queued_first(
    database: Database, meter: UsageMeter, rollups: UsageRollups
) -> None:
    """After an upgrade, reports read the rows until all of them are queued, and then the sums have each of them once."""
    for number in range(5):
        await meter.record(replace(EVENT, request_id=RequestId(f"req_{number}")))
    async with database.write() as session:  # as an upgrade leaves a ledger that has rows
        await session.execute(delete(UnrolledUsageRow))
        await session.execute(delete(RollupStateRow))
        await session.execute(text("INSERT INTO usage_rollup_state (id, is_complete) VALUES (1, false)"))
    await meter.record(replace(EVENT, request_id=RequestId("req_new")))
    (before,) = await meter.summarise(TENANT, START, START + DAY)

    assert await rollups.roll_up(part=2) == 6

    (after,) = await meter.summarise(TENANT, START, START + DAY)
    assert before == after
    assert after.requests == 6


async def test_an_erased_tenant_has_sums_without_names(meter: UsageMeter, rollups: UsageRollups) -> None:
    """After an erasure the sums name no adapter, and sums that differed in the name alone are one."""
    for number, adapter in enumerate(("agent@3", "agent@4", None)):
        event = replace(EVENT, request_id=RequestId(f"req_{number}"), model=adapter or "base", adapter=adapter)
        await meter.record(event)
        await meter.record(replace(event, tenant_id=TenantId("ten_2")))
    await rollups.roll_up()
    for _ in range(2):  # the second changes nothing
        await meter.erase(TENANT)  # type: ignore[arg-type]

    found = {one.group: one.requests for one in await meter.summarise(TENANT, START, START + DAY, UsageGroup.ADAPTER)}
    other = await meter.summarise(TenantId("ten_2"), START, START + DAY, UsageGroup.ADAPTER)

    assert found == {"deleted": 2, None: 1}
    assert {one.group for one in other} == {"agent@3", "agent@4", None}


async def test_pruned_rows_are_in_the_archive_and_in_the_sums(
    database: Database, meter: UsageMeter, manual_clock: ManualClock, tmp_path: Path
) -> None:
    """Rows whose time is over are deleted once they are rolled up and archived; reports of whole hours stay the same."""
    rollups = UsageRollups(database, manual_clock, keep_s=10 * DAY, archive=tmp_path)
    now = manual_clock.now()
    today = now // DAY * DAY
    ages = (1, 9, 11, 12, 40)
    for age in ages:
        await meter.record(replace(EVENT, request_id=RequestId(f"req_{age}"), at=today - age * DAY + 60.0))
    before_roll_up = await rollups.prune()
    await rollups.roll_up()
    whole = await meter.summarise(TENANT, today - 50 * DAY, today + DAY)

    assert (before_roll_up, await rollups.prune(), await rollups.prune()) == (0, 3, 0)

    assert await meter.summarise(TENANT, today - 50 * DAY, today + DAY) == whole
    assert await count(database, UsageRow) == 2
    assert archived_figures(tmp_path, "kv_byte_seconds") == {
        f"req_{age}": str(EVENT.kv_byte_seconds) for age in (11, 12, 40)
    }


@pytest.mark.parametrize(
    ("start", "end", "group"),
    [(10.0, 20 * DAY, UsageGroup.DAY), (0.0, 20 * DAY, UsageGroup.SESSION), (10.0, 20.0, UsageGroup.KEY)],
)
async def test_a_report_that_needs_pruned_rows_says_so(
    database: Database, meter: UsageMeter, start: float, end: float, group: UsageGroup, manual_clock: ManualClock
) -> None:
    """A span with parts of hours, and a report by session, are refused where rows were pruned."""
    rollups = UsageRollups(database, manual_clock, keep_s=10 * DAY)
    await rollups.prune()

    with pytest.raises(InvalidRequest, match=r"from"):
        await meter.summarise(TENANT, start, end, group)
