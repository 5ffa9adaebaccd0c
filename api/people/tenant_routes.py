"""Defines the routes with which a tenant's own people manage its keys and see its members.

Only a person who has signed in as a tenant-admin may use them, and only in the tenant in which the person acts. The
audit log names the person.
"""

from fastapi import APIRouter

from graftwork.api.deps.resources import ForAccounts, ForPeople, TenantAdmin
from graftwork.api.deps.route_classes import NativeRoute, TenantSecretRoute
from graftwork.api.http.pagination import PageQuery, page_answer
from graftwork.api.openapi.declare import also
from graftwork.api.people.views import member_answer
from graftwork.api.schemas.admin import KeyBody, RotationBody, key_answer
from graftwork.platform.answers.admin import TenantKey
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.people import TenantMember
from graftwork.platform.ids import KeyId

keys_router = APIRouter(prefix="/v1/keys", tags=["people"], route_class=TenantSecretRoute)
members_router = APIRouter(prefix="/v1/members", tags=["people"], route_class=NativeRoute)


@keys_router.post("", status_code=201)
async def create_own_key(body: KeyBody, resources: ForAccounts, person: TenantAdmin) -> TenantKey:
    """Create a key of the tenant, as a tenant-admin who has signed in. Only this answer contains `key`, the secret text."""
    made = await resources.tenancy.create_key(person.tenant_id, **body.model_dump(), actor=person.actor)
    return key_answer(*made)


@keys_router.get("")
async def list_own_keys(resources: ForAccounts, person: TenantAdmin, page: PageQuery) -> Page[TenantKey]:
    """List the tenant's keys, also those that were revoked, and those with which its members act."""
    return page_answer(await resources.tenancy.list_keys(person.tenant_id, page), key_answer)


@keys_router.post("/{key_id}/rotate", responses=also(409))
async def rotate_own_key(
    key_id: str, resources: ForAccounts, person: TenantAdmin, body: RotationBody | None = None
) -> TenantKey:
    """Make a new key that allows the same as an old one of the tenant. Only this answer contains `key`, the secret text."""
    wanted = (body or RotationBody()).model_dump()
    return key_answer(
        *await resources.tenancy.rotate_key(person.tenant_id, KeyId(key_id), **wanted, actor=person.actor)
    )


@keys_router.delete("/{key_id}", responses=also(409))
async def revoke_own_key(key_id: str, resources: ForAccounts, person: TenantAdmin) -> TenantKey:
    """Revoke a key of the tenant. The list of keys still shows it."""
    return key_answer(await resources.tenancy.revoke_key(person.tenant_id, KeyId(key_id), actor=person.actor))


@members_router.get("")
async def list_members(resources: ForPeople, person: TenantAdmin, page: PageQuery) -> Page[TenantMember]:
    """List the people who have a role in the tenant, there or by its organisation."""
    return page_answer(await resources.people.members(person.tenant_id, page), member_answer)
