"""Deletes adapters and versions, restores them within their time, and erases them after it.

Owns how long what was deleted can be restored. ArtifactKeeper removes the files.
Invariants: no request gets what was deleted. Its files stay until it is erased, and its name stays taken.
"""

from graftwork.adapters.format.specs import Adapter, AdapterVersion, unknown_adapter
from graftwork.adapters.registry.artifact_ledger import ArtifactKeeper
from graftwork.adapters.registry.repository import AdapterWriter, expired_adapters
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, NotFound
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant

_SWEEP = "sweep"
"""The actor of the audit entries of what is erased because its time is over."""


class AdapterDeletions:
    """Deletes, restores and erases the adapters of all tenants. Each call except `sweep` is for one tenant."""

    def __init__(self, database: Database, keeper: ArtifactKeeper, clock: Clock, grace_s: float) -> None:
        """`grace_s` is how many seconds what was deleted can be restored; 0 erases at once."""
        self._database = database
        self._keeper = keeper
        self._clock = clock
        self._grace_s = grace_s

    async def delete(
        self, scope: TenantScope, name: str, *, erase: bool = False, actor: str = "admin"
    ) -> tuple[str, ...]:
        """Deletes the adapter with its versions and aliases. Returns the digests whose files were removed.

        With `erase` it cannot be restored, and what was deleted before is erased too. Files stay if another version (of
        any tenant) has the same digest. Raises NotFound if the adapter does not exist.
        """
        is_erased = erase or not self._grace_s
        async with self._database.write() as session:
            writer, now = AdapterWriter(session, scope), self._clock.now()
            adapter = await writer.lock(name)
            if adapter is None or not _can_delete(adapter, is_erased=is_erased):
                raise unknown_adapter(name)
            if is_erased:
                await writer.delete_adapter(adapter.id)
            else:
                await writer.mark_adapter(adapter.id, now)
            details = {"id": adapter.id, "versions": [version.version for version in adapter.versions]}
            await writer.audit(now, actor, "adapter.erased" if is_erased else "adapter.deleted", name, details)
        return await self._keeper.free(_digests(adapter)) if is_erased else ()

    async def delete_version(
        self, scope: TenantScope, name: str, version: int, *, erase: bool = False, actor: str = "admin"
    ) -> tuple[str, ...]:
        """Deletes one version of an adapter. Returns the version's digest if its files were removed, else an empty
        tuple.

        With `erase` it cannot be restored; a version that was deleted before can be erased too. The files stay if
        another version (of any tenant) has the same digest. Raises Conflict if an alias has the version as a target,
        and NotFound if the adapter or the version does not exist.

        If this was the last version, the adapter no longer exists. If a new adapter gets the same name, its version
        numbers continue after the old ones.
        """
        is_erased = erase or not self._grace_s
        async with self._database.write() as session:
            writer, now = AdapterWriter(session, scope), self._clock.now()
            adapter = await writer.lock(name)
            if adapter is None or adapter.deleted_at is not None:
                raise unknown_adapter(name)
            found = _require_version(adapter, version, deleted_too=is_erased)
            _check_unaliased(adapter, version)
            if is_erased:
                await writer.delete_version(adapter.id, version)
            else:
                await writer.mark_version(adapter.id, version, now)
            action = "adapter.version.erased" if is_erased else "adapter.version.deleted"
            await writer.audit(now, actor, action, found.label, {"digest": found.digest})
        return await self._keeper.free({found.digest}) if is_erased else ()

    async def restore(self, scope: TenantScope, name: str, *, actor: str = "admin") -> Adapter:
        """Restores an adapter that was deleted, with the versions and aliases that it had. Returns the adapter.

        Raises NotFound if there is no such adapter to restore.
        """
        async with self._database.write() as session:
            writer, now = AdapterWriter(session, scope), self._clock.now()
            adapter = await writer.lock(name)
            if adapter is None or adapter.deleted_at is None:
                raise _nothing_to_restore()
            await writer.mark_adapter(adapter.id, None)
            await writer.audit(now, actor, "adapter.restored", name, {"id": adapter.id})
            return await writer.reload(name)

    async def restore_version(self, scope: TenantScope, name: str, version: int, *, actor: str = "admin") -> Adapter:
        """Restores a version that was deleted. Returns the adapter. Raises NotFound if there is no such version to restore."""
        async with self._database.write() as session:
            writer, now = AdapterWriter(session, scope), self._clock.now()
            adapter = await writer.lock(name)
            if adapter is None or adapter.deleted_at is not None:
                raise unknown_adapter(name)
            found = next((each for each in adapter.deleted_versions if each.version == version), None)
            if found is None:
                raise _nothing_to_restore()
            await writer.mark_version(adapter.id, version, None)
            await writer.audit(now, actor, "adapter.version.restored", found.label, {"digest": found.digest})
            return await writer.reload(name)

    async def delete_all(self, scope: TenantScope) -> tuple[str, ...]:
        """Erases all adapters of a tenant. Returns the digests whose files were removed.

        The files of a digest are not removed if a version of another tenant has the same digest.
        """
        async with self._database.write() as session:
            writer = AdapterWriter(session, scope)
            await writer.lock_tenant()
            digests = await writer.digests()
            await writer.delete_all_adapters()
        return await self._keeper.free(digests)

    async def sweep(self) -> int:
        """Erases what was deleted too long ago to be restored. Returns how many adapters and versions that were."""
        before = self._clock.now() - self._grace_s
        async with self._database.read() as session:
            expired = await expired_adapters(session, before)
        erased = [await self._erase_expired(*each, before) for each in expired]
        return sum(erased)

    async def _erase_expired(self, tenant_id: TenantId, name: str, version: int | None, before: float) -> bool:
        """Erases an adapter, or one version, unless it was restored meanwhile. Returns whether it was erased."""
        scope = scope_of_tenant(AdminPrincipal(), tenant_id)
        async with self._database.write() as session:
            writer, now = AdapterWriter(session, scope), self._clock.now()
            adapter = await writer.lock(name)
            if adapter is None:
                return False
            if version is None:
                if adapter.deleted_at is None or adapter.deleted_at >= before:
                    return False
                await writer.delete_adapter(adapter.id)
                await writer.audit(now, _SWEEP, "adapter.erased", name, {"id": adapter.id})
                digests = _digests(adapter)
            else:
                found = next((each for each in adapter.deleted_versions if each.version == version), None)
                if found is None or found.deleted_at is None or found.deleted_at >= before:
                    return False
                await writer.delete_version(adapter.id, version)
                await writer.audit(now, _SWEEP, "adapter.version.erased", found.label, {"digest": found.digest})
                digests = {found.digest}
        await self._keeper.free(digests)
        return True


