"""Defines the operator's routes for price lists and for invoices of all tenants."""

from typing import Annotated

from fastapi import APIRouter, Query

from graftwork.api.deps.resources import Admin, ForAdmin
from graftwork.api.deps.route_classes import AdminRoute
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.prices import PricesBody, invoice_answer, price_list_answer, price_lists_answer
from graftwork.api.schemas.usage import MonthText
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.usage import Invoice, PriceList
from graftwork.platform.ids import TenantId

router = APIRouter(prefix="/v1/admin", tags=["admin"], route_class=AdminRoute)


@router.get("/prices")
async def list_prices(
    resources: ForAdmin, _: Admin, tenant_id: Annotated[str | None, Query(max_length=200)] = None
) -> Page[PriceList]:
    """List all price lists, also those that newer ones have replaced. The newest comes first.

    `tenant_id` selects the lists of one tenant.
    """
    lists = [one for one in await resources.prices.list() if tenant_id is None or one.tenant_id == tenant_id]
    return price_lists_answer(lists, resources.prices.book, resources.clock.now())


@router.post("/prices", status_code=201, responses=also(404))
async def set_prices(body: PricesBody, resources: ForAdmin, admin: Admin) -> PriceList:
    """Set prices. Requests that begin from `valid_from` on have them; requests before keep theirs.

    Every gateway follows within a second.
    """
    prices = await resources.prices.set(body.new_prices(), actor=admin.name)
    return price_list_answer(prices, in_force=resources.prices.book.is_in_force(prices, resources.clock.now()))


@router.get("/usage/invoice")
async def get_tenant_invoice(
    resources: ForAdmin,
    _: Admin,
    tenant_id: Annotated[str, Query(max_length=200)],
    month: MonthText,
) -> Invoice:
    """Get a tenant's invoice of a month in UTC, also of a tenant that was deleted."""
    await resources.meter.write_waiting()
    return invoice_answer(await resources.prices.invoices.make(TenantId(tenant_id), month), resources.clock.now())
