"""Defines the routes for exports of everything that a tenant has: the tenant's own, and the operator's."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from graftwork.api.batches.file_routes import content_response
from graftwork.api.deps.resources import Admin, ExportKey, ForRights, RightsResources
from graftwork.api.deps.route_classes import AdminRoute, NativeRoute
from graftwork.api.http.pagination import PageQuery, page_answer
from graftwork.api.openapi.declare import also
from graftwork.api.rights.views import export_answer
from graftwork.platform.answers.base import Deleted, Page
from graftwork.platform.answers.data_rights import Export
from graftwork.platform.errors import NotPermitted
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.principals import AdminPrincipal, Principal, TenantScope, scope_of_tenant

_ZIP = "application/zip"
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"content": {_ZIP: {"schema": {"type": "string", "format": "binary"}}}}
}
router = APIRouter(prefix="/v1/exports", tags=["data"], route_class=NativeRoute)
admin_router = APIRouter(prefix="/v1/admin/tenants/{tenant_id}/exports", tags=["admin"], route_class=AdminRoute)


@router.post("", status_code=202, responses=also(409, 429))
async def create_export(resources: ForRights, principal: ExportKey) -> Export:
    """Create an export of everything that the tenant has: sessions with their exact tokens, adapters, files, batches,
    usage, keys without their secrets, limits and audit entries.

    The server makes it in the background, and deletes it after some days. One is made at a time, and three are kept.
    """
    return await _create(resources, _own(principal), principal.key_id)


@router.get("")
async def list_exports(resources: ForRights, principal: ExportKey, page: PageQuery) -> Page[Export]:
    """List the exports of the tenant. By default the newest comes first."""
    return page_answer(await resources.exports.list(_own(principal), page), export_answer)


@router.get("/{export_id}")
async def get_export(export_id: str, resources: ForRights, principal: ExportKey) -> Export:
    """Get how far an export is. When it is completed, `…/content` has the archive, and `sha256` is its digest."""
    return export_answer(await resources.exports.get(_own(principal), export_id))


@router.get("/{export_id}/content", response_class=StreamingResponse, responses=_CONTENT | also(409))
async def get_export_content(export_id: str, resources: ForRights, principal: ExportKey) -> StreamingResponse:
    """Download the ZIP archive of an export that is completed. The audit log has who did so."""
    return await _content(resources, _own(principal), export_id, principal.key_id)


@router.delete("/{export_id}")
async def delete_export(export_id: str, resources: ForRights, principal: ExportKey) -> Deleted:
    """Delete an export. One that is being made stops."""
    return await _delete(resources, _own(principal), export_id, principal.key_id)


@admin_router.post("", status_code=202, responses=also(409, 429))
async def create_tenant_export(tenant_id: str, resources: ForRights, admin: Admin) -> Export:
    """Create an export of everything that a tenant has, as `POST /v1/exports` does for the tenant itself."""
    return await _create(resources, _scope(admin, tenant_id), admin.name)


@admin_router.get("")
async def list_tenant_exports(tenant_id: str, resources: ForRights, admin: Admin, page: PageQuery) -> Page[Export]:
    return page_answer(await resources.exports.list(_scope(admin, tenant_id), page), export_answer)


@admin_router.get("/{export_id}")
async def get_tenant_export(tenant_id: str, export_id: str, resources: ForRights, admin: Admin) -> Export:
    return export_answer(await resources.exports.get(_scope(admin, tenant_id), export_id))


@admin_router.get("/{export_id}/content", response_class=StreamingResponse, responses=_CONTENT | also(409))
async def get_tenant_export_content(
    tenant_id: str, export_id: str, resources: ForRights, admin: Admin
) -> StreamingResponse:
    """Download the ZIP archive of a tenant's export. The audit log has who did so."""
    return await _content(resources, _scope(admin, tenant_id), export_id, admin.name)


@admin_router.delete("/{export_id}")
async def delete_tenant_export(tenant_id: str, export_id: str, resources: ForRights, admin: Admin) -> Deleted:
    return await _delete(resources, _scope(admin, tenant_id), export_id, admin.name)


async def _create(resources: RightsResources, scope: TenantScope, actor: str) -> Export:
    export = await resources.exports.create(scope, actor)
    resources.tasks.start(resources.worker.tick(), f"make {export.id}")
    return export_answer(export)


async def _content(resources: RightsResources, scope: TenantScope, export_id: str, actor: str) -> StreamingResponse:
    export, file = await resources.exports.open(scope, export_id, actor)
    return content_response(file, export.size_bytes, _ZIP)


async def _delete(resources: RightsResources, scope: TenantScope, export_id: str, actor: str) -> Deleted:
    await resources.exports.delete(scope, export_id, actor)
    return Deleted(id=export_id, object="export.deleted")


def _own(principal: Principal) -> TenantScope:
    """Returns the tenant's scope. Raises NotPermitted for a key of some models, because an export has all of them."""
    if principal.adapters is not None:
        raise NotPermitted(
            "An export has the adapters and sessions of all models, and this key allows some models only: use a key "
            "without a list of adapters.",
            code="adapter_not_allowed",
        )
    return principal.scope()


def _scope(admin: AdminPrincipal, tenant_id: str) -> TenantScope:
    return scope_of_tenant(admin, TenantId(tenant_id))
