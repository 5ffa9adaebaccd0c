"""Adds rows to the usage ledger of a gateway, as requests of earlier days and months would have left them."""

from datetime import UTC, datetime, timedelta

from graftwork.platform.ids import KeyId, RequestId, TenantId, new_id
from graftwork.platform.ledger.price_keeper import NewPrices
from graftwork.platform.ledger.usage import UsageEvent
from graftwork.platform.prices.price_list import PriceList
from tests.api.console.console_server import ConsoleServer, ConsoleTenant

RATES = {"input": "0.523457", "input_device": "0.050001", "output": "1.5", "kv_gb_hour": "0.02", "adapter_gb": "0.001"}


def set_prices(server: ConsoleServer, tenant: ConsoleTenant, currency: str = "USD", **rates: str) -> PriceList:
    """Sets prices of one tenant for all its tiers, from now on."""
    new = NewPrices({**RATES, **rates}, currency, TenantId(tenant.id))
    return server.run(server.resources.admin.prices.set(new))


def month_back(months: int) -> datetime:
    """The 15th of a month in UTC, this month or an earlier one."""
    now = datetime.now(UTC)
    number = now.year * 12 + now.month - 1 - months
    return datetime(number // 12, number % 12 + 1, 15, 12, tzinfo=UTC)


def record(server: ConsoleServer, tenant: ConsoleTenant, prices: PriceList | None, at: datetime, size: int) -> None:
    """Adds a request whose every quantity follows from `size`. No price list makes it a request without a price."""
    event = usage_event(TenantId(tenant.id), KeyId(tenant.key_id), prices, at, size)
    assert server.run(server.resources.account.meter.record(event))


def usage_event(tenant_id: TenantId, key_id: KeyId, prices: PriceList | None, at: datetime, size: int) -> UsageEvent:
    return UsageEvent(
        request_id=RequestId(new_id("req")),
        tenant_id=tenant_id,
        key_id=key_id,
        model="tiny",
        adapter=None,
        session_id=None,
        prompt_tokens=7 * size,
        cached_tokens=5 * size,
        completion_tokens=3 * size,
        at=at.timestamp(),
        host_tokens=size,
        kv_byte_seconds=1_234_567 * size,
        adapter_bytes=11 * size,
        service_tier="default",
    ).priced(prices)


def record_days(server: ConsoleServer, tenant: ConsoleTenant, prices: PriceList | None, days: int, size: int) -> None:
    """Adds a request on each of the last days, with a size that differs from day to day."""
    now = datetime.now(UTC)
    for back in range(days):
        record(server, tenant, prices, now - timedelta(days=back), size * (4 + (back * 5 + len(tenant.name)) % 7))
