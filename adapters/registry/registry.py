"""Keeps the adapters of every tenant, and finds the weights that the `model` of a request selects.

Owns the names, versions and aliases of adapters. ArtifactKeeper owns their files. Never applies an adapter: the engine
does.
Invariants: a tenant sees only its own adapters; for another tenant's adapter it gets the same error as for an unknown
name. A version never changes, and the number of a deleted version is never used again.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from graftwork.adapters.format.specs import (
    Adapter,
    AdapterVersion,
    AliasChange,
    AliasTarget,
    OwnedVersion,
    ResolvedModel,
    check_adapter_name,
    check_alias,
    parse_reference,
    unknown_adapter,
    unknown_model,
)
from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.adapters.inspection.upload import Upload, check_limits, check_rank, version_of
from graftwork.adapters.registry.artifact_ledger import ArtifactKeeper
from graftwork.adapters.registry.artifact_store import ArtifactStore
from graftwork.adapters.registry.repository import AdapterReader, AdapterWriter, is_referenced, newest_versions
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.clock import Clock, SystemClock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import Conflict, NotFound, NotPermitted, Unavailable
from graftwork.platform.ids import AdapterId, new_id
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.principals import TenantScope

DEFAULT_ALIAS = "prod"
"""The alias that a `model` without an alias stands for, once this alias is set."""
_PROBE_ATTEMPTS = 3
"""How often the engine is asked to test an upload. Another tenant's delete of equal files may remove them meanwhile."""


