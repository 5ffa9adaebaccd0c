"""Defines the routes that show what the server did when for one request."""

from fastapi import APIRouter

from graftwork.api.deps.resources import Admin, AnyTenantKey, ForServer, ServerResources
from graftwork.api.deps.route_classes import AdminRoute, NativeRoute
from graftwork.api.openapi.declare import also
from graftwork.platform.answers.timelines import Timeline
from graftwork.platform.errors import NotFound
from graftwork.platform.ids import TenantId
from graftwork.platform.tracing.timeline import timeline_of

router = APIRouter(prefix="/v1/requests", tags=["usage"], route_class=NativeRoute)
admin_router = APIRouter(prefix="/v1/admin/requests", tags=["admin"], route_class=AdminRoute)


@router.get("/{request_id}/timeline", responses=also(404))
async def get_timeline(request_id: str, resources: ForServer, principal: AnyTenantKey) -> Timeline:
    """Get what the server did when for one of the tenant's latest requests.

    `request_id` is the `x-request-id` of the answer, or the id of a turn. Send a request with `x-graftwork-trace: 1` to
    get the engine's steps too. Only the gateway that served the request knows it, for as long as it keeps it.
    """
    return _timeline(resources, request_id, principal.tenant_id)


@admin_router.get("/{request_id}/timeline", responses=also(404))
async def get_timeline_of_any_tenant(request_id: str, resources: ForServer, _: Admin) -> Timeline:
    """Get the same of any tenant's request, by the server's id of it or the id of a turn."""
    return _timeline(resources, request_id, None)


def _timeline(resources: ServerResources, request_id: str, tenant_id: TenantId | None) -> Timeline:
    """Raises NotFound for an unknown request, and in the same words for one of another tenant."""
    found = resources.traces.find(request_id, tenant_id)
    if found is None:
        raise NotFound(
            f"This gateway ({resources.traces.gateway_id}) has no timeline of request {request_id[:100]!r}: it keeps those "
            "of its own latest requests. With several gateways, ask the one that served the request.",
            code="timeline_not_found",
        )
    return timeline_of(found, resources.traces.gateway_id)
