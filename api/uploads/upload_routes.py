"""Defines the routes for uploads in parts, and for adapters that the server fetches.

`part_routes.py` receives the parts.
"""

from typing import Annotated

from fastapi import APIRouter, Query

from graftwork.adapters.uploads.pending_upload import PendingUpload
from graftwork.api.deps.resources import AccountResources, AdapterKey, AnyTenantKey, ForAccounts
from graftwork.api.deps.route_classes import NativeRoute
from graftwork.api.http.pagination import PageQuery, list_answer
from graftwork.api.openapi.declare import also
from graftwork.api.uploads.bodies import UploadBody, upload_answer
from graftwork.platform.answers.adapters import UploadCancelled, VersionUpload
from graftwork.platform.answers.base import Page
from graftwork.platform.keys.scopes import allows_model
from graftwork.platform.tenancy.principals import Principal

router = APIRouter(prefix="/v1/adapter_uploads", tags=["adapters"], route_class=NativeRoute)

OfAdapter = Annotated[str | None, Query(pattern="^[a-z0-9._-]{1,63}$", description="Only those of this adapter.")]


@router.post("", status_code=201, responses=also(409, 413, 429))
async def create_upload(body: UploadBody, resources: ForAccounts, principal: AdapterKey) -> VersionUpload:
    """Begin a version: with `source`, the server fetches the files in the background; else the client sends the weights in
    parts, and then completes the upload.
    """
    principal.require_models([body.name], "name")
    uploads, scope = resources.pending_uploads, principal.scope()
    quota = await resources.tenancy.limits.of_tenant(principal.tenant_id)
    if (fetch := body.fetch(principal)) is not None:
        return await _answer(await uploads.fetch(scope, fetch, quota), resources)
    return await _answer(await uploads.create(scope, body.upload(principal), quota), resources)


@router.get("", responses=also(404))
async def list_uploads(
    resources: ForAccounts, principal: AnyTenantKey, page: PageQuery, name: OfAdapter = None
) -> Page[VersionUpload]:
    """List the uploads and fetches of the adapters that the key allows, also those that have ended, until they expire. A
    page can have fewer than `limit` of them, and more can follow.
    """
    found = await resources.pending_uploads.list(principal.scope(), name, page)
    allowed = [one for one in found.items if allows_model(principal.adapters, one.name)]
    return list_answer([await _answer(one, resources) for one in allowed], has_more=found.has_more)


@router.get("/{upload_id}")
async def get_upload(upload_id: str, resources: ForAccounts, principal: AnyTenantKey) -> VersionUpload:
    """Get an upload: how much has arrived, which version it has become, or why it has failed."""
    return await _answer(await own_upload(upload_id, resources, principal), resources)


@router.post("/{upload_id}/complete", responses=also(409, 429))
async def complete_upload(upload_id: str, resources: ForAccounts, principal: AdapterKey) -> VersionUpload:
    """Complete an upload whose parts have all arrived. The server checks the files at once, and makes a version of them."""
    await own_upload(upload_id, resources, principal)
    quota = await resources.tenancy.limits.of_tenant(principal.tenant_id)
    return await _answer(await resources.pending_uploads.complete(principal.scope(), upload_id, quota), resources)


@router.delete("/{upload_id}")
async def cancel_upload(upload_id: str, resources: ForAccounts, principal: AdapterKey) -> UploadCancelled:
    """Cancel an upload or a fetch, and remove what has arrived. A version that it has become stays."""
    await own_upload(upload_id, resources, principal)
    upload = await resources.pending_uploads.cancel(principal.scope(), upload_id)
    return UploadCancelled(id=upload.id)


async def own_upload(upload_id: str, resources: AccountResources, principal: Principal) -> PendingUpload:
    """Returns an upload of the tenant. Raises NotFound, and NotPermitted if the key does not allow its adapter."""
    upload = await resources.pending_uploads.get(principal.scope(), upload_id)
    principal.require_models([upload.name], "upload_id")
    return upload


async def _answer(upload: PendingUpload, resources: AccountResources) -> VersionUpload:
    uploads = resources.pending_uploads
    return upload_answer(upload, await uploads.received(upload), uploads.limits.max_bytes)
