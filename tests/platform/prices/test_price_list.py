"""Tests of which price list a request has."""

from dataclasses import replace

from graftwork.platform.ids import TenantId
from graftwork.platform.prices.price_list import PriceBook, PriceList
from graftwork.platform.prices.rates import Rates

ACME, OTHER = TenantId("ten_acme"), TenantId("ten_other")
DEFAULT = PriceList("prc_0", None, None, "USD", Rates.read({"input": "1", "output": "2"}), 100.0, 100.0)
FLEX = replace(DEFAULT, price_id="prc_1", service_tier="flex")
ACMES = replace(DEFAULT, price_id="prc_2", tenant_id=ACME)
ACMES_PRIORITY = replace(DEFAULT, price_id="prc_3", tenant_id=ACME, service_tier="priority")


def found(book: PriceBook, tenant_id: TenantId, tier: str, at: float = 200.0) -> str | None:
    prices = book.in_force(tenant_id, tier, at)
    return None if prices is None else prices.price_id


def test_the_nearest_list_counts() -> None:
    """A tenant's own list comes before everybody's, and a tier's before that of all tiers."""
    book = PriceBook([DEFAULT, FLEX, ACMES, ACMES_PRIORITY])

    assert found(book, ACME, "priority") == "prc_3"
    assert found(book, ACME, "flex") == "prc_2"
    assert found(book, ACME, "default") == "prc_2"
    assert found(book, OTHER, "flex") == "prc_1"
    assert found(book, OTHER, "priority") == "prc_0"


def test_a_list_counts_from_its_beginning_until_the_next() -> None:
    """Before the first list nothing has a price; a later one replaces it when it begins, and not before."""
    later = replace(DEFAULT, price_id="prc_9", valid_from=300.0)
    book = PriceBook([later, DEFAULT])

    assert [found(book, ACME, "default", at) for at in (99.9, 100.0, 299.9, 300.0)] == [None, "prc_0", "prc_0", "prc_9"]
    assert [book.is_in_force(DEFAULT, at) for at in (99.9, 100.0, 300.0)] == [False, True, False]


def test_of_two_that_begin_together_the_one_made_last_counts() -> None:
    """So a list that was set by mistake is replaced by another one with the same beginning."""
    again = replace(DEFAULT, price_id="prc_a", created_at=101.0)

    assert found(PriceBook([again, DEFAULT]), ACME, "default") == "prc_a"
    assert found(PriceBook([DEFAULT, again]), ACME, "default") == "prc_a"


def test_lists_are_found_by_id_when_they_are_replaced() -> None:
    """A row of the ledger finds its list also when a newer one is in force."""
    book = PriceBook([DEFAULT, replace(DEFAULT, price_id="prc_9", valid_from=150.0)])

    assert book.find("prc_0") == DEFAULT
    assert book.find("prc_unknown") is None
    assert book.find(None) is None
