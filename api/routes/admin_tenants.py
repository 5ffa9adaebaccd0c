"""The operator's tenants and their quotas."""

import logging
from typing import Any

from fastapi import APIRouter

from graftwork.api.dependencies import Admin, AppResources
from graftwork.api.guarded_route import AdminRoute
from graftwork.api.pages import AskedPage, list_body
from graftwork.api.schemas.admin import TenantBody, TenantPatch, tenant_body
from graftwork.platform.errors import CapacityAbsent
from graftwork.platform.ids import TenantId
from graftwork.platform.principals import isolation_of, scope_of_tenant

_log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/admin/tenants", tags=["admin"], route_class=AdminRoute)


@router.post("", status_code=201)
async def create_tenant(body: TenantBody, resources: AppResources, admin: Admin) -> dict[str, Any]:
    tenant = await resources.tenancy.create_tenant(
        body.name, weight=body.weight, service_tier_ceiling=body.service_tier_ceiling, actor=admin.name
    )
    return tenant_body(tenant)


@router.get("")
async def list_tenants(resources: AppResources, _: Admin, page: AskedPage) -> dict[str, Any]:
    return list_body(await resources.tenancy.list_tenants(page), tenant_body)


@router.get("/{tenant_id}")
async def get_tenant(tenant_id: str, resources: AppResources, _: Admin) -> dict[str, Any]:
    return tenant_body(await resources.tenancy.get_tenant(TenantId(tenant_id)))


@router.patch("/{tenant_id}")
async def update_tenant(tenant_id: str, body: TenantPatch, resources: AppResources, admin: Admin) -> dict[str, Any]:
    tenant = await resources.tenancy.update_tenant(
        TenantId(tenant_id),
        name=body.name,
        weight=body.weight,
        service_tier_ceiling=body.service_tier_ceiling,
        actor=admin.name,
    )
    return tenant_body(tenant)


@router.delete("/{tenant_id}")
async def delete_tenant(tenant_id: str, resources: AppResources, admin: Admin) -> dict[str, Any]:
    """Its keys end first, then its adapters and its KV go; its usage and audit entries stay."""
    await resources.tenancy.delete_tenant(TenantId(tenant_id), actor=admin.name)
    await resources.registry.delete_all(scope_of_tenant(admin, TenantId(tenant_id)))
    try:
        await resources.engine.forget_domain(isolation_of(TenantId(tenant_id), resources.pepper))
    except CapacityAbsent:
        _log.warning("tenant_kv_kept", extra={"tenant_id": tenant_id, "reason": "no engine answers"})
    return {"id": tenant_id, "object": "tenant.deleted", "deleted": True}


@router.post("/{tenant_id}/suspend")
async def suspend_tenant(tenant_id: str, resources: AppResources, admin: Admin) -> dict[str, Any]:
    """Its keys are refused with a 403 until it is resumed."""
    return tenant_body(await resources.tenancy.suspend_tenant(TenantId(tenant_id), actor=admin.name))


@router.post("/{tenant_id}/resume")
async def resume_tenant(tenant_id: str, resources: AppResources, admin: Admin) -> dict[str, Any]:
    return tenant_body(await resources.tenancy.resume_tenant(TenantId(tenant_id), actor=admin.name))
