"""Defines the operator's routes for the limits of organisations, tenants, keys and end users."""

from typing import Annotated

from fastapi import APIRouter, Query

from graftwork.api.deps.resources import Admin, ForAdmin
from graftwork.api.deps.route_classes import AdminRoute
from graftwork.api.schemas.admin import QuotaBody
from graftwork.platform.answers import admin as answers
from graftwork.platform.ids import KeyId, OrganisationId, TenantId
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.limit_book import MAX_USER_CHARACTERS, LimitOwner

router = APIRouter(prefix="/v1/admin", tags=["admin"], route_class=AdminRoute)

EndUser = Annotated[str | None, Query(min_length=1, max_length=MAX_USER_CHARACTERS)]


@router.get("/organisations/{organisation_id}/quota")
async def get_organisation_quota(organisation_id: str, resources: ForAdmin, _: Admin) -> answers.OwnerQuota:
    """Get all limits of an organisation, which its tenants share, and what they use of them. Null means no limit."""
    return await resources.limit_use.get(LimitOwner.organisation(OrganisationId(organisation_id)))


@router.put("/organisations/{organisation_id}/quota")
async def set_organisation_quota(
    organisation_id: str, body: QuotaBody, resources: ForAdmin, admin: Admin
) -> answers.Quota:
    """Replace all limits of an organisation. The server removes each limit that is missing or null."""
    owner = LimitOwner.organisation(OrganisationId(organisation_id))
    return await resources.tenancy.limits.set(owner, Quota.from_mapping(body), actor=admin.name)


@router.get("/tenants/{tenant_id}/quota")
async def get_tenant_quota(tenant_id: str, resources: ForAdmin, _: Admin) -> answers.OwnerQuota:
    """Get all limits of a tenant, and what it uses of them. Null means no limit."""
    return await resources.limit_use.get(LimitOwner.tenant(TenantId(tenant_id)))


@router.put("/tenants/{tenant_id}/quota")
async def set_tenant_quota(tenant_id: str, body: QuotaBody, resources: ForAdmin, admin: Admin) -> answers.Quota:
    """Replace all limits of a tenant. The server removes each limit that is missing or null."""
    owner = LimitOwner.tenant(TenantId(tenant_id))
    return await resources.tenancy.limits.set(owner, Quota.from_mapping(body), actor=admin.name)


@router.get("/tenants/{tenant_id}/keys/{key_id}/quota")
async def get_key_quota(tenant_id: str, key_id: str, resources: ForAdmin, _: Admin) -> answers.OwnerQuota:
    """Get all limits of an API key, and what it uses of them. Null means no limit but those of its tenant."""
    return await resources.limit_use.get(LimitOwner.key(TenantId(tenant_id), KeyId(key_id)))


@router.put("/tenants/{tenant_id}/keys/{key_id}/quota")
async def set_key_quota(
    tenant_id: str, key_id: str, body: QuotaBody, resources: ForAdmin, admin: Admin
) -> answers.Quota:
    """Replace all limits of an API key. The keys that replace it by rotations, or that it has replaced, share them."""
    owner = LimitOwner.key(TenantId(tenant_id), KeyId(key_id))
    return await resources.tenancy.limits.set(owner, Quota.from_mapping(body), actor=admin.name)


@router.get("/tenants/{tenant_id}/user_quota")
async def get_user_quota(tenant_id: str, resources: ForAdmin, _: Admin, user: EndUser = None) -> answers.OwnerQuota:
    """Get the limits of one end user of a tenant; without `user`, those of each end user without limits of its own."""
    return await resources.limit_use.get(LimitOwner.user(TenantId(tenant_id), user))


@router.put("/tenants/{tenant_id}/user_quota")
async def set_user_quota(
    tenant_id: str, body: QuotaBody, resources: ForAdmin, admin: Admin, user: EndUser = None
) -> answers.Quota:
    """Replace the limits of one end user of a tenant; without `user`, those of each end user without limits of its own.

    The end user of a request is its `user`, or its `safety_identifier`. The server keeps a digest of the name only.
    """
    owner = LimitOwner.user(TenantId(tenant_id), user)
    return await resources.tenancy.limits.set(owner, Quota.from_mapping(body), actor=admin.name)
