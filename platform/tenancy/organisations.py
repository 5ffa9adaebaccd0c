"""Manages organisations: groups of tenants that share limits.

Owns every change to organisations and to which tenants belong to them. Each change adds an entry to the audit log in the
same transaction. Never changes limits: `limit_book.py` does.
Invariant: a tenant belongs to one organisation or to none, and every organisation that a tenant belongs to exists.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import Conflict, NotFound
from graftwork.platform.ids import OrganisationId, TenantId, new_id
from graftwork.platform.pagination import FIRST_PAGE, Page, PageRequest
from graftwork.platform.tenancy import key_rows, organisation_rows, repository
from graftwork.platform.tenancy.limit_book import NO_TENANT
from graftwork.platform.tenancy.new_keys import check_name
from graftwork.platform.tenancy.tenants import AuditEntry, Organisation, Tenant
from graftwork.platform.tenancy.verified_keys import AccessChanges

AfterMove = Callable[[WriteSession, TenantId], Awaitable[None]]
"""A function that changes what depends on the organisation of a tenant."""


class Organisations:
    """Reads and changes organisations. `actor` is who makes a change, for the audit log."""

    def __init__(self, database: Database, clock: Clock, changes: AccessChanges) -> None:
        self._database = database
        self._clock = clock
        self._changes = changes
        self._after_move: AfterMove | None = None

    def follow(self, after_move: AfterMove) -> None:
        """Calls `after_move` in the transaction of each move of a tenant to or from an organisation."""
        self._after_move = after_move

    async def create(self, name: str, *, actor: str = "admin") -> Organisation:
        """Creates an organisation without tenants. Raises ValidationFailed for a name that is not allowed."""
        check_name(name)
        made = Organisation(OrganisationId(new_id("org")), name, self._clock.now())
        async with self._database.write() as session:
            await organisation_rows.add_organisation(session, made)
            await self._audit(session, actor, "organisation.created", made.id, {"name": name})
        return made

    async def list(self, page: PageRequest = FIRST_PAGE) -> Page[Organisation]:
        async with self._database.read() as session:
            return await organisation_rows.list_organisations(session, page)

    async def get(self, organisation_id: OrganisationId) -> Organisation:
        """Returns the organisation. Raises NotFound."""
        async with self._database.read() as session:
            return _existing(await organisation_rows.find_organisation(session, organisation_id), organisation_id)

    async def rename(self, organisation_id: OrganisationId, name: str, *, actor: str = "admin") -> Organisation:
        """Renames an organisation. Raises NotFound, and ValidationFailed for a name that is not allowed."""
        check_name(name)
        async with self._database.write() as session:
            found = await hold_organisation(session, organisation_id)
            await organisation_rows.rename_organisation(session, organisation_id, name)
            await self._audit(session, actor, "organisation.updated", organisation_id, {"name": name})
        return replace(found, name=name)

    async def delete(self, organisation_id: OrganisationId, *, actor: str = "admin") -> None:
        """Deletes an organisation with its limits. Raises NotFound, and Conflict while tenants belong to it."""
        async with self._database.write() as session:
            await hold_organisation(session, organisation_id)
            if await organisation_rows.has_tenants(session, organisation_id):
                message = "Tenants belong to this organisation: remove them from it, or delete them, first."
                raise Conflict(message, code="organisation_not_empty")
            await organisation_rows.delete_organisation(session, organisation_id)
            await self._audit(session, actor, "organisation.deleted", organisation_id, {})

    async def add_tenant(self, organisation_id: OrganisationId, tenant_id: TenantId, *, actor: str = "admin") -> Tenant:
        """Makes a tenant belong to an organisation, and to no other one. Returns the tenant.

        What the tenant has used before does not count for the organisation. Raises NotFound.
        """
        async with self._database.write() as session:
            await hold_organisation(session, organisation_id)
            moved = await self._move(session, tenant_id, organisation_id, actor)
        self._changes.note_change()
        return moved

    async def remove_tenant(
        self, organisation_id: OrganisationId, tenant_id: TenantId, *, actor: str = "admin"
    ) -> Tenant:
        """Makes a tenant of an organisation belong to none. Returns the tenant. Raises NotFound if it is not in it."""
        async with self._database.write() as session:
            await hold_organisation(session, organisation_id)
            if await organisation_rows.organisation_of(session, tenant_id) != organisation_id:
                raise NotFound(f"There is no tenant {tenant_id!r} in this organisation.")
            moved = await self._move(session, tenant_id, None, actor)
        self._changes.note_change()
        return moved

    async def _move(
        self, session: WriteSession, tenant_id: TenantId, organisation_id: OrganisationId | None, actor: str
    ) -> Tenant:
        tenant = await repository.hold_tenant(session, tenant_id)
        if tenant is None:
            raise NotFound(f"There is no tenant {tenant_id!r}.")
        await organisation_rows.move_tenant(session, tenant_id, organisation_id)
        details = {"organisation_id": organisation_id, "previous": tenant.organisation_id}
        await self._audit(session, actor, "tenant.moved", tenant_id, details, tenant_id)
        if self._after_move is not None:
            await self._after_move(session, tenant_id)
        await key_rows.count_access_change(session)
        return replace(tenant, organisation_id=organisation_id)

    async def _audit(
        self,
        session: WriteSession,
        actor: str,
        action: str,
        target: str,
        details: dict[str, Any],
        tenant_id: TenantId = NO_TENANT,
    ) -> None:
        entry = AuditEntry(new_id("aud"), self._clock.now(), actor, action, tenant_id, target, details)
        await repository.add_audit_entry(session, entry)


async def hold_organisation(session: WriteSession, organisation_id: OrganisationId) -> Organisation:
    """Returns the organisation, and locks its row until the transaction ends. Raises NotFound."""
    return _existing(await organisation_rows.hold_organisation(session, organisation_id), organisation_id)


def _existing(found: Organisation | None, organisation_id: OrganisationId) -> Organisation:
    if found is None:
        raise NotFound(f"There is no organisation {organisation_id!r}.")
    return found
