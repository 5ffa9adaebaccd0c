"""A tenant's own usage and limits."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from graftwork.api.deps.dependencies import AppResources, UsageKey
from graftwork.api.deps.route_classes import NativeRoute
from graftwork.api.schemas.usage import TimeText, span, usage_body
from graftwork.platform.tenancy.metering import UsageGroup

router = APIRouter(prefix="/v1", tags=["usage"], route_class=NativeRoute)


@router.get("/usage")
async def get_usage(
    resources: AppResources,
    principal: UsageKey,
    start: Annotated[TimeText, Query(alias="from")] = None,
    end: Annotated[TimeText, Query(alias="to")] = None,
    group_by: Literal["day", "adapter", "session", "key"] = "day",
) -> dict[str, Any]:
    """Sums over [from, to), the last 30 days if nothing is said."""
    since, until = span(start, end, resources.clock.now())
    return usage_body(await resources.meter.summarise(principal.tenant_id, since, until, UsageGroup(group_by)))


@router.get("/quota")
async def get_quota(resources: AppResources, principal: UsageKey) -> dict[str, Any]:
    """Every limit; null is none."""
    return dict((await resources.tenancy.get_quota(principal.tenant_id)).as_mapping())
