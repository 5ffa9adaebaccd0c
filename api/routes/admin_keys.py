"""The keys of a tenant, as the operator makes and ends them."""

from typing import Any

from fastapi import APIRouter

from graftwork.api.dependencies import Admin, AppResources
from graftwork.api.guarded_route import SecretRoute
from graftwork.api.pages import AskedPage, list_body
from graftwork.api.schemas.admin import KeyBody, key_body
from graftwork.platform.ids import KeyId, TenantId

router = APIRouter(prefix="/v1/admin/tenants/{tenant_id}/keys", tags=["admin"], route_class=SecretRoute)


@router.post("", status_code=201)
async def create_key(tenant_id: str, body: KeyBody, resources: AppResources, admin: Admin) -> dict[str, Any]:
    """`key` in the answer is the plaintext: it is shown this once."""
    key, plaintext = await resources.tenancy.create_key(
        TenantId(tenant_id), body.name, scopes=body.scopes, expires_at=body.expires_at, actor=admin.name
    )
    return key_body(key, plaintext)


@router.get("")
async def list_keys(tenant_id: str, resources: AppResources, _: Admin, page: AskedPage) -> dict[str, Any]:
    return list_body(await resources.tenancy.list_keys(TenantId(tenant_id), page), key_body)


@router.post("/{key_id}/rotate")
async def rotate_key(tenant_id: str, key_id: str, resources: AppResources, admin: Admin) -> dict[str, Any]:
    """A new secret for the same key; the old one ends at once."""
    key, plaintext = await resources.tenancy.rotate_key(TenantId(tenant_id), KeyId(key_id), actor=admin.name)
    return key_body(key, plaintext)


@router.delete("/{key_id}")
async def revoke_key(tenant_id: str, key_id: str, resources: AppResources, admin: Admin) -> dict[str, Any]:
    """End a key for good; it stays in the list as revoked."""
    return key_body(await resources.tenancy.revoke_key(TenantId(tenant_id), KeyId(key_id), actor=admin.name))
