"""Tests of the usage ledger on both databases."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy import select

from graftwork.platform.clock import SystemClock
from graftwork.platform.database import Database
from graftwork.platform.ids import KeyId, RequestId, SessionId, TenantId
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.tables import UsageRow
from graftwork.platform.ledger.usage import UsageEvent, UsageGroup
from graftwork.platform.tenancy.erasure import TenantErasure
from graftwork.platform.tenancy.tenancy import Tenancy

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()
HALF_A_DAY = 12 * 3600
EVENT = UsageEvent(
    request_id=RequestId("req_0"),
    tenant_id=TenantId("ten_1"),
    key_id=KeyId("key_1"),
    model="agent@prod",
    adapter="agent@3",
    session_id=SessionId("ses_1"),
    prompt_tokens=100,
    cached_tokens=64,
    completion_tokens=10,
    at=NOON,
)


@pytest.fixture
def meter(database: Database) -> UsageMeter:
    return UsageMeter(database)


async def test_a_request_is_entered_once(meter: UsageMeter) -> None:
    """Recording a request again, even at the same time and with other figures, changes nothing."""
    recorded = await asyncio.gather(*(meter.record(replace(EVENT, completion_tokens=tokens)) for tokens in range(10)))

    assert sorted(recorded) == [False] * 9 + [True]
    summaries = await meter.summarise(EVENT.tenant_id, 0, math.inf)
    assert [summary.requests for summary in summaries] == [1]


async def test_another_tenants_request_of_the_same_id_counts(meter: UsageMeter) -> None:
    """The same request id of two tenants is two entries."""
    await meter.record(EVENT)

    assert await meter.record(replace(EVENT, tenant_id=TenantId("ten_2")))


@pytest.mark.parametrize("in_groups", [False, True])
async def test_a_row_that_comes_late_does_not_name_an_erased_adapter(
    database: Database, meter: UsageMeter, in_groups: bool
) -> None:
    """A gateway that was down while its tenant was erased stores what it had delivered, without the adapter's name."""
    clock = SystemClock()
    tenancy = Tenancy(database, b"pepper", clock)
    tenant, other = await tenancy.create_tenant("Gone"), await tenancy.create_tenant("Stays")
    await tenancy.delete_tenant(tenant.id)
    await TenantErasure(database, clock, {"usage": meter.erase}).sweep()

    late = [
        *(
            replace(EVENT, request_id=RequestId(f"req_{number}"), tenant_id=owner.id)
            for number, owner in enumerate((tenant, other))
        ),
        replace(EVENT, request_id=RequestId("req_base"), tenant_id=tenant.id, model="base", adapter=None),
    ]
    if in_groups:
        await meter.record_all(late)
    else:
        for event in late:
            await meter.record(event)

    async with database.read() as session:
        rows = await session.execute(select(UsageRow.request_id, UsageRow.model, UsageRow.adapter))
        named = {request_id: (model, adapter) for request_id, model, adapter in rows}
    assert named == {
        "req_0": ("deleted", "deleted"),
        "req_1": ("agent@prod", "agent@3"),
        "req_base": ("base", None),
    }


async def test_sums_are_those_of_the_events(meter: UsageMeter) -> None:
    """For every group and span, the rows are the plain sums; the group without a name comes last."""
    events = [
        replace(
            EVENT,
            request_id=RequestId(f"req_{number}"),
            tenant_id=TenantId(f"ten_{number % 2}"),
            key_id=KeyId(f"key_{number % 3}"),
            adapter=None if number % 4 == 0 else f"agent@{number % 4}",
            session_id=None if number % 5 == 0 else SessionId(f"ses_{number % 5}"),
            prompt_tokens=number * 7,
            cached_tokens=number * 3,
            completion_tokens=number,
            at=NOON + (number - 12) * HALF_A_DAY / 2,
        )
        for number in range(24)
    ]
    for event in events:
        await meter.record(event)

    named_by: dict[UsageGroup, Callable[[UsageEvent], str | None]] = {
        UsageGroup.DAY: lambda event: datetime.fromtimestamp(event.at, UTC).strftime("%Y-%m-%d"),
        UsageGroup.ADAPTER: lambda event: event.adapter,
        UsageGroup.SESSION: lambda event: event.session_id,
        UsageGroup.KEY: lambda event: event.key_id,
        UsageGroup.TENANT: lambda event: event.tenant_id,
    }
    start, end = NOON - HALF_A_DAY, NOON + HALF_A_DAY
    for tenant_id in (TenantId("ten_0"), TenantId("ten_1"), None):
        for group, name_of in named_by.items():
            expected: dict[str | None, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
            for event in events:
                if start <= event.at < end and tenant_id in (None, event.tenant_id):
                    figures = (1, event.prompt_tokens, event.cached_tokens, event.completion_tokens)
                    expected[name_of(event)] = [a + b for a, b in zip(expected[name_of(event)], figures, strict=True)]

            summaries = await meter.summarise(tenant_id, start, end, group)

            found = {
                summary.group: [
                    summary.requests,
                    summary.prompt_tokens,
                    summary.cached_tokens,
                    summary.completion_tokens,
                ]
                for summary in summaries
            }
            assert found == expected
            assert [summary.group for summary in summaries] == sorted(expected, key=lambda name: (name is None, name))