class AdapterRegistry:
    """The adapters of all tenants. Each call except `sweep` and `all_versions` reads or changes the adapters of one
    tenant.
    """

    def __init__(
        self,
        database: Database,
        artifacts: ArtifactStore,
        inspector: AdapterInspector,
        *,
        clock: Clock | None = None,
        generator: random.Random | None = None,
        probe: Callable[[str], Awaitable[None]] | None = None,
        before_free: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """Makes the registry. The caller closes the inspector.

        `generator` draws a version if an alias has several. `probe` tests that the engine can serve stored files
        (`EngineClient.probe_adapter`). `before_free` is called with an unused digest before its files are removed
        (`EngineClient.forget_adapter`).
        """
        self._database = database
        self._inspector = inspector
        self._probe = probe
        self._clock = clock or SystemClock()
        self._generator = generator or random.Random()
        self._keeper = ArtifactKeeper(database, artifacts, self._clock, before_free)

    async def publish(
        self,
        scope: TenantScope,
        name: str,
        files: AdapterFiles,
        description: EngineDescription,
        limits: Quota,
    ) -> Adapter:
        """Validates and stores an uploaded adapter as a new version of `name`. Creates the adapter `name` if it does
        not exist.

        If the adapter already has a version with the same digest, changes nothing and returns the adapter.
        Raises ValidationFailed for a wrong tensor or field, for a rank above the tenant's limit, and if the engine
        cannot apply the adapter.
        Raises BudgetSpent if the tenant would have more adapters or bytes than its limits allow, and Unavailable if the
        engine or the storage does not answer. After an error, the upload is not stored.
        """
        check_adapter_name(name, description.model_name)
        identified = await self._inspector.identify(scope, files, description)
        check_rank(identified, limits)
        upload = Upload(name, files, identified, description.fingerprint)
        async with self._database.read() as session:
            reader = AdapterReader(session, scope)
            existing = await reader.find(name)
            if existing and _with_digest(existing, upload.digest):
                return existing
            is_known = await is_referenced(session, upload.digest)
            check_limits(await reader.usage(), upload, limits, is_new=existing is None)
        async with self._keeper.keeping(upload):
            if not is_known:
                await self._prove(upload)
            async with self._database.write() as session:
                return await self._record(session, scope, upload, limits)

    async def get(self, scope: TenantScope, name: str) -> Adapter:
        """Returns the tenant's adapter with this name. Raises NotFound if it does not exist."""
        async with self._database.read() as session:
            found = await AdapterReader(session, scope).find(name)
        if found is None:
            raise unknown_adapter(name)
        return found

    async def all_versions(self, limit: int) -> Sequence[OwnedVersion]:
        """Returns the `limit` newest adapter versions of all tenants, for the operator. Those of a tenant that was deleted
        are among them until they are erased.
        """
        async with self._database.read() as session:
            return await newest_versions(session, limit)

    async def list(self, scope: TenantScope, request: PageRequest | None = None) -> Page[Adapter]:
        """Returns one page of the tenant's adapters, sorted by the time of their creation.

        Raises NotFound if `request.after` is not the id of an adapter of this tenant.
        """
        request = request or PageRequest()
        async with self._database.read() as session:
            page = await AdapterReader(session, scope).page(request)
        if page is None:
            raise unknown_adapter(request.after or "")
        return page

    async def model_names(self, scope: TenantScope) -> tuple[str, ...]:
        """Returns the adapter names that this tenant may send as a request's `model`. The base model's name is not
        among them.

        For every adapter that has a version, the names are `name`, and `name@alias` for each alias.
        """
        async with self._database.read() as session:
            adapters = await AdapterReader(session, scope).all()
        served = [adapter for adapter in adapters if adapter.versions]
        return tuple(name for adapter in served for name in adapter.model_names)

    async def resolve(self, scope: TenantScope, model: str, base_name: str) -> ResolvedModel:
        """Returns the weights that a request's `model` selects at present.

        Raises NotFound (code model_not_found) if the tenant has no such adapter, version or alias. If an alias has
        several versions, each call draws one of them, so keep the result if the version must stay the same.
        """
        if model == base_name:
            return ResolvedModel(model, None)
        reference = parse_reference(model)
        if reference is None:
            raise unknown_model(model)
        async with self._database.read() as session:
            adapter = await AdapterReader(session, scope).find(reference.name)
        if adapter is None:
            raise unknown_model(model)
        version = self._choose(adapter, reference.version, reference.alias)
        if version is None:
            raise unknown_model(model)
        return ResolvedModel(model, version)

    async def set_alias(self, scope: TenantScope, name: str, alias: str, target: AliasTarget) -> AliasChange:
        """Sets `alias` of the adapter to `target`, and creates the alias if it is new. Later requests use the new
        target.

        Raises ValidationFailed if the alias has a wrong form, and NotFound if the adapter or a version does not exist.
        """
        check_alias(alias)
        async with self._database.write() as session:
            writer = AdapterWriter(session, scope)
            adapter = await writer.lock(name)
            if adapter is None:
                raise unknown_adapter(name)
            for version in target.versions:
                _require_version(adapter, version)
            await writer.set_alias(adapter.id, alias, target, self._clock.now())
        return AliasChange(name, alias, target, adapter.aliases.get(alias))

    async def remove_alias(self, scope: TenantScope, name: str, alias: str) -> AliasChange:
        """Removes an alias of the adapter `name`. Raises NotFound if the adapter or the alias does not exist."""
        async with self._database.write() as session:
            writer = AdapterWriter(session, scope)
            adapter = await writer.lock(name)
            if adapter is None:
                raise unknown_adapter(name)
            if alias not in adapter.aliases:
                raise NotFound("The adapter has no such alias.", param="alias", code="alias_not_found")
            await writer.delete_alias(adapter.id, alias)
        return AliasChange(name, alias, None, adapter.aliases[alias])

    async def delete(self, scope: TenantScope, name: str) -> tuple[str, ...]:
        """Deletes the adapter with its versions and aliases. Returns the digests whose files were removed.

        The files of a digest are not removed if another version (of any tenant) has the same digest. Raises NotFound if
        the adapter does not exist.
        """
        async with self._database.write() as session:
            writer = AdapterWriter(session, scope)
            adapter = await writer.lock(name)
            if adapter is None or not adapter.versions:
                raise unknown_adapter(name)
            await writer.delete_adapter(adapter.id)
        return await self._keeper.free({version.digest for version in adapter.versions})

    async def delete_version(self, scope: TenantScope, name: str, version: int) -> tuple[str, ...]:
        """Deletes one version of an adapter. Returns the version's digest if its files were removed, else an empty
        tuple.

        The files are not removed if another version (of any tenant) has the same digest. Raises Conflict if an alias
        has the version as a target, and NotFound if the adapter or the version does not exist.

        If this was the last version, the adapter no longer exists. If a new adapter gets the same name, its version
        numbers continue after the old ones.
        """
        async with self._database.write() as session:
            writer = AdapterWriter(session, scope)
            adapter = await writer.lock(name)
            if adapter is None:
                raise unknown_adapter(name)
            found = _require_version(adapter, version)
            _check_unaliased(adapter, version)
            await writer.delete_version(adapter.id, version)
        return await self._keeper.free({found.digest})

    async def delete_all(self, scope: TenantScope) -> tuple[str, ...]:
        """Deletes all adapters of a tenant. Returns the digests whose files were removed.

        The files of a digest are not removed if a version of another tenant has the same digest.
        """
        async with self._database.write() as session:
            writer = AdapterWriter(session, scope)
            await writer.lock_tenant()
            adapters = await writer.all()
            await writer.delete_all_adapters()
        return await self._keeper.free({version.digest for adapter in adapters for version in adapter.versions})

    async def erase(self, scope: TenantScope) -> bool:
        """Deletes all adapters of a deleted tenant, and files that an interrupted call has left. Returns True.

        Raises Unavailable if files cannot be removed; then call it again.
        """
        await self.delete_all(scope)
        await self.sweep()
        return True

    async def sweep(self) -> tuple[str, ...]:
        """Removes all stored files that no version of any tenant needs, such as files left by a crash. Returns their
        digests.

        Safe at any time, because an upload writes its files again if they were removed while it runs.
        """
        return await self._keeper.sweep()

    async def _record(self, session: WriteSession, scope: TenantScope, upload: Upload, limits: Quota) -> Adapter:
        """Writes the rows of one upload. Checks names and limits again, under locks."""
        writer = AdapterWriter(session, scope)
        if not await writer.lock_tenant():
            raise NotPermitted("This tenant was deleted: it takes no more adapters.", code="tenant_deleted")
        existing = await writer.lock(upload.name)
        if existing and _with_digest(existing, upload.digest):
            return existing
        check_limits(await writer.usage(), upload, limits, is_new=existing is None or not existing.versions)
        await self._keeper.claim(session, upload)
        now = self._clock.now()
        adapter = existing or Adapter(AdapterId(new_id("adp")), upload.name, now)
        if existing is None:
            await writer.add_adapter(adapter)
        number = await writer.take_version_number(adapter.id)
        version = version_of(upload, adapter, number, now)
        await writer.add_version(version, upload.base_fingerprint)
        return replace(adapter, versions=(*adapter.versions, version))

    async def _prove(self, upload: Upload) -> None:
        """Asks the engine to test the stored files, before a version refers to them."""
        if self._probe is None:
            return
        for _ in range(_PROBE_ATTEMPTS):
            try:
                await self._probe(upload.digest)
            except NotFound:
                await self._keeper.store(upload)
            else:
                return
        message = "The engine cannot read what was stored: the operator must give both the same data folder."
        raise Unavailable(message, code="artifact_store_unavailable")

    def _choose(self, adapter: Adapter, version: int | None, alias: str | None) -> AdapterVersion | None:
        """Returns the version that a reference stands for: `@3` names a version, and `@alias` an alias.

        Without both, uses the default alias. Without that alias, uses the newest version. Returns None for an unknown
        reference.
        """
        if version is not None:
            return adapter.version(version)
        target = adapter.aliases.get(alias or DEFAULT_ALIAS)
        if target is not None:
            return adapter.version(target.choose(self._generator))
        return adapter.newest if alias is None else None


def _with_digest(adapter: Adapter, digest: str) -> AdapterVersion | None:
    return next((version for version in adapter.versions if version.digest == digest), None)


def _require_version(adapter: Adapter, version: int) -> AdapterVersion:
    found = adapter.version(version)
    if found is None:
        message = f"The adapter has no version {version}."
        raise NotFound(message, param="version", code="version_not_found")
    return found


def _check_unaliased(adapter: Adapter, version: int) -> None:
    holding = [alias for alias, target in adapter.aliases.items() if version in target.versions]
    if holding:
        message = f"Version {version} is what '{adapter.name}@{holding[0]}' leads to: move or remove the alias first."
        raise Conflict(message, code="version_in_use", details={"aliases": holding})