def _can_delete(adapter: Adapter, *, is_erased: bool) -> bool:
    """Returns whether there is anything to delete; if it is to be erased, what was deleted before counts too."""
    is_there = adapter.deleted_at is None and bool(adapter.versions)
    return is_there or (is_erased and bool(adapter.versions or adapter.deleted_versions))


def _digests(adapter: Adapter) -> set[str]:
    return {version.digest for version in (*adapter.versions, *adapter.deleted_versions)}


def _nothing_to_restore() -> NotFound:
    return NotFound("Nothing of this name can be restored.", param="name", code="nothing_to_restore")


def _require_version(adapter: Adapter, version: int, *, deleted_too: bool) -> AdapterVersion:
    candidates = (*adapter.versions, *(adapter.deleted_versions if deleted_too else ()))
    found = next((each for each in candidates if each.version == version), None)
    if found is None:
        message = f"The adapter has no version {version}."
        raise NotFound(message, param="version", code="version_not_found")
    return found


def _check_unaliased(adapter: Adapter, version: int) -> None:
    holding = [alias for alias, target in adapter.aliases.items() if version in target.versions]
    if holding:
        message = f"Version {version} is what '{adapter.name}@{holding[0]}' leads to: move or remove the alias first."
        raise Conflict(message, code="version_in_use", details={"aliases": holding})
