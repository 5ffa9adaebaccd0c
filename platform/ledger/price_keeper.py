"""Sets price lists, and keeps the lists of this process as those of the database.

    set ──► database ──► each gateway reads the new lists within a second ──► requests that begin from then on

Owns the changes to price lists. Each is in the audit log. Never computes a cost.
Invariant: a list is added and never changed, so a row of the usage ledger that names a list always has the same price.
If the database does not answer, the lists that were read last stay in force.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import NotFound, ValidationFailed
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.ledger.invoices import InvoiceMaker
from graftwork.platform.prices import repository as prices
from graftwork.platform.prices.price_list import PriceBook, PriceList
from graftwork.platform.prices.rates import Rates
from graftwork.platform.tenancy import repository as tenancy
from graftwork.platform.tenancy.principals import SERVICE_TIERS
from graftwork.platform.tenancy.tenants import AuditEntry

PRICES_S = 0.5
"""Seconds between two looks for new price lists."""
_CLOCKS_DIFFER_S = 60.0
"""How far the clocks of a client and of the server may differ."""
_CURRENCY = re.compile(r"[A-Z]{3}")
_EVERY_TENANT = TenantId("")


@dataclass(frozen=True, slots=True)
class NewPrices:
    """A price list that the operator wants to set. Its fields are not yet checked."""

    rates: Mapping[str, str]
    currency: str
    tenant_id: TenantId | None = None
    service_tier: str | None = None
    valid_from: float | None = None
    """The time from which on it is valid, in Unix seconds; None means now."""


class PriceKeeper:
    """Reads and sets the price lists of all gateways that share the database."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self.invoices = InvoiceMaker(database)
        self.book = PriceBook()
        """The lists that this process knows."""

    async def refresh(self) -> None:
        """Reads the lists, if there are more than this process knows."""
        if await self._database.read_few(prices.count_price_lists) != len(self.book):
            async with self._database.read() as session:
                self.book.replace(await prices.find_price_lists(session))

    async def list(self) -> list[PriceList]:
        """Returns all price lists, the newest first."""
        async with self._database.read() as session:
            return (await prices.find_price_lists(session))[::-1]

    async def set(self, new: NewPrices, *, actor: str = "admin") -> PriceList:
        """Adds a price list, and returns it. Requests that begin from its `valid_from` on have it.

        Raises ValidationFailed for a value that is not allowed, such as a time in the past, and NotFound if the tenant
        does not exist.
        """
        now = self._clock.now()
        found = self._checked(new, now)
        async with self._database.write() as session:
            if new.tenant_id is not None and await tenancy.hold_tenant(session, new.tenant_id) is None:
                raise NotFound(f"There is no tenant {new.tenant_id!r}.")
            await prices.add_price_list(session, found)
            details = {
                "service_tier": found.service_tier,
                "currency": found.currency,
                "rates": found.rates.texts(),
                "valid_from": found.valid_from,
            }
            owner = found.tenant_id or _EVERY_TENANT
            entry = AuditEntry(new_id("aud"), now, actor, "prices.set", owner, found.price_id, details)
            await tenancy.add_audit_entry(session, entry)
        await self.refresh()
        return found

    def _checked(self, new: NewPrices, now: float) -> PriceList:
        if not _CURRENCY.fullmatch(new.currency):
            raise ValidationFailed("currency must be a code of three capital letters, such as USD.", param="currency")
        if new.service_tier is not None and new.service_tier not in SERVICE_TIERS:
            raise ValidationFailed(f"service_tier must be one of {', '.join(SERVICE_TIERS)}.", param="service_tier")
        valid_from = now if new.valid_from is None else new.valid_from
        if valid_from < now - _CLOCKS_DIFFER_S:
            raise ValidationFailed(
                "valid_from lies in the past: requests that were recorded keep their price. Leave it out to begin now.",
                param="valid_from",
            )
        return PriceList(
            price_id=new_id("prc"),
            tenant_id=new.tenant_id,
            service_tier=new.service_tier,
            currency=new.currency,
            rates=Rates.read(new.rates),
            valid_from=max(valid_from, now),
            created_at=now,
        )
