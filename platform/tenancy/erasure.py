"""Erases what deleted tenants have left: their sessions, adapters, cached KV and the names in their usage records.

    deleted ──► each part erases in small transactions ──► all parts are done, and the tenant has settled ──► erased

Owns the order and the record of which tenants are erased. Each part is owned by the room whose data it erases. Keeps
the tenant's row, its usage records and its entries in the audit log; none of them has text of the tenant's clients.
Invariants: a crash or a part that fails costs nothing but time, because the next sweep continues. A tenant counts as
erased only if all parts have found nothing more, some time after the last of its requests can have run.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import InternalFailure, NotFound, Unavailable
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.tenancy import erasure_rows, repository
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.platform.tenancy.tenants import AuditEntry, Erasure

_log = logging.getLogger(__name__)

ErasePart = Callable[[TenantScope], Awaitable[bool]]
"""A function that erases one kind of a tenant's data. Returns whether nothing is left. Can raise Unavailable.

It may be called again at any time, also after it was done.
"""

SETTLE_S = 15.0
"""Seconds after the deletion until a tenant can count as erased. Every gateway has cancelled its requests by then."""
_ACTOR = "server"


class TenantErasure:
    """Erases the deleted tenants. Several processes may do so on the same database at the same time."""

    def __init__(self, database: Database, clock: Clock, parts: Mapping[str, ErasePart]) -> None:
        """`parts` are the functions that erase, by name, in the order in which they are called."""
        self._database = database
        self._clock = clock
        self._parts = {**parts, "accounts": self._erase_accounts}
        self._sweeping = asyncio.Lock()

    async def get(self, tenant_id: TenantId) -> Erasure:
        """Returns how far the erasure of a deleted tenant is. Raises NotFound if there is no such deleted tenant."""
        async with self._database.read() as session:
            erasure = await erasure_rows.find_erasure(session, tenant_id)
        if erasure is None:
            raise NotFound(f"There is no deleted tenant {tenant_id!r}: only a deleted tenant is erased.")
        return erasure

    async def deleted_within(self, seconds: float) -> list[TenantId]:
        """Returns the tenants that were deleted in the last `seconds`, erased or not."""
        async with self._database.read() as session:
            return await erasure_rows.find_deleted(session, self._clock.now() - seconds)

    async def sweep(self) -> int:
        """Erases as much as it can of all deleted tenants. Returns how many of them are now completely erased."""
        async with self._sweeping:
            async with self._database.read() as session:
                pending = await erasure_rows.find_unerased(session)
            return sum([await self._erase(erasure) for erasure in pending])

    async def _erase(self, erasure: Erasure) -> bool:
        scope = scope_of_tenant(AdminPrincipal(), erasure.tenant_id)
        has_settled = erasure.deleted_at is None or self._clock.now() >= erasure.deleted_at + SETTLE_S
        done = [await self._erase_part(name, scope) for name in self._parts]
        if not (has_settled and all(done)):
            return False
        now = self._clock.now()
        async with self._database.write() as session:
            if not await erasure_rows.mark_erased(session, erasure.tenant_id, now):
                return False  # another process was first
            entry = AuditEntry(
                new_id("aud"), now, _ACTOR, "tenant.erased", erasure.tenant_id, erasure.tenant_id, details={}
            )
            await repository.add_audit_entry(session, entry)
        return True

    async def _erase_part(self, name: str, scope: TenantScope) -> bool:
        try:
            return await self._parts[name](scope)
        except (Unavailable, InternalFailure) as error:
            _log.warning("tenant_not_erased", extra={"tenant_id": scope, "part": name, "reason": error.message})
            return False

    async def _erase_accounts(self, scope: TenantScope) -> bool:
        """Deletes keys, limits and idempotency keys again, and the names of adapters in the audit log."""
        async with self._database.write() as session:
            await repository.delete_belongings(session, scope)
            await erasure_rows.erase_adapters_in_audit(session, scope)
        return True
