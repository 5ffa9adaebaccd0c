"""Tests that every sum of costs is the same to the last digit: by session, adapter or day, the ledger, the invoice."""

import asyncio
import math
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graftwork.platform.clock import SystemClock
from graftwork.platform.database import Database
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import KeyId, RequestId, SessionId, TenantId, new_id
from graftwork.platform.ledger.invoices import InvoiceMaker, month_span
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.upkeep.rollups import UsageRollups
from graftwork.platform.ledger.usage import UsageEvent, UsageGroup
from graftwork.platform.prices.price_list import PriceList
from graftwork.platform.prices.rates import Rates, from_atoms, sum_of
from graftwork.platform.prices.repository import add_price_list
from tests.hypothesis_profiles import examples
from tests.platform.prices.test_rates import exact_parts, rates

MONTH, NEXT_MONTH = month_span("2026-11")
WHOLE_SPAN = (0.0, math.inf)


def price_list(number: int, price: Rates, currency: str) -> PriceList:
    return PriceList(new_id(f"prc{number}"), None, None, currency, price, 0.0, 0.0)


price_lists = st.lists(st.tuples(rates, st.sampled_from(["USD", "EUR"])), min_size=1, max_size=3).map(
    lambda found: [price_list(number, *one) for number, one in enumerate(found)]
)


@st.composite
def ledgers(draw: st.DrawFn) -> tuple[list[PriceList], list[UsageEvent]]:
    """Price lists, and requests of one tenant in two months that have one of the lists each, or no price."""
    lists, tenant = draw(price_lists), TenantId(new_id("ten"))
    events = []
    for number in range(draw(st.integers(0, 12))):
        cached = draw(st.integers(0, 10**6))
        host = draw(st.integers(0, cached))
        event = UsageEvent(
            request_id=RequestId(f"req_{number}"),
            tenant_id=tenant,
            key_id=KeyId(f"key_{draw(st.integers(0, 1))}"),
            model="base",
            adapter=draw(st.sampled_from([None, "a@1", "b@2"])),
            session_id=draw(st.sampled_from([None, SessionId("ses_1"), SessionId("ses_2")])),
            prompt_tokens=cached + draw(st.integers(0, 10**6)),
            cached_tokens=cached,
            completion_tokens=draw(st.integers(0, 10**5)),
            at=draw(st.sampled_from([MONTH - 1, MONTH, MONTH + 86_400, NEXT_MONTH - 1, NEXT_MONTH])),
            host_tokens=host,
            disk_tokens=draw(st.integers(0, cached - host)),
            kv_byte_seconds=draw(st.integers(0, 10**13)),
            adapter_bytes=draw(st.integers(0, 10**9)),
            service_tier=draw(st.sampled_from(["flex", "default"])),
        )
        events.append(event.priced(draw(st.sampled_from([None, *lists]))))
    return lists, events


def expected_lines(lists: list[PriceList], events: list[UsageEvent]) -> dict[tuple[str, str], Fraction]:
    """The amount of each rate of each list in the month, from fractions that are rounded for each request; without those
    of 0.
    """
    found = dict[tuple[str, str], Fraction]()
    for one in lists:
        for event in events:
            if event.price_id == one.price_id and MONTH <= event.at < NEXT_MONTH:
                for item, part in exact_parts(one.rates, event.quantities).items():
                    amount = Fraction(round(part * 10**12), 10**12)
                    found[one.price_id, item] = found.get((one.price_id, item), Fraction(0)) + amount
    return {key: amount for key, amount in found.items() if amount}


async def check_sums(database: Database, lists: list[PriceList], events: list[UsageEvent], num_rolled: int) -> None:
    """Checks all sums of a tenant's requests, of which the first `num_rolled` are in the sums of hours and days."""
    tenant, currencies = events[0].tenant_id, {one.price_id: one.currency for one in lists}
    meter = UsageMeter(database)
    async with database.write() as session:
        for one in lists:
            await add_price_list(session, one)
    for event in events[:num_rolled]:
        assert await meter.record(event)
    await UsageRollups(database, SystemClock()).roll_up()
    for event in events[num_rolled:]:
        assert await meter.record(event)

    def expected(within: tuple[float, float]) -> dict[str, Fraction]:
        """The sum of the fractions of all requests by currency, each part rounded to 10⁻¹² half to even."""
        by_id, found = {one.price_id: one for one in lists}, dict[str, Fraction]()
        for event in events:
            if event.price_id is not None and within[0] <= event.at < within[1]:
                parts = exact_parts(by_id[event.price_id].rates, event.quantities).values()
                cost = Fraction(sum(round(part * 10**12) for part in parts), 10**12)
                found[currencies[event.price_id]] = found.get(currencies[event.price_id], Fraction(0)) + cost
        return found

    async def summed(group: UsageGroup, within: tuple[float, float]) -> dict[str, Fraction]:
        found = dict[str, Fraction]()
        for summary in await meter.summarise(tenant, *within, group):
            for currency, cost in summary.costs.items():
                found[currency] = found.get(currency, Fraction(0)) + Fraction(from_atoms(cost.atoms))
        return found

    for group in UsageGroup:
        assert await summed(group, WHOLE_SPAN) == expected(WHOLE_SPAN)
        assert await summed(group, (MONTH, NEXT_MONTH)) == expected((MONTH, NEXT_MONTH))
    invoice = await InvoiceMaker(database).make(tenant, "2026-11")
    assert {code: Fraction(total) for code, total in invoice.totals.items()} == {
        code: total for code, total in expected((MONTH, NEXT_MONTH)).items() if total or code in invoice.totals
    }
    assert {
        (line.prices.price_id, line.item): Fraction(line.amount) for line in invoice.lines if line.amount
    } == expected_lines(lists, events)
    priced = [event for event in events if MONTH <= event.at < NEXT_MONTH]
    assert invoice.requests == len(priced)
    assert invoice.unpriced.requests == sum(event.price_id is None for event in priced)
    sessions = [SessionId("ses_1"), SessionId("ses_2")]
    of_sessions = await meter.of_sessions(tenant, sessions)
    in_sessions = replace(events[0], session_id=None)
    assert in_sessions.session_id not in of_sessions
    assert sum(one.requests for one in of_sessions.values()) == sum(event.session_id is not None for event in events)
    outside = [one for one in await meter.summarise(tenant, *WHOLE_SPAN, UsageGroup.SESSION) if one.group is None]
    costs = [cost.atoms for one in (*of_sessions.values(), *outside) for cost in one.costs.values()]
    assert sum(costs) == sum(event.cost.atoms for event in events)


