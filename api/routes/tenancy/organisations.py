"""Defines the operator's routes for organisations: groups of tenants that share limits."""

from fastapi import APIRouter

from graftwork.api.deps.resources import Admin, ForAdmin
from graftwork.api.deps.route_classes import AdminRoute
from graftwork.api.http.pagination import PageQuery, page_answer
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.admin import OrganisationBody, organisation_answer, tenant_answer
from graftwork.platform.answers import admin as answers
from graftwork.platform.answers.base import Deleted, Page
from graftwork.platform.ids import OrganisationId, TenantId

router = APIRouter(prefix="/v1/admin/organisations", tags=["admin"], route_class=AdminRoute)


@router.post("", status_code=201)
async def create_organisation(body: OrganisationBody, resources: ForAdmin, admin: Admin) -> answers.Organisation:
    """Create an organisation without tenants."""
    return organisation_answer(await resources.tenancy.organisations.create(body.name, actor=admin.name))


@router.get("")
async def list_organisations(resources: ForAdmin, _: Admin, page: PageQuery) -> Page[answers.Organisation]:
    return page_answer(await resources.tenancy.organisations.list(page), organisation_answer)


@router.get("/{organisation_id}")
async def get_organisation(organisation_id: str, resources: ForAdmin, _: Admin) -> answers.Organisation:
    return organisation_answer(await resources.tenancy.organisations.get(OrganisationId(organisation_id)))


@router.patch("/{organisation_id}")
async def update_organisation(
    organisation_id: str, body: OrganisationBody, resources: ForAdmin, admin: Admin
) -> answers.Organisation:
    """Rename an organisation."""
    renamed = await resources.tenancy.organisations.rename(OrganisationId(organisation_id), body.name, actor=admin.name)
    return organisation_answer(renamed)


@router.delete("/{organisation_id}", responses=also(409))
async def delete_organisation(organisation_id: str, resources: ForAdmin, admin: Admin) -> Deleted:
    """Delete an organisation with its limits. 409 while tenants belong to it."""
    await resources.tenancy.organisations.delete(OrganisationId(organisation_id), actor=admin.name)
    return Deleted(id=organisation_id, object="organisation.deleted")


@router.get("/{organisation_id}/tenants")
async def list_organisation_tenants(
    organisation_id: str, resources: ForAdmin, _: Admin, page: PageQuery
) -> Page[answers.Tenant]:
    """List the tenants that belong to an organisation."""
    found = await resources.tenancy.organisations.get(OrganisationId(organisation_id))
    return page_answer(await resources.tenancy.list_tenants(page, found.id), tenant_answer)


@router.put("/{organisation_id}/tenants/{tenant_id}")
async def add_organisation_tenant(
    organisation_id: str, tenant_id: str, resources: ForAdmin, admin: Admin
) -> answers.Tenant:
    """Make a tenant belong to an organisation, and to no other one. What it used before does not count there."""
    tenant = await resources.tenancy.organisations.add_tenant(
        OrganisationId(organisation_id), TenantId(tenant_id), actor=admin.name
    )
    return tenant_answer(tenant)


@router.delete("/{organisation_id}/tenants/{tenant_id}")
async def remove_organisation_tenant(
    organisation_id: str, tenant_id: str, resources: ForAdmin, admin: Admin
) -> answers.Tenant:
    """Make a tenant of an organisation belong to none."""
    tenant = await resources.tenancy.organisations.remove_tenant(
        OrganisationId(organisation_id), TenantId(tenant_id), actor=admin.name
    )
    return tenant_answer(tenant)
