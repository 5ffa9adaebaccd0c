"""Defines the routes for a tenant's own usage and limits."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from graftwork.api.deps.resources import ForAccounts, UsageKey
from graftwork.api.deps.route_classes import NativeRoute
from graftwork.api.schemas.usage import TimeText, span, usage_answer
from graftwork.platform.answers.admin import Quota
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.usage import UsageRow
from graftwork.platform.tenancy.metering import UsageGroup

router = APIRouter(prefix="/v1", tags=["usage"], route_class=NativeRoute)


@router.get("/usage")
async def get_usage(
    resources: ForAccounts,
    principal: UsageKey,
    start: Annotated[TimeText, Query(alias="from")] = None,
    end: Annotated[TimeText, Query(alias="to")] = None,
    group_by: Literal["day", "adapter", "session", "key"] = "day",
) -> Page[UsageRow]:
    """Sum the tenant's usage over the time range [from, to). By default this is the last 30 days."""
    since, until = span(start, end, resources.clock.now())
    group = UsageGroup(group_by)
    summaries = await resources.meter.summarise(principal.tenant_id, since, until, group)
    return usage_answer(summaries, group, resources.description.model_name)


@router.get("/quota")
async def get_quota(resources: ForAccounts, principal: UsageKey) -> Quota:
    """Get all limits of the tenant. Null means no limit."""
    return await resources.tenancy.get_quota(principal.tenant_id)
