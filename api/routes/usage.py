"""Defines the routes for a tenant's own usage and limits."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from graftwork.api.deps.resources import ForAccounts, UsageKey
from graftwork.api.deps.route_classes import NativeRoute
from graftwork.api.schemas.prices import invoice_answer, price_lists_answer
from graftwork.api.schemas.usage import MonthText, TimeText, span, usage_answer
from graftwork.platform.answers.admin import OwnerQuota
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.usage import Invoice, PriceList, UsageRow
from graftwork.platform.ledger.usage import UsageGroup
from graftwork.platform.tenancy.limit_book import LimitOwner
from graftwork.platform.tenancy.principals import SERVICE_TIERS

router = APIRouter(prefix="/v1", tags=["usage"], route_class=NativeRoute)


@router.get("/usage")
async def get_usage(
    resources: ForAccounts,
    principal: UsageKey,
    start: Annotated[TimeText, Query(alias="from")] = None,
    end: Annotated[TimeText, Query(alias="to")] = None,
    group_by: Literal[
        "day", "adapter", "session", "key", "tier", "price", "organisation", "user", "batch", "model"
    ] = "day",
) -> Page[UsageRow]:
    """Sum the tenant's usage and its costs over the time range [from, to). By default this is the last 30 days."""
    since, until = span(start, end, resources.clock.now())
    group = UsageGroup(group_by)
    summaries = await resources.meter.summarise(principal.tenant_id, since, until, group)
    return usage_answer(summaries, group, resources.description.model_name)


@router.get("/usage/invoice")
async def get_invoice(resources: ForAccounts, principal: UsageKey, month: MonthText) -> Invoice:
    """Get the tenant's invoice of a month in UTC, with a line for each price list and rate."""
    await resources.meter.write_waiting()
    invoice = await resources.prices.invoices.make(principal.tenant_id, month)
    return invoice_answer(invoice, resources.clock.now())


@router.get("/prices")
async def list_own_prices(resources: ForAccounts, principal: UsageKey) -> Page[PriceList]:
    """List the prices of requests that the tenant sends now, for each service tier that has a price."""
    now, book = resources.clock.now(), resources.prices.book
    found = (book.in_force(principal.tenant_id, tier, now) for tier in SERVICE_TIERS)
    return price_lists_answer(list(dict.fromkeys(one for one in found if one is not None)), book, now)


@router.get("/quota")
async def get_quota(resources: ForAccounts, principal: UsageKey) -> OwnerQuota:
    """Get all limits of the tenant, and what it uses of them. Null means no limit."""
    return await resources.limit_use.of_tenant(LimitOwner.tenant(principal.tenant_id))