@given(ledgers().filter(lambda found: bool(found[1])), st.integers(0, 12))
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_all_sums_agree_to_the_last_digit(
    database_url: str, ledger: tuple[list[PriceList], list[UsageEvent]], num_rolled: int
) -> None:
    """However requests are grouped, in the sessions, in the invoice, and with any part of them in the sums of hours and
    days, the sum of costs is that of exact fractions, on both databases."""

    async def check() -> None:
        database = Database(database_url)
        try:
            await check_sums(database, *ledger, num_rolled)
        finally:
            await database.close()

    asyncio.run(check())


async def test_sums_above_64_bits_are_exact(database: Database) -> None:
    """Three requests whose costs and KV are near the largest of a row have the exact sum, which no 64-bit sum could hold."""
    prices = price_list(0, Rates.read({"input": "0", "output": "0", "kv_gb_hour": "3.6"}), "USD")
    async with database.write() as session:
        await add_price_list(session, prices)
    held, meter = 9 * 10**18 + 1, UsageMeter(database)
    for number in range(3):
        event = UsageEvent(
            RequestId(f"req_{number}"), TenantId("ten_1"), KeyId("key_1"), "base", None, None, 1, 0, 0, at=MONTH
        )
        await meter.record(replace(event, kv_byte_seconds=held).priced(prices))

    (summary,) = await meter.summarise(TenantId("ten_1"), *WHOLE_SPAN)

    assert summary.used.kv_byte_seconds == 3 * held
    assert Fraction(from_atoms(summary.costs["USD"].atoms)) == 3 * Fraction(held, 10**12)


async def test_the_lines_say_what_was_used_at_which_rate(database: Database) -> None:
    """Each line of an invoice has the quantity, the rate and the amount, and the amounts add up to the total."""
    prices = price_list(
        0, Rates.read({"input": "0.5", "output": "1.5", "input_host": "0.1", "kv_gb_hour": "0.02"}), "USD"
    )
    async with database.write() as session:
        await add_price_list(session, prices)
    event = UsageEvent(
        RequestId("req_1"), TenantId("ten_1"), KeyId("key_1"), "base", None, None, 1000, 300, 50, at=MONTH + 1
    )
    used = replace(event, host_tokens=300, kv_byte_seconds=1, adapter_bytes=7)
    for number in range(2):
        await UsageMeter(database).record(replace(used, request_id=RequestId(f"req_{number}")).priced(prices))

    invoice = await InvoiceMaker(database).make(TenantId("ten_1"), "2026-11")

    assert [(line.item, line.quantity, line.unit, line.amount) for line in invoice.lines] == [
        ("input", 1400, "token", Decimal("0.0007")),
        ("input_host", 600, "token", Decimal("0.00006")),
        ("output", 100, "token", Decimal("0.00015")),
        ("kv_gb_hour", 2, "byte-second", Decimal(0)),
        ("adapter_gb", 14, "byte", Decimal(0)),
    ]
    assert invoice.totals == {"USD": sum_of(line.amount for line in invoice.lines)}


@pytest.mark.parametrize(
    ("month", "start", "end"),
    [("2026-11", (2026, 11), (2026, 12)), ("2026-12", (2026, 12), (2027, 1)), ("2024-02", (2024, 2), (2024, 3))],
)
def test_months_in_utc(month: str, start: tuple[int, int], end: tuple[int, int]) -> None:
    """A month begins with its first second in UTC and ends with that of the next one."""
    assert month_span(month) == tuple(datetime(*one, 1, tzinfo=UTC).timestamp() for one in (start, end))


@pytest.mark.parametrize("month", ["2026-13", "2026-00", "2026", "november", "2026-11-01", "0000-01", "9999-12"])
def test_what_is_no_month_is_refused(month: str) -> None:
    """A text that is no month, or one beyond the calendar, is refused with an example."""
    with pytest.raises(InvalidRequest, match="such as 2026-11"):
        month_span(month)
