"""Defines the operator's routes for tenants, keys, usage, audit entries and replicas."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from graftwork.api.deps.resources import Admin, AdminResources, ForAdmin, ForPeople
from graftwork.api.deps.route_classes import AdminRoute, SecretRoute
from graftwork.api.http.pagination import PageQuery, list_answer, page_answer
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.admin import (
    KeyBody,
    ModesBody,
    RotationBody,
    TenantBody,
    TenantPatch,
    audit_answer,
    erasure_answer,
    key_answer,
    modes_answer,
    replica_answer,
    tenant_answer,
)
from graftwork.api.schemas.usage import TimeText, check_answer, span, usage_answer
from graftwork.platform.answers import admin as answers
from graftwork.platform.answers.base import Deleted, Page
from graftwork.platform.answers.usage import UsageCheck, UsageRow
from graftwork.platform.ids import KeyId, OrganisationId, TenantId
from graftwork.platform.ledger.upkeep.agreement import SETTLED_S
from graftwork.platform.ledger.usage import UsageGroup

keys_router = APIRouter(prefix="/v1/admin/tenants/{tenant_id}/keys", tags=["admin"], route_class=SecretRoute)


@keys_router.post("", status_code=201)
async def create_key(tenant_id: str, body: KeyBody, resources: ForAdmin, admin: Admin) -> answers.TenantKey:
    """Create a key. Only this answer contains `key`, the secret text."""
    made = await resources.tenancy.create_key(TenantId(tenant_id), **body.model_dump(), actor=admin.name)
    return key_answer(*made)


@keys_router.get("")
async def list_keys(tenant_id: str, resources: ForAdmin, _: Admin, page: PageQuery) -> Page[answers.TenantKey]:
    return page_answer(await resources.tenancy.list_keys(TenantId(tenant_id), page), key_answer)


@keys_router.post("/{key_id}/rotate", responses=also(409))
async def rotate_key(
    tenant_id: str, key_id: str, resources: ForAdmin, admin: Admin, body: RotationBody | None = None
) -> answers.TenantKey:
    """Make a new key that allows the same as an old one. Only this answer contains `key`, the secret text.

    The old key ends after `overlap_s` seconds: by default at once, and then the requests that it has started are
    cancelled. A key can be rotated once; rotate the new one next time.
    """
    wanted = (body or RotationBody()).model_dump()
    return key_answer(
        *await resources.tenancy.rotate_key(TenantId(tenant_id), KeyId(key_id), **wanted, actor=admin.name)
    )


@keys_router.delete("/{key_id}", responses=also(409))
async def revoke_key(tenant_id: str, key_id: str, resources: ForAdmin, admin: Admin) -> answers.TenantKey:
    """Revoke a key. The list of keys still shows it."""
    return key_answer(await resources.tenancy.revoke_key(TenantId(tenant_id), KeyId(key_id), actor=admin.name))


reports_router = APIRouter(prefix="/v1/admin", tags=["admin"], route_class=AdminRoute)


@reports_router.get("/usage")
async def get_tenants_usage(
    resources: ForAdmin,
    _: Admin,
    start: Annotated[TimeText, Query(alias="from")] = None,
    end: Annotated[TimeText, Query(alias="to")] = None,
    group_by: Literal[
        "day", "adapter", "session", "key", "tenant", "tier", "price", "organisation", "user", "batch", "model"
    ] = "tenant",
    tenant_id: Annotated[str | None, Query(max_length=200)] = None,
) -> Page[UsageRow]:
    """Sum usage and costs over the time range [from, to). By default this is the last 30 days of all tenants.

    `tenant_id` selects one tenant, also one that was deleted.
    """
    since, until = span(start, end, resources.clock.now())
    of_tenant = None if tenant_id is None else TenantId(tenant_id)
    group = UsageGroup(group_by)
    return usage_answer(
        await resources.meter.summarise(of_tenant, since, until, group), group, resources.description.model_name
    )


@reports_router.get("/usage/check")
async def check_usage(
    resources: ForAdmin,
    _: Admin,
    start: Annotated[TimeText, Query(alias="from")] = None,
    end: Annotated[TimeText, Query(alias="to")] = None,
    settled_s: Annotated[float, Query(ge=0, le=86_400)] = SETTLED_S,
) -> UsageCheck:
    """Compare each request in the ledger with what the engines reported about it, and the ledger's sums with its requests.

    `differences` is 0 if all agrees. A report without a request in the ledger is a difference after `settled_s` seconds.
    By default the last 30 days are compared. `journal` is that of the gateway that answers.
    """
    since, until = span(start, end, resources.clock.now())
    await resources.meter.write_waiting()
    found = await resources.agreement.compare(since, until, settled_s)
    return check_answer(found, await resources.replicas.list(), resources.backlog)


@reports_router.get("/audit")
async def list_audit_entries(
    resources: ForAdmin, people: ForPeople, _: Admin, page: PageQuery
) -> Page[answers.AuditEntry]:
    """List the audit entries: who changed what, and when. By default the newest entry comes first."""
    found = await resources.tenancy.audit(page)
    names = await people.people.names({entry.actor for entry in found.items})
    return page_answer(found, lambda entry: audit_answer(entry, names))


@reports_router.get("/modes")
async def get_modes(resources: ForAdmin, _: Admin) -> answers.Modes:
    """Get the degraded modes that are in force."""
    return modes_answer(await resources.modes.refresh())


@reports_router.put("/modes")
async def set_modes(body: ModesBody, resources: ForAdmin, admin: Admin) -> answers.Modes:
    """Replace all degraded modes. Every gateway follows within a second, for requests that begin from then on.

    A mode that is missing is switched off. Answers that a mode changes have the header `x-graftwork-degraded`.
    """
    return modes_answer(await resources.modes.set(body.modes(), actor=admin.name))


@reports_router.get("/replicas")
async def list_replicas(resources: ForAdmin, _: Admin) -> Page[answers.Replica]:
    """List the engines with figures of their load, such as the numbers of running and waiting requests."""
    return list_answer([replica_answer(reading) for reading in await resources.replicas.list()])


@reports_router.post("/replicas/{replica_id}/drain")
async def drain_replica(replica_id: str, resources: ForAdmin, _: Admin) -> answers.Replica:
    """Drain an engine: it gets no new requests, and its running ones end there or go on at another engine.

    The answer comes at once, with the status `draining`. An engine that `serve` has started is then started again; one
    with a lease ends. The server cannot drain its only engine.
    """
    return replica_answer(await resources.replicas.drain(replica_id))


tenants_router = APIRouter(prefix="/v1/admin/tenants", tags=["admin"], route_class=AdminRoute)


@tenants_router.post("", status_code=201, responses=also(404))
async def create_tenant(body: TenantBody, resources: ForAdmin, admin: Admin) -> answers.Tenant:
    tenant = await resources.tenancy.create_tenant(
        body.name,
        weight=body.weight,
        service_tier_ceiling=body.service_tier_ceiling,
        organisation_id=None if body.organisation_id is None else OrganisationId(body.organisation_id),
        actor=admin.name,
    )
    return tenant_answer(tenant)


@tenants_router.get("")
async def list_tenants(resources: ForAdmin, _: Admin, page: PageQuery) -> Page[answers.Tenant]:
    return page_answer(await resources.tenancy.list_tenants(page), tenant_answer)


@tenants_router.get("/{tenant_id}")
async def get_tenant(tenant_id: str, resources: ForAdmin, _: Admin) -> answers.Tenant:
    return tenant_answer(await resources.tenancy.get_tenant(TenantId(tenant_id)))


@tenants_router.patch("/{tenant_id}")
async def update_tenant(tenant_id: str, body: TenantPatch, resources: ForAdmin, admin: Admin) -> answers.Tenant:
    tenant = await resources.tenancy.update_tenant(
        TenantId(tenant_id),
        name=body.name,
        weight=body.weight,
        service_tier_ceiling=body.service_tier_ceiling,
        actor=admin.name,
    )
    return tenant_answer(tenant)


@tenants_router.delete("/{tenant_id}")
async def delete_tenant(tenant_id: str, resources: ForAdmin, admin: Admin) -> Deleted:
    """Delete a tenant. Its keys stop working and its running requests are cancelled at once.

    Within minutes the server erases its sessions, responses, adapters and cached KV. `GET …/erasure` says when it is
    done. Token counts of the usage, and audit entries, stay.
    """
    await resources.tenancy.delete_tenant(TenantId(tenant_id), actor=admin.name)
    resources.tasks.start(_erase(resources), f"erase {tenant_id}")
    return Deleted(id=tenant_id, object="tenant.deleted")


async def _erase(resources: AdminResources) -> None:
    await resources.erasure.sweep()


@tenants_router.get("/{tenant_id}/erasure")
async def get_erasure(tenant_id: str, resources: ForAdmin, _: Admin) -> answers.TenantErasure:
    """Get how far the erasure of a deleted tenant is. 404 for a tenant that was not deleted."""
    return erasure_answer(await resources.erasure.get(TenantId(tenant_id)))


@tenants_router.post("/{tenant_id}/suspend")
async def suspend_tenant(tenant_id: str, resources: ForAdmin, admin: Admin) -> answers.Tenant:
    """Suspend a tenant. Requests with its keys get a 403 until the tenant is resumed."""
    return tenant_answer(await resources.tenancy.suspend_tenant(TenantId(tenant_id), actor=admin.name))


@tenants_router.post("/{tenant_id}/resume")
async def resume_tenant(tenant_id: str, resources: ForAdmin, admin: Admin) -> answers.Tenant:
    return tenant_answer(await resources.tenancy.resume_tenant(TenantId(tenant_id), actor=admin.name))
