"""Tests of alerts of budgets on both databases: when they are made, and how they are delivered."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import pytest

from graftwork.platform.alerts.budget_alerts import MAX_ATTEMPTS, BudgetAlerts, retry_after_s
from graftwork.platform.alerts.sender import AlertSender
from graftwork.platform.alerts.signing import is_signed
from graftwork.platform.alerts.webhooks import Webhooks
from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import NotFound
from graftwork.platform.ids import EndUserId, OrganisationId, RequestId
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.usage import UsageEvent
from graftwork.platform.pagination import PageRequest
from graftwork.platform.prices.rates import ATOM_DIGITS, Cost
from graftwork.platform.quotas.limits import end_user_id
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.limit_book import LimitOwner
from graftwork.platform.tenancy.tenancy import Tenancy
from graftwork.platform.tenancy.tenants import Tenant
from tests.platform.alerts.receiver import Receiver, receiving
from tests.platform.ledger.test_metering import EVENT, NOON

CENT = 10 ** (ATOM_DIGITS - 2)
PEPPER = b"pepper"
BUDGETS = Quota(soft_budget="0.08", monthly_budget="0.1", currency="USD")


async def here(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


@dataclass
class Operator:
    """An operator's server: one database, whose gateways send alerts to one receiver."""

    database: Database
    clock: ManualClock
    receiver: Receiver
    spent: int = 0

    def __post_init__(self) -> None:
        self.tenancy = Tenancy(self.database, PEPPER, self.clock)
        self.webhooks = Webhooks(self.database, self.clock, PEPPER)

    def gateway(self, within_s: float = 60.0) -> BudgetAlerts:
        sender = AlertSender(self.clock, ("127.0.0.0/8",), resolve=here, within_s=within_s)
        return BudgetAlerts(self.database, self.clock, PEPPER, sender)

    @property
    def url(self) -> str:
        return f"http://hooks.test:{self.receiver.port}/"

    async def tenant(self, budgets: Quota = BUDGETS) -> Tenant:
        tenant = await self.tenancy.create_tenant("acme")
        await self.tenancy.limits.set(LimitOwner.tenant(tenant.id), budgets)
        return tenant

    async def spend(self, tenant: Tenant, cents: int, *, user: EndUserId | None = None) -> None:
        self.spent += 1
        event: UsageEvent = replace(
            EVENT,
            request_id=RequestId(f"req_{self.spent}"),
            tenant_id=tenant.id,
            organisation_id=tenant.organisation_id,
            end_user_id=user,
            at=self.clock.now(),
            currency="USD",
            cost=Cost(cents * CENT),
        )
        await UsageMeter(self.database).record(event)

    def received(self) -> list[dict[str, object]]:
        return [json.loads(body) for body in self.receiver.bodies]

    async def dropped(self) -> list[dict[str, object]]:
        entries = (await self.tenancy.audit(PageRequest(limit=100))).items
        return [entry.details for entry in entries if entry.action == "webhook.dropped"]


@pytest.fixture
async def operator(database: Database) -> AsyncIterator[Operator]:
    async with receiving() as receiver:
        yield Operator(database, ManualClock(start=NOON), receiver)


async def test_each_threshold_alerts_once_a_month(operator: Operator) -> None:
    """Below the soft budget nothing is sent; it and the monthly budget send one alert each, whatever follows."""
    tenant, gateways = await operator.tenant(), [operator.gateway() for _ in range(3)]
    _, secret = await operator.webhooks.set(LimitOwner.tenant(tenant.id), operator.url)
    counts = []
    for cents in (7, 1, 1, 1, 5):
        await operator.spend(tenant, cents)
        await asyncio.gather(*(gateway.watch() for gateway in gateways))
        await asyncio.gather(*(gateway.deliver() for gateway in gateways))
        counts.append(len(operator.receiver.bodies))

    soft, hard = operator.received()
    assert counts == [0, 1, 1, 2, 2]
    assert (soft["type"], hard["type"]) == ("budget.soft_reached", "budget.reached")
    assert soft["data"] == {
        "level": "tenant",
        "owner_id": tenant.id,
        "tenant_id": tenant.id,
        "month": "2026-11",
        "budget": {"amount": "0.08", "currency": "USD"},
        "spent": {"amount": "0.08", "currency": "USD"},
    }
    header = operator.receiver.headers()["graftwork-signature"]
    assert is_signed(secret, operator.receiver.bodies[-1], header, operator.clock.now())


async def test_the_next_month_and_another_budget_alert_again(operator: Operator) -> None:
    """A month begins without alerts, and a budget that is changed has one of its own."""
    tenant, gateway = await operator.tenant(replace_budget("0.05")), operator.gateway()
    await operator.webhooks.set(LimitOwner.tenant(tenant.id), operator.url)
    await operator.spend(tenant, 6)
    first = await gateway.watch()
    await operator.tenancy.limits.set(LimitOwner.tenant(tenant.id), replace_budget("0.06"))
    changed = await gateway.watch()
    operator.clock.advance(20 * 86_400)
    empty = await gateway.watch()
    await operator.spend(tenant, 6)

    assert (first, changed, empty, await gateway.watch()) == (1, 1, 0, 1)


def replace_budget(amount: str) -> Quota:
    return Quota(soft_budget=amount, currency="USD")


