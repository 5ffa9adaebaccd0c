"""Sets for how many days a tenant's data is kept, and deletes what is older.

    set ──► a row, and an entry in the audit log        sweep ──► each part deletes what is older than its days

Owns the settings, and the record of what was deleted because of them. Each part is owned by the room whose data it
deletes. Without a setting, everything is kept for as long as the tenant exists.
Invariant: what was deleted for a retention has an entry in the audit log, with the kind and the number.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping

from graftwork.platform.answers.data_rights import Retention
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import NotFound, Unavailable
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.retention import repository
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.platform.tenancy.repository import add_audit_entry, find_tenant, hold_tenant
from graftwork.platform.tenancy.tenants import AuditEntry

_log = logging.getLogger("graftwork.retention")

DeleteOlder = Callable[[TenantScope, float], Awaitable[int]]
"""A function that deletes what a tenant has of one kind from before a time in Unix seconds. Returns how much that was.

It may be called again at any time, and by several gateways at once. Can raise Unavailable.
"""

_DAY_S = 86_400.0
_TENANTS_PER_QUERY = 100
_ACTOR = "server"


class RetentionKeeper:
    """The retention of all tenants."""

    def __init__(self, database: Database, clock: Clock, parts: Mapping[str, DeleteOlder]) -> None:
        """`parts` are the functions that delete, by the field of `Retention` that has their days."""
        assert parts.keys() == Retention.model_fields.keys()
        self._database = database
        self._clock = clock
        self._parts = dict(parts)

    async def get(self, scope: TenantScope) -> Retention:
        """Returns the retention of a tenant. Raises NotFound if the tenant does not exist."""
        async with self._database.read() as session:
            if await find_tenant(session, scope) is None:
                raise _unknown_tenant(scope)
            return await repository.find(session, scope)

    async def set(self, scope: TenantScope, retention: Retention, *, actor: str) -> Retention:
        """Replaces the retention of a tenant. The next sweep follows it. Raises NotFound."""
        now = self._clock.now()
        async with self._database.write() as session:
            if await hold_tenant(session, scope) is None:
                raise _unknown_tenant(scope)
            await repository.put(session, scope, retention, now)
            entry = AuditEntry(
                new_id("aud"), now, actor, "retention.set", TenantId(scope), scope, details=retention.body()
            )
            await add_audit_entry(session, entry)
        return retention

    async def sweep(self) -> int:
        """Deletes what is older than its tenant wants. Returns how much that was."""
        num_deleted, after = 0, ""
        while True:
            async with self._database.read() as session:
                found = await repository.find_all(session, after, _TENANTS_PER_QUERY)
            for tenant_id, retention in found:
                num_deleted += await self._apply(scope_of_tenant(AdminPrincipal(), tenant_id), retention)
                after = tenant_id
            if len(found) < _TENANTS_PER_QUERY:
                return num_deleted

    async def erase(self, scope: TenantScope) -> bool:
        """Deletes the setting of a deleted tenant. Returns True."""
        async with self._database.write() as session:
            await repository.forget(session, scope)
        return True

    async def _apply(self, scope: TenantScope, retention: Retention) -> int:
        deleted = dict[str, int]()
        for field, delete_older in self._parts.items():
            days: int | None = getattr(retention, field)
            if days is None:
                continue
            try:
                number = await delete_older(scope, self._clock.now() - days * _DAY_S)
            except Unavailable as error:
                extra = {"tenant_id": scope, "part": field, "reason": error.message}
                _log.warning("retention_not_applied", extra=extra)
                continue
            if number:
                deleted[field.removesuffix("_days")] = number
        if deleted:
            await self._record(scope, deleted)
        return sum(deleted.values())

    async def _record(self, scope: TenantScope, deleted: Mapping[str, int]) -> None:
        at = self._clock.now()
        entry = AuditEntry(new_id("aud"), at, _ACTOR, "retention.applied", TenantId(scope), scope, dict(deleted))
        async with self._database.write() as session:
            await add_audit_entry(session, entry)


def _unknown_tenant(tenant_id: str) -> NotFound:
    return NotFound(f"There is no tenant {tenant_id[:80]!r}.", code="tenant_not_found")
