"""Defines the body of a new price list, and converts price lists and invoices to answers.

Owns which lists count as in force. Never computes an amount.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from graftwork.api.schemas.admin import Tier, Time
from graftwork.api.schemas.base import NativeBody
from graftwork.api.schemas.usage import totals_answer
from graftwork.platform.answers import usage as answers
from graftwork.platform.answers.base import Page
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.invoices import Invoice
from graftwork.platform.ledger.price_keeper import NewPrices
from graftwork.platform.prices.price_list import PriceBook, PriceList
from graftwork.platform.prices.rates import amount_text

Rate = Annotated[
    str,
    Field(
        max_length=32,
        pattern=r"^[0-9]{1,7}(\.[0-9]{1,6})?$",
        examples=["0.50"],
        json_schema_extra={"pattern": r"^([0-9]{1,6}(\.[0-9]{1,6})?|1000000(\.0{1,6})?)$"},
    ),
]
"""A price as decimal text. A JSON number would be read as a float, which loses digits. The document also states the
highest rate, whose error names the rate.
"""


class RatesBody(NativeBody):
    """The rates of a new price list, as decimal text with at most six decimals."""

    input: Rate
    """Per million prompt tokens that are computed."""
    output: Rate
    """Per million generated tokens."""
    input_device: Rate | None = None
    """Per million prompt tokens whose KV was cached in device memory. The default is `input`."""
    input_host: Rate | None = None
    """Per million prompt tokens whose KV was cached in host memory. The default is `input`."""
    input_disk: Rate | None = None
    """Per million prompt tokens whose KV was cached on disk. The default is `input`."""
    kv_gb_hour: Rate | None = None
    """Per GB of KV cache that a request holds in device memory for an hour. The default is 0."""
    adapter_gb: Rate | None = None
    """Per GB of adapters that are loaded to the device. The default is 0."""


class PricesBody(NativeBody):
    """The body of a request that sets prices."""

    currency: Annotated[str, Field(pattern="^[A-Z]{3}$", examples=["USD"])]
    """A code of three capital letters."""
    rates: RatesBody
    """The prices by what was used."""
    tenant_id: Annotated[str, Field(max_length=64)] | None = None
    """The tenant that gets these prices. Null, the default, is for all tenants without prices of their own."""
    service_tier: Tier | None = None
    """The service tier that gets these prices. Null, the default, is for all tiers without prices of their own."""
    valid_from: Time | None = None
    """The time from which on requests have these prices: unix seconds, or ISO 8601 text. The default is now."""

    def new_prices(self) -> NewPrices:
        rates = {name: text for name, text in self.rates.model_dump().items() if text is not None}
        tenant_id = None if self.tenant_id is None else TenantId(self.tenant_id)
        return NewPrices(rates, self.currency, tenant_id, self.service_tier, self.valid_from)


def price_lists_answer(lists: Sequence[PriceList], book: PriceBook, now: float) -> Page[answers.PriceList]:
    """Converts price lists to the body of an answer."""
    data = tuple(price_list_answer(one, in_force=book.is_in_force(one, now)) for one in lists)
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return Page(data=data, has_more=False, first_id=first, last_id=last)


def price_list_answer(prices: PriceList, *, in_force: bool) -> answers.PriceList:
    return answers.PriceList(
        id=prices.price_id,
        tenant_id=prices.tenant_id,
        service_tier=prices.service_tier,
        currency=prices.currency,
        rates=answers.Rates(**prices.rates.texts()),
        valid_from=prices.valid_from,
        created_at=prices.created_at,
        in_force=in_force,
    )


def invoice_answer(invoice: Invoice, now: float) -> answers.Invoice:
    return answers.Invoice(
        tenant_id=invoice.tenant_id,
        month=invoice.month,
        start=invoice.start,
        end=invoice.end,
        is_final=invoice.end <= now,
        lines=tuple(
            answers.InvoiceLine(
                price_list=line.prices.price_id,
                item=line.item,
                quantity=line.quantity,
                unit=line.unit,
                rate=amount_text(line.rate),
                amount=amount_text(line.amount),
                currency=line.prices.currency,
            )
            for line in invoice.lines
        ),
        totals=tuple(
            answers.Money(amount=amount_text(amount), currency=currency)
            for currency, amount in sorted(invoice.totals.items())
        ),
        requests=invoice.requests,
        unpriced=totals_answer(invoice.unpriced),
    )
