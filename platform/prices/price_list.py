"""Defines a price list, and the lists that one process knows.

Owns the rule that says which list a request has. Never reads the database: `platform/ledger/price_keeper.py` does.
Invariant: a list never changes. A new price is a new list with a later beginning.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from graftwork.platform.ids import TenantId
from graftwork.platform.prices.rates import Rates


@dataclass(frozen=True, slots=True)
class PriceList:
    """The rates of some requests from a time on."""

    price_id: str
    tenant_id: TenantId | None
    """The tenant whose requests have these rates; None for every tenant without rates of its own."""
    service_tier: str | None
    """The service tier that has these rates; None for every tier without rates of its own."""
    currency: str
    """A code of three letters, such as USD."""
    rates: Rates
    valid_from: float
    """The time from which on requests that begin have these rates, in Unix seconds."""
    created_at: float


class PriceBook:
    """All price lists that this process knows."""

    def __init__(self, lists: Iterable[PriceList] = ()) -> None:
        self._by_id: dict[str, PriceList] = {}
        self._by_use: dict[tuple[TenantId | None, str | None], list[PriceList]] = {}
        self.replace(lists)

    def __len__(self) -> int:
        return len(self._by_id)

    def replace(self, lists: Iterable[PriceList]) -> None:
        """Replaces all lists."""
        by_use: dict[tuple[TenantId | None, str | None], list[PriceList]] = {}
        found = sorted(lists, key=lambda one: (one.valid_from, one.created_at, one.price_id), reverse=True)
        for one in found:
            by_use.setdefault((one.tenant_id, one.service_tier), []).append(one)
        self._by_id, self._by_use = {one.price_id: one for one in found}, by_use

    def find(self, price_id: str | None) -> PriceList | None:
        return None if price_id is None else self._by_id.get(price_id)

    def is_in_force(self, prices: PriceList, at: float) -> bool:
        """Returns whether a request that begins at the time `at` may have this list: no newer one has replaced it."""
        same_use = self._by_use.get((prices.tenant_id, prices.service_tier), ())
        return prices == next((one for one in same_use if one.valid_from <= at), None)

    def in_force(self, tenant_id: TenantId | None, service_tier: str, at: float) -> PriceList | None:
        """Returns the list of a request that begins at the time `at`; None if it has no price.

        The tenant's own list comes before everybody's, and then the list of the tier before that of all tiers. Of these,
        the one that began last counts, and of two that began together the one that was made last.
        """
        for use in ((tenant_id, service_tier), (tenant_id, None), (None, service_tier), (None, None)):
            for one in self._by_use.get(use, ()):
                if one.valid_from <= at:
                    return one
        return None
