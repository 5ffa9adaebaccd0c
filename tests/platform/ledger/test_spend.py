"""Tests of what owners of limits have used in a month, on both databases, against sums in Python."""

import asyncio
import math
import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime

from graftwork.platform.clock import SystemClock
from graftwork.platform.database import Database
from graftwork.platform.ids import EndUserId, KeyId, OrganisationId, RequestId, TenantId
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.usage import UsageEvent
from graftwork.platform.prices.rates import MAX_ATOMS, Cost
from graftwork.platform.quotas.budget import Spent
from graftwork.platform.tenancy.tenancy import Tenancy
from tests.platform.ledger.test_metering import EVENT

MONTH = "2026-11"


def random_event(draw: random.Random, number: int) -> UsageEvent:
    tenant = draw.choice("ab")
    at = datetime(2026, draw.choice((10, 11)), 20, tzinfo=UTC).timestamp()
    currency = draw.choice((None, "USD", "EUR"))
    return replace(
        EVENT,
        request_id=RequestId(f"req_{number}"),
        tenant_id=TenantId(f"ten_{tenant}"),
        key_id=KeyId(f"key_{tenant}{draw.randint(0, 1)}"),
        organisation_id=draw.choice((None, OrganisationId("org_1"))),
        end_user_id=draw.choice((None, EndUserId(f"usr_{tenant}{draw.randint(0, 1)}"))),
        prompt_tokens=draw.randint(64, 1000),
        at=at,
        currency=currency,
        cost=Cost(draw.choice((0, 1, draw.randint(0, 10**12), MAX_ATOMS))) if currency else Cost(),
    )


def sums(events: list[UsageEvent]) -> dict[str, Spent]:
    """What each owner has used in the month, by definition."""
    tokens: Counter[str] = Counter()
    costs: dict[str, Counter[str]] = {}
    for event in events:
        if event.day.startswith(MONTH):
            for owner_id in (event.organisation_id, event.tenant_id, event.key_id, event.end_user_id):
                if owner_id is not None:
                    tokens[owner_id] += event.total_tokens
                    of_owner = costs.setdefault(owner_id, Counter())
                    if event.currency is not None:
                        of_owner[event.currency] += event.cost.atoms
    return {owner_id: Spent(tokens[owner_id], dict(costs[owner_id])) for owner_id in tokens}


async def test_what_was_spent_is_the_sum_of_the_ledger(database: Database) -> None:
    """Of requests recorded in any order, twice and at the same time, each owner has spent the exact sum, beyond 64 bits."""
    draw, meter = random.Random(18), UsageMeter(database)
    events = [random_event(draw, number) for number in range(120)]
    again = draw.sample(events, 40)

    await asyncio.gather(*(meter.record(event) for event in draw.sample([*events, *again], 160)))

    expected = sums(events)
    assert await meter.spent([*expected, "ten_other"], MONTH) == expected
    assert max(sum(spent.atoms.values()) for spent in expected.values()) > 2**63


async def test_groups_of_requests_are_summed_like_single_ones(database: Database) -> None:
    """Groups that share requests and owners, recorded at the same time by several gateways, add each request once, and
    none waits for another for ever.
    """
    draw = random.Random(19)
    events = [random_event(draw, number) for number in range(120)]
    events += [replace(event, adapter=None) for event in (random_event(draw, number) for number in range(120, 180))]
    groups = [draw.sample(events, draw.randint(1, 40)) for _ in range(24)]
    gateways = [UsageMeter(database) for _ in range(3)]

    new = await asyncio.gather(*(draw.choice(gateways).record_all(group) for group in groups))

    recorded = {event.key: event for group in groups for event in group}
    expected = sums(list(recorded.values()))
    assert sorted(key for found in new for key in found) == sorted(recorded)
    assert await gateways[0].spent([*expected, "ten_other"], MONTH) == expected
    summaries = await gateways[0].summarise(None, 0, math.inf)
    assert sum(summary.requests for summary in summaries) == len(recorded)


async def test_old_months_are_dropped(database: Database) -> None:
    """Of November on, what was spent in October is kept, and of December on it is not."""
    meter = UsageMeter(database)
    october = datetime(2026, 10, 1, tzinfo=UTC).timestamp()
    await meter.record(replace(EVENT, at=october))

    await meter.drop_old_months(datetime(2026, 11, 30, tzinfo=UTC).timestamp())
    kept = await meter.spent([EVENT.tenant_id], "2026-10")
    await meter.drop_old_months(datetime(2026, 12, 31, tzinfo=UTC).timestamp())

    assert kept == {EVENT.tenant_id: Spent(110)}
    assert await meter.spent([EVENT.tenant_id], "2026-10") == {}
    assert await meter.has_recorded(EVENT.tenant_id, EVENT.request_id)


async def test_erasure_removes_what_a_tenant_has_spent(database: Database) -> None:
    """The erasure of a tenant removes its sums and those of its keys and end users, and no other tenant's."""
    meter = UsageMeter(database)
    tenancy = Tenancy(database, b"pepper", SystemClock())
    mine, other = await tenancy.create_tenant("mine"), await tenancy.create_tenant("other")
    for tenant in (mine, other):
        await meter.record(replace(EVENT, tenant_id=tenant.id, end_user_id=EndUserId(f"usr_{tenant.name}")))

    principal = (await tenancy.create_key(mine.id, "k"))[1]
    await meter.erase((await tenancy.authenticate(principal)).scope())

    assert set(await meter.spent([mine.id, other.id, "usr_mine", "usr_other"], MONTH)) == {other.id, "usr_other"}
