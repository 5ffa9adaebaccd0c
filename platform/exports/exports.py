"""Creates, finds and deletes the exports of tenants.

Owns what a tenant or an operator may do with an export, and its entries in the audit log. Never makes the archive:
ExportWorker does.
Invariant: each archive has a row. What a crash leaves of one is deleted with its row, or written anew.
"""

from dataclasses import replace
from typing import BinaryIO

from graftwork.platform.batches.file_vault import FileVault
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import BudgetSpent, Conflict, NotFound
from graftwork.platform.exports import repository
from graftwork.platform.exports.export import (
    EXPORT_PREFIX,
    MAX_KEPT,
    Export,
    ExportStatus,
    unknown_export,
)
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.platform.tenancy.repository import add_audit_entry, find_tenant, hold_tenant
from graftwork.platform.tenancy.tenants import AuditEntry

_SWEPT_PER_QUERY = 100


class ExportKeeper:
    """The exports of all tenants, for the routes."""

    def __init__(self, database: Database, vault: FileVault, clock: Clock, lives_s: float) -> None:
        """`lives_s` is how many seconds an archive is kept after its end."""
        self._database = database
        self._clock = clock
        self.vault = vault
        self.lives_s = lives_s

    async def create(self, scope: TenantScope, actor: str) -> Export:
        """Creates an export, which a gateway then makes.

        Raises NotFound if the tenant does not exist, Conflict while another export of it is made, and BudgetSpent if it
        has too many.
        """
        export = Export(new_id(EXPORT_PREFIX), TenantId(scope), ExportStatus.QUEUED, self._clock.now(), actor)
        async with self._database.write() as session:
            if await hold_tenant(session, scope) is None:
                raise _unknown_tenant(scope)
            kept, unended = await repository.count(session, scope)
            if unended:
                raise Conflict(
                    "Another export of this tenant is being made: wait for its end, or delete it.",
                    code="export_in_progress",
                )
            if kept >= MAX_KEPT:
                raise BudgetSpent(
                    f"This tenant has {kept} exports, and may have {MAX_KEPT}: delete one first.",
                    code="too_many_exports",
                )
            await repository.add(session, export)
            await self._audit(session, export, actor, "export.created")
        return export

    async def get(self, scope: TenantScope, export_id: str) -> Export:
        """Returns an export. Raises NotFound if there is none, or if its time is over."""
        async with self._database.read() as session:
            export = await repository.find(session, scope, export_id)
        if export is None or (export.expires_at is not None and export.expires_at <= self._clock.now()):
            raise unknown_export(export_id)
        return export

    async def list(self, scope: TenantScope, page: PageRequest) -> Page[Export]:
        """Returns one page of a tenant's exports. Raises NotFound if the tenant does not exist."""
        async with self._database.read() as session:
            if await find_tenant(session, scope) is None:
                raise _unknown_tenant(scope)
            return await repository.page(session, scope, page)

    async def open(self, scope: TenantScope, export_id: str, actor: str) -> tuple[Export, BinaryIO]:
        """Opens the archive of an export that is complete, and records who has taken it.

        Raises NotFound if there is none on this gateway, and Conflict if it is not complete.
        """
        export = await self.get(scope, export_id)
        if export.status is not ExportStatus.COMPLETED:
            raise Conflict(
                f"This export is {export.status}, so it has no archive: wait until it is completed, or create another one.",
                code="export_not_ready",
            )
        file = await self.vault.open(scope, export.content_id)
        try:
            async with self._database.write() as session:
                await self._audit(session, export, actor, "export.downloaded")
        except BaseException:
            file.close()
            raise
        return export, file

    async def delete(self, scope: TenantScope, export_id: str, actor: str) -> None:
        """Deletes an export. One that is being made stops. Raises NotFound."""
        await self._remove(scope, (await self.get(scope, export_id)).id, actor)

    async def sweep(self) -> int:
        """Deletes the exports of all tenants whose time is over. Returns how many there were."""
        num_removed = 0
        while True:
            async with self._database.read() as session:
                expired = await repository.find_expired(session, self._clock.now(), _SWEPT_PER_QUERY)
            for tenant_id, export_id in expired:
                await self._remove(scope_of_tenant(AdminPrincipal(), tenant_id), export_id, "server")
            num_removed += len(expired)
            if len(expired) < _SWEPT_PER_QUERY:
                return num_removed

    async def erase(self, scope: TenantScope) -> bool:
        """Erases all exports of a deleted tenant. Returns True."""
        async with self._database.write() as session:
            await repository.forget_all(session, scope)
        await self.vault.delete_tenant(scope)
        return True

    async def _remove(self, scope: TenantScope, export_id: str, actor: str) -> None:
        """Deletes the archive, and then its row. A gateway that is making the archive deletes what it has written."""
        async with self._database.read() as session:
            export = await repository.find(session, scope, export_id)
        if export is None:
            return  # another gateway was faster
        await self.drop_archives(export)
        async with self._database.write() as session:
            if await repository.forget(session, scope, export_id):
                await self._audit(session, export, actor, "export.deleted")

    async def drop_archives(self, export: Export, before: bool = False) -> None:
        """Deletes what this and earlier claims of an export have written. With `before`, only what earlier ones have."""
        for epoch in range(1, export.epoch + (not before)):
            old = replace(export, epoch=epoch)
            await self.vault.delete(scope_of_tenant(AdminPrincipal(), old.tenant_id), old.content_id)

    async def _audit(self, session: WriteSession, export: Export, actor: str, action: str) -> None:
        at = self._clock.now()
        await add_audit_entry(session, AuditEntry(new_id("aud"), at, actor, action, export.tenant_id, export.id, {}))


def _unknown_tenant(tenant_id: str) -> NotFound:
    return NotFound(f"There is no tenant {tenant_id[:80]!r}.", code="tenant_not_found")
