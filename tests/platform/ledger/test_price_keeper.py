"""Tests of setting price lists, on both databases."""

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import NotFound, ValidationFailed
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.price_keeper import NewPrices, PriceKeeper
from graftwork.platform.pagination import FIRST_PAGE
from graftwork.platform.tenancy import repository
from graftwork.platform.tenancy.tenancy import Tenancy

RATES = {"input": "0.5", "output": "1.5"}


async def test_another_gateway_follows_at_its_next_look(database: Database) -> None:
    """A list that one gateway sets is in the book of another one after it has looked."""
    clock = ManualClock()
    one, other = PriceKeeper(database, clock), PriceKeeper(database, clock)
    await other.refresh()

    prices = await one.set(NewPrices(RATES, "USD"))
    await other.refresh()

    assert one.book.in_force(TenantId("ten_1"), "default", clock.now()) == prices
    assert other.book.find(prices.price_id) == prices


async def test_a_later_list_waits_for_its_time(database: Database) -> None:
    """A list with a time in the future is known at once and counts from then on."""
    clock = ManualClock()
    keeper, tenant = PriceKeeper(database, clock), TenantId("ten_1")
    first = await keeper.set(NewPrices(RATES, "USD"))
    later = await keeper.set(NewPrices({**RATES, "input": "9"}, "USD", valid_from=clock.now() + 60))

    assert keeper.book.in_force(tenant, "default", clock.now()) == first
    assert keeper.book.in_force(tenant, "default", clock.now() + 60) == later
    assert [one.price_id for one in await keeper.list()] == [later.price_id, first.price_id]


async def test_changes_are_in_the_audit_log(database: Database) -> None:
    """The entry names the operator, the tenant, the list and its rates."""
    clock = ManualClock()
    tenant = await Tenancy(database, b"pepper", clock).create_tenant("Acme")
    prices = await PriceKeeper(database, clock).set(NewPrices(RATES, "EUR", tenant.id, "flex"), actor="accounts")

    async with database.read() as session:
        entry, *_ = (await repository.list_audit_entries(session, FIRST_PAGE)).items

    assert (entry.actor, entry.action, entry.tenant_id, entry.target) == (
        "accounts",
        "prices.set",
        tenant.id,
        prices.price_id,
    )
    assert entry.details["rates"]["input"] == "0.5"
    assert (entry.details["currency"], entry.details["service_tier"]) == ("EUR", "flex")


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (NewPrices(RATES, "dollars"), "three capital letters"),
        (NewPrices(RATES, "USD", service_tier="gold"), "service_tier must be one of"),
        (NewPrices(RATES, "USD", valid_from=5.0), "lies in the past"),
        (NewPrices({"input": "1"}, "USD"), "missing"),
    ],
)
async def test_wrong_lists_are_refused(sqlite_database: Database, new: NewPrices, says: str) -> None:
    """A wrong currency, tier, time or rate is refused and adds nothing."""
    keeper = PriceKeeper(sqlite_database, ManualClock())

    with pytest.raises(ValidationFailed, match=says):
        await keeper.set(new)

    assert await keeper.list() == []


async def test_a_tenant_must_exist(sqlite_database: Database) -> None:
    """A list for a tenant that does not exist is refused."""
    with pytest.raises(NotFound, match="no tenant"):
        await PriceKeeper(sqlite_database, ManualClock()).set(NewPrices(RATES, "USD", TenantId("ten_nobody")))
