"""Makes a tenant's invoice of a month from the usage ledger.

Owns the lines of an invoice: one for each price list and each rate with a use. Never rounds: the amounts are sums of the
ledger's (see platform/prices/rates.py).
Invariant: the sum of the lines of a currency is the sum of the costs of the month's requests, to the last digit.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Literal

from graftwork.platform.database import Database
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.report_rows import sum_usage
from graftwork.platform.ledger.usage import UsageGroup, UsageSummary
from graftwork.platform.prices import repository as prices
from graftwork.platform.prices.price_list import PriceList
from graftwork.platform.prices.rates import Cost, Quantities, from_atoms, sum_of

MONTH_PATTERN = r"^(2[0-9]{3})-(0[1-9]|1[0-2])$"
"""The form of a month, also for the OpenAPI document."""
_MONTH = re.compile(MONTH_PATTERN)
Unit = Literal["token", "byte-second", "byte"]
_UNITS: dict[str, tuple[str, Unit]] = {
    "kv_gb_hour": ("kv_byte_seconds", "byte-second"),
    "adapter_gb": ("adapter_bytes", "byte"),
}
"""By rate: the field of `Quantities` that it prices, and its unit. The other rates are for tokens."""
_TOKEN: Unit = "token"
_TOKENS = {
    "input": "uncached_tokens",
    "input_device": "device_tokens",
    "input_host": "host_tokens",
    "input_disk": "disk_tokens",
    "output": "output_tokens",
}


@dataclass(frozen=True, slots=True)
class InvoiceLine:
    """What was used at one rate of one price list, and what that costs."""

    prices: PriceList
    item: str
    """The name of the rate, such as `input_host`."""
    quantity: int
    unit: Unit
    """The unit of the quantity."""
    rate: Decimal
    """The price per million tokens, per GB-hour, or per GB."""
    amount: Decimal


@dataclass(frozen=True, slots=True)
class Invoice:
    """What a tenant owes for a month."""

    tenant_id: TenantId
    month: str
    start: float
    end: float
    """The month is the time [start, end) in Unix seconds, in UTC."""
    lines: tuple[InvoiceLine, ...]
    totals: Mapping[str, Decimal]
    """The sum of the lines by currency."""
    requests: int
    unpriced: UsageSummary
    """The requests without a price list. They are in no line."""


def month_span(month: str) -> tuple[float, float]:
    """Returns the time [start, end) of a month such as `2026-11`, in Unix seconds. Raises InvalidRequest."""
    found = _MONTH.fullmatch(month)
    if found is None:
        raise InvalidRequest(f"month: {month!r} is not a month, such as 2026-11.", param="month")
    year, number = int(found[1]), int(found[2])
    start = datetime(year, number, 1, tzinfo=UTC)
    end = datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
    return start.timestamp(), end.timestamp()


class InvoiceMaker:
    """Reads the usage ledger, and makes invoices."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def make(self, tenant_id: TenantId, month: str) -> Invoice:
        """Returns a tenant's invoice of a month such as `2026-11`. Requests that are still to come change a month that is
        not over. Raises InvalidRequest if it is no month.
        """
        start, end = month_span(month)
        async with self._database.read() as session:
            summaries = await sum_usage(session, tenant_id, start, end, UsageGroup.PRICE)
            lists = await prices.find_price_lists(session, [one.group for one in summaries if one.group is not None])
        lines = invoice_lines(summaries, lists)
        currencies = dict.fromkeys(line.prices.currency for line in lines)
        return Invoice(
            tenant_id=tenant_id,
            month=month,
            start=start,
            end=end,
            lines=lines,
            totals={
                currency: sum_of(line.amount for line in lines if line.prices.currency == currency)
                for currency in currencies
            },
            requests=sum(one.requests for one in summaries),
            unpriced=next((one for one in summaries if one.group is None), UsageSummary(None)),
        )


def invoice_lines(summaries: Sequence[UsageSummary], lists: Sequence[PriceList]) -> tuple[InvoiceLine, ...]:
    """Returns the lines of an invoice, from usage that is grouped by price list."""
    by_id = {one.group: one for one in summaries}
    ordered = sorted(lists, key=lambda one: (one.valid_from, one.price_id))
    return tuple(
        line
        for one in ordered
        for line in _lines(one, by_id[one.price_id].used, by_id[one.price_id].costs[one.currency])
    )


def _lines(one: PriceList, used: Quantities, cost: Cost) -> list[InvoiceLine]:
    """Returns the lines of one price list. The parts for tokens need no rounding, so they follow from the quantities; the
    part for KV was rounded for each request, and is in the ledger; what is left is the part for adapters.
    """
    parts = one.rates.parts(used)
    amounts = {name: parts[name] for name in _TOKENS} | {"kv_gb_hour": from_atoms(cost.kv_atoms)}
    amounts["adapter_gb"] = sum_of([from_atoms(cost.atoms), *(-amount for amount in amounts.values())])
    lines = []
    for name, amount in amounts.items():
        field, unit = _UNITS.get(name) or (_TOKENS[name], _TOKEN)
        quantity = getattr(used, field)
        if quantity or amount:
            lines.append(InvoiceLine(one, name, quantity, unit, getattr(one.rates, name), amount))
    return lines
