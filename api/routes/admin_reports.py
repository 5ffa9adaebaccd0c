"""What the operator reads: everybody's usage, the audit log, the engines."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from graftwork.api.dependencies import Admin, AppResources
from graftwork.api.guarded_route import AdminRoute
from graftwork.api.pages import AskedPage, list_body
from graftwork.api.schemas.admin import audit_body
from graftwork.api.schemas.usage import TimeText, span, usage_body
from graftwork.platform.errors import CapacityAbsent, Conflict, NotFound
from graftwork.platform.ids import TenantId
from graftwork.platform.metering import UsageGroup

router = APIRouter(prefix="/v1/admin", tags=["admin"], route_class=AdminRoute)

ONLY_REPLICA = "engine-0"


@router.get("/usage")
async def get_usage(
    resources: AppResources,
    _: Admin,
    start: Annotated[TimeText, Query(alias="from")] = None,
    end: Annotated[TimeText, Query(alias="to")] = None,
    group_by: Literal["day", "adapter", "session", "key", "tenant"] = "tenant",
    tenant_id: Annotated[str | None, Query(max_length=200)] = None,
) -> dict[str, Any]:
    """Sums over [from, to) for one tenant (a deleted one too) or for all; the last 30 days if nothing is said."""
    since, until = span(start, end, resources.clock.now())
    of_tenant = None if tenant_id is None else TenantId(tenant_id)
    return usage_body(await resources.meter.summarise(of_tenant, since, until, UsageGroup(group_by)))


@router.get("/audit")
async def get_audit(resources: AppResources, _: Admin, page: AskedPage) -> dict[str, Any]:
    """What administrators did, newest first unless asked otherwise."""
    return list_body(await resources.tenancy.audit(page), audit_body)


@router.get("/replicas")
async def list_replicas(resources: AppResources, _: Admin) -> dict[str, Any]:
    """The engines and how busy they are."""
    replica: dict[str, Any] = {
        "id": ONLY_REPLICA,
        "object": "replica",
        "address": resources.settings.resolved_engine_address,
    }
    try:
        stats = await resources.engine.stats()
    except CapacityAbsent as error:
        replica |= {"status": "absent", "reason": error.message}
    else:
        replica |= {
            "status": "ready",
            "running_requests": stats.running_requests,
            "waiting_requests": stats.waiting_requests,
            "device_pages": {"free": stats.free_pages, "cached": stats.cached_pages, "active": stats.active_pages},
            "host_pages": {"free": stats.host_free_pages, "cached": stats.host_cached_pages},
            "disk_pages": stats.disk_pages,
            "preemptions": stats.preemptions,
            "resident_adapters": list(stats.resident_adapters),
            "max_adapters_in_a_step": stats.max_adapters_in_a_step,
            "generated_tokens": stats.generated_tokens,
            "steps": stats.steps,
        }
    return {"object": "list", "data": [replica], "has_more": False, "first_id": ONLY_REPLICA, "last_id": ONLY_REPLICA}


@router.post("/replicas/{replica_id}/drain")
async def drain_replica(replica_id: str, _: Admin) -> dict[str, Any]:
    """Let an engine end what it serves and give it no more; the only one cannot be spared."""
    if replica_id != ONLY_REPLICA:
        raise NotFound("The replica does not exist: GET /v1/admin/replicas lists them.", code="replica_not_found")
    raise Conflict("This is the only engine, nothing could take over from it: stop the server.", code="only_replica")
