"""Defines the routes that show what the server did when for one request, and those that switch traces on and off."""

from fastapi import APIRouter

from graftwork.api.deps.resources import Admin, AnyTenantKey, ForAccounts, ForAdmin, ForServer, ServerResources
from graftwork.api.deps.route_classes import AdminRoute, NativeRoute
from graftwork.api.http.pagination import list_answer
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.admin import TraceSwitchBody
from graftwork.platform.answers.base import Deleted, Page
from graftwork.platform.answers.timelines import Timeline, TraceSwitch
from graftwork.platform.errors import NotFound
from graftwork.platform.ids import TenantId
from graftwork.platform.modes import trace_switches as modes
from graftwork.platform.tracing.timeline import timeline_of

router = APIRouter(prefix="/v1/requests", tags=["usage"], route_class=NativeRoute)
admin_router = APIRouter(prefix="/v1/admin/requests", tags=["admin"], route_class=AdminRoute)


@router.get("/{request_id}/timeline", responses=also(404))
async def get_timeline(
    request_id: str, resources: ForServer, accounts: ForAccounts, principal: AnyTenantKey
) -> Timeline:
    """Get what the server did when for one of the tenant's latest requests.

    `request_id` is the `x-request-id` of the answer, or the id of a turn. Send a request with `x-graftwork-trace: 1` to
    get the engine's steps too; then every gateway finds it for 15 minutes after its end. Only the gateway that served the
    request knows others, for as long as it keeps them: a 404 with the code `timeline_not_kept` says that the request was
    served, and not that it is unknown.
    """
    try:
        return await _timeline(resources, request_id, principal.tenant_id)
    except NotFound:
        if not await accounts.meter.has_recorded(principal.tenant_id, request_id):
            raise
        raise _not_kept(resources, request_id) from None


@admin_router.get("/{request_id}/timeline", responses=also(404))
async def get_timeline_of_any_tenant(request_id: str, resources: ForServer, _: Admin) -> Timeline:
    """Get the same of any tenant's request, by the server's id of it or the id of a turn."""
    return await _timeline(resources, request_id, None)


switches_router = APIRouter(prefix="/v1/admin/traces", tags=["admin"], route_class=AdminRoute)


@switches_router.get("")
async def list_traces(resources: ForAdmin, _: Admin) -> Page[TraceSwitch]:
    """List the tenants and sessions whose requests are traced."""
    return list_answer([_switch_answer(one) for one in await resources.switchboard.refresh()])


@switches_router.put("/{target}")
async def switch_trace_on(target: str, body: TraceSwitchBody, resources: ForAdmin, admin: Admin) -> TraceSwitch:
    """Trace all requests of a tenant or a session that begin from now on. Every gateway follows within a second."""
    return _switch_answer(await resources.switchboard.set(target, token_ids=body.token_ids, actor=admin.name))


@switches_router.delete("/{target}")
async def switch_trace_off(target: str, resources: ForAdmin, admin: Admin) -> Deleted:
    """Trace the requests of a tenant or a session no more, and log none of its token ids."""
    await resources.switchboard.clear(target, actor=admin.name)
    return Deleted(id=target, object="trace_switch.deleted")


def _switch_answer(switch: modes.TraceSwitch) -> TraceSwitch:
    return TraceSwitch(id=switch.target, token_ids=switch.token_ids, changed_at=switch.changed_at)


async def _timeline(resources: ServerResources, request_id: str, tenant_id: TenantId | None) -> Timeline:
    """Raises NotFound for a request that neither this gateway nor the database keeps, and in the same words for one of
    another tenant.
    """
    found = resources.traces.find(request_id, tenant_id)
    if found is not None:
        return timeline_of(found, resources.traces.gateway_id)
    if (stored := await resources.trace_store.find(request_id, tenant_id)) is not None:
        return stored
    raise NotFound(
        f"This gateway ({resources.traces.gateway_id}) has no timeline of request {request_id[:100]!r}: it keeps those "
        "of its own latest requests, and for 15 minutes those of traced requests of all gateways. With several "
        "gateways, ask the one that served the request, or send it with x-graftwork-trace: 1.",
        code="timeline_not_found",
    )


def _not_kept(resources: ServerResources, request_id: str) -> NotFound:
    """Returns the error for a request that has a usage row of the tenant, so that it was served, but no timeline here."""
    return NotFound(
        f"Request {request_id!r} was served, but this gateway ({resources.traces.gateway_id}) does not keep its timeline: "
        "another gateway has served it, or too many requests came after it. With several gateways, ask the others, or "
        "send the request with x-graftwork-trace: 1: then every gateway finds it for 15 minutes.",
        code="timeline_not_kept",
    )
