"""Fills a gateway's database with the rows of many tenants, adapters and sessions, without serving any request."""

import asyncio
from datetime import UTC, datetime
from itertools import cycle

from graftwork.platform.ids import KeyId
from graftwork.platform.ledger.price_keeper import NewPrices
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.service import NewSession
from tests.adapters.adapter_files import config_bytes, open_files, tensors, weights_bytes
from tests.api.console.console_server import ConsoleServer, ConsoleTenant
from tests.api.console.ledger import RATES, usage_event

TENANTS, ADAPTERS, SESSIONS = 200, 300, 2000


def fill(server: ConsoleServer, owner: ConsoleTenant) -> None:
    """Makes 200 tenants with prices and costs. The owner gets the adapters and sessions: it has the longest lists that its pages can show."""
    server.run(_fill(server, owner), patience_s=900)


async def _fill(server: ConsoleServer, owner: ConsoleTenant) -> None:
    tenancy = server.resources.account.tenancy
    prices, meter = server.resources.admin.prices, server.resources.account.meter
    for number in range(TENANTS - 1):
        tenant = await tenancy.create_tenant(f"Tenant number {number}", weight=1 + number % 4)
        own = await prices.set(NewPrices(RATES, "USD", tenant.id))
        await meter.record(usage_event(tenant.id, KeyId("key_of_many"), own, datetime.now(UTC), number + 1))
    principal = await tenancy.authenticate(owner.key)
    await _publish(server, principal)
    service = server.resources.sessions.sessions
    names = cycle(["tiny", *(f"adapter-{number}" for number in range(20))])
    for first in range(0, SESSIONS, 20):
        new = [NewSession(next(names), metadata={"ticket": str(first + step)}) for step in range(20)]
        await asyncio.gather(*(service.create(principal, one) for one in new))


async def _publish(server: ConsoleServer, principal: Principal) -> None:
    registry, description = server.resources.account.registry, server.resources.account.description
    with open_files(config_bytes(), weights_bytes(tensors(0))) as files:
        for number in range(ADAPTERS):
            await registry.publish(principal.scope(), f"adapter-{number}", files, description, Quota())