async def test_alerts_go_to_the_nearest_webhook(operator: Operator) -> None:
    """The organisation's webhook gets the alerts of its tenants without their own; keys and users use their tenant's."""
    organisation = await operator.tenancy.organisations.create("group")
    tenant = await operator.tenant(Quota())
    tenant = await operator.tenancy.organisations.add_tenant(organisation.id, tenant.id)
    await operator.webhooks.set(LimitOwner.organisation(organisation.id), operator.url)
    soft = replace_budget("0.01")
    alice, bob = end_user_id(tenant.id, "alice"), end_user_id(tenant.id, "bob")
    await operator.tenancy.limits.set(LimitOwner.organisation(organisation.id), soft)
    await operator.tenancy.limits.set(LimitOwner.user(tenant.id, None), soft)
    await operator.tenancy.limits.set(LimitOwner.user(tenant.id, "bob"), replace_budget("5"))
    await operator.spend(tenant, 2, user=alice)
    await operator.spend(tenant, 2, user=bob)

    gateway = operator.gateway()
    await gateway.watch()
    await gateway.deliver()

    data = [alert["data"] for alert in operator.received()]
    owners = {(one["level"], one["owner_id"]) for one in data if isinstance(one, dict)}
    assert owners == {("organisation", organisation.id), ("user", alice)}


async def test_without_a_webhook_nothing_is_made(operator: Operator) -> None:
    """A budget that is reached waits for a webhook, and then alerts at once."""
    tenant, gateway = await operator.tenant(), operator.gateway()
    await operator.spend(tenant, 9)
    before = await gateway.watch()
    await operator.webhooks.set(LimitOwner.tenant(tenant.id), operator.url)

    assert (before, await gateway.watch()) == (0, 1)


async def test_a_failing_receiver_is_tried_again_and_then_dropped(operator: Operator) -> None:
    """Attempts come with growing pauses; the last failure ends the alert with an entry in the audit log."""
    tenant, gateway = await operator.tenant(), operator.gateway()
    await operator.webhooks.set(LimitOwner.tenant(tenant.id), operator.url)
    await operator.spend(tenant, 9)
    await gateway.watch()
    operator.receiver.answer = b"HTTP/1.1 503 Later\r\ncontent-length: 0\r\n\r\n"
    for attempt in range(1, MAX_ATTEMPTS + 1):
        await gateway.deliver()
        assert len(operator.receiver.bodies) == attempt
        operator.clock.advance(retry_after_s(attempt) - 1)
        await gateway.deliver()
        operator.clock.advance(1)

    assert len(operator.receiver.bodies) == MAX_ATTEMPTS
    assert len(set(operator.receiver.bodies)) == 1
    assert [(entry["reason"], entry["attempts"]) for entry in await operator.dropped()] == [("HTTP 503", MAX_ATTEMPTS)]
    operator.clock.advance(86_400)
    assert await gateway.deliver() == 0


async def test_a_receiver_that_recovers_gets_the_alert(operator: Operator) -> None:
    """An alert that hung once is delivered by the next attempt, with the same id."""
    tenant, gateway = await operator.tenant(), operator.gateway()
    await operator.webhooks.set(LimitOwner.tenant(tenant.id), operator.url)
    await operator.spend(tenant, 9)
    await gateway.watch()
    operator.receiver.answer = None
    hung = await operator.gateway(within_s=0.5).deliver()
    operator.receiver.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    operator.clock.advance(retry_after_s(1))

    assert (hung, await gateway.deliver()) == (0, 1)
    first, second = operator.received()
    assert first["id"] == second["id"]
    assert await operator.dropped() == []


async def test_a_redirect_inward_is_dropped_at_once(operator: Operator) -> None:
    """A webhook that redirects is not tried again, and the audit log says why."""
    tenant, gateway = await operator.tenant(), operator.gateway()
    await operator.webhooks.set(LimitOwner.tenant(tenant.id), operator.url)
    await operator.spend(tenant, 9)
    await gateway.watch()
    operator.receiver.answer = b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\n\r\n"

    await gateway.deliver()
    operator.clock.advance(86_400)
    await gateway.deliver()

    assert operator.receiver.connections == 1
    (entry,) = await operator.dropped()
    assert entry["reason"] == "it redirects (HTTP 302)"


async def test_a_gateway_that_dies_while_it_sends_loses_no_alert(operator: Operator) -> None:
    """A claim ends a minute later, and then another gateway sends the alert: at least once."""
    tenant, dying = await operator.tenant(), operator.gateway()
    await operator.webhooks.set(LimitOwner.tenant(tenant.id), operator.url)
    await operator.spend(tenant, 9)
    await dying.watch()
    operator.receiver.answer = None
    sending = asyncio.create_task(dying.deliver())
    await operator.receiver.arrived.wait()
    sending.cancel()
    await asyncio.wait({sending})
    operator.receiver.answer = b"HTTP/1.1 204 No Content\r\n\r\n"
    other = operator.gateway()
    at_once = await other.deliver()
    operator.clock.advance(60)

    assert (at_once, await other.deliver()) == (0, 1)


async def test_an_erased_tenant_has_no_webhook_and_no_alert(operator: Operator) -> None:
    """The erasure of a tenant removes its webhook and its alerts; those of an organisation stay."""
    organisation = await operator.tenancy.organisations.create("group")
    tenant, gateway = await operator.tenant(), operator.gateway()
    mine, theirs = LimitOwner.tenant(tenant.id), LimitOwner.organisation(organisation.id)
    await operator.webhooks.set(mine, operator.url)
    await operator.webhooks.set(theirs, operator.url)
    await operator.spend(tenant, 9)
    await gateway.watch()
    _, plaintext = await operator.tenancy.create_key(tenant.id, "k")

    await operator.webhooks.erase((await operator.tenancy.authenticate(plaintext)).scope())

    assert await gateway.deliver() == 0
    with pytest.raises(NotFound):
        await operator.webhooks.get(mine)
    assert (await operator.webhooks.get(theirs)).url == operator.url
    with pytest.raises(NotFound):
        await operator.webhooks.set(LimitOwner.organisation(OrganisationId("org_x")), operator.url)
