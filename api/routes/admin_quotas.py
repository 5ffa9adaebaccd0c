"""A tenant's limits, as the operator sets them."""

from typing import Annotated, Any

from fastapi import APIRouter, Body

from graftwork.api.dependencies import Admin, AppResources
from graftwork.api.guarded_route import AdminRoute
from graftwork.platform.ids import TenantId
from graftwork.platform.quota import Quota

router = APIRouter(prefix="/v1/admin/tenants/{tenant_id}/quota", tags=["admin"], route_class=AdminRoute)


@router.get("")
async def get_quota(tenant_id: str, resources: AppResources, _: Admin) -> dict[str, Any]:
    """Every limit; null is none."""
    await resources.tenancy.get_tenant(TenantId(tenant_id))
    return dict((await resources.tenancy.get_quota(TenantId(tenant_id))).as_mapping())


@router.put("")
async def set_quota(
    tenant_id: str, body: Annotated[dict[str, Any], Body()], resources: AppResources, admin: Admin
) -> dict[str, Any]:
    """Replace all limits: what is absent or null is none from now on."""
    quota = await resources.tenancy.set_quota(TenantId(tenant_id), Quota.from_mapping(body), actor=admin.name)
    return dict(quota.as_mapping())
