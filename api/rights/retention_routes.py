"""Defines the routes for how long a tenant's data is kept: the operator sets it, and the tenant sees it."""

from fastapi import APIRouter

from graftwork.api.deps.resources import Admin, ForRights, UsageKey
from graftwork.api.deps.route_classes import AdminRoute, NativeRoute
from graftwork.api.schemas.base import NativeBody
from graftwork.platform.answers.data_rights import Days, Retention, TenantRetention, UsageDays
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.principals import scope_of_tenant

router = APIRouter(prefix="/v1/retention", tags=["data"], route_class=NativeRoute)
admin_router = APIRouter(prefix="/v1/admin/tenants/{tenant_id}/retention", tags=["admin"], route_class=AdminRoute)


class DataRetentionBody(NativeBody):
    """The body of a request that sets a tenant's retention. A missing field means that nothing is deleted by its age."""

    session_days: Days = None
    """The days after its last change for which a session is kept."""
    response_days: Days = None
    """The days for which responses are kept, and conversations after their last change."""
    file_days: Days = None
    """The days for which files and ended batches are kept."""
    usage_days: UsageDays = None
    """The days for which the usage row of each request is kept."""


@router.get("")
async def get_retention(resources: ForRights, principal: UsageKey) -> TenantRetention:
    """Get for how many days the server keeps the tenant's data. Null means: for as long as the tenant exists."""
    return _answer(principal.tenant_id, await resources.retention.get(principal.scope()))


@admin_router.get("")
async def get_tenant_retention(tenant_id: str, resources: ForRights, admin: Admin) -> TenantRetention:
    """Get for how many days the server keeps a tenant's data."""
    scope = scope_of_tenant(admin, TenantId(tenant_id))
    return _answer(tenant_id, await resources.retention.get(scope))


@admin_router.put("")
async def set_tenant_retention(
    tenant_id: str, body: DataRetentionBody, resources: ForRights, admin: Admin
) -> TenantRetention:
    """Replace for how many days the server keeps a tenant's data. What is older is deleted within minutes, for good.

    A field that is missing or null keeps its kind of data for as long as the tenant exists. The audit log has each
    change, and how much was deleted.
    """
    scope = scope_of_tenant(admin, TenantId(tenant_id))
    wanted = Retention(**{name: getattr(body, name) for name in Retention.model_fields})
    return _answer(tenant_id, await resources.retention.set(scope, wanted, actor=admin.name))


def _answer(tenant_id: str, retention: Retention) -> TenantRetention:
    return TenantRetention(tenant_id=tenant_id, **retention.body())
