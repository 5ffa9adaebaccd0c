"""Keeps the adapters of every tenant, and finds the weights that the `model` of a request selects.

Owns the names and versions of adapters. AliasKeeper owns their aliases, AdapterDeletions what is deleted, and
ArtifactKeeper their files. Never applies an adapter: the engine
does.
Invariants: a tenant sees only its own adapters; for another tenant's adapter it gets the same error as for an unknown
name. A version never changes, and the number of a deleted version is never used again.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from graftwork.adapters.format.specs import (
    Adapter,
    AdapterVersion,
    Caller,
    ModelReference,
    OwnedVersion,
    ResolvedModel,
    check_adapter_name,
    parse_reference,
    unknown_adapter,
    unknown_model,
)
from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.adapters.inspection.upload import (
    PLAIN_PUSH,
    AdapterUsage,
    Push,
    Upload,
    check_limits,
    check_not_deleted,
    check_rank,
    upload_details,
    version_of,
)
from graftwork.adapters.registry.aliases import AliasKeeper
from graftwork.adapters.registry.artifact_ledger import ArtifactKeeper
from graftwork.adapters.registry.artifact_rows import is_referenced
from graftwork.adapters.registry.artifact_store import ArtifactStore
from graftwork.adapters.registry.deletions import AdapterDeletions
from graftwork.adapters.registry.details import AdapterDetails
from graftwork.adapters.registry.organisation_rows import hold_organisation, usage_of
from graftwork.adapters.registry.repository import (
    ALL_ADAPTERS,
    AdapterFilter,
    AdapterReader,
    AdapterWriter,
    newest_versions,
)
from graftwork.adapters.registry.rollouts import RolloutKeeper
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.clock import Clock, SystemClock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import Conflict, NotFound, NotPermitted, Unavailable, ValidationFailed
from graftwork.platform.ids import AdapterId, TenantId, new_id
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.quotas.limits import Level
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.limit_book import LimitOwner
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.quota_rows import find_limits_of_begun

DEFAULT_ALIAS = "prod"
"""The alias that a `model` without an alias stands for, once this alias is set."""
_PROBE_ATTEMPTS = 3
"""How often the engine is asked to test an upload. Another tenant's delete of equal files may remove them meanwhile."""


@dataclass(frozen=True, slots=True)
class Published:
    """An adapter, and the version of it that has the files of a push."""

    adapter: Adapter
    version: AdapterVersion


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
        probe: Callable[[str], Awaitable[None]] | None = None,
        before_free: Callable[[str], Awaitable[None]] | None = None,
        grace_s: float = 0.0,
    ) -> None:
        """Makes the registry. The caller closes the inspector.

        `probe` tests that the engine can serve stored files (`EngineClient.probe_adapter`). `before_free` is called with an unused digest before its files are removed
        (`EngineClient.forget_adapter`). `grace_s` is how many seconds what was deleted can be restored.
        """
        self._database = database
        self._inspector = inspector
        self._probe = probe
        self._clock = clock or SystemClock()
        self._keeper = ArtifactKeeper(database, artifacts, self._clock, before_free)
        self.aliases = AliasKeeper(database, self._clock)
        self.rollouts = RolloutKeeper(database, self._clock)
        self.details = AdapterDetails(database, self._clock)
        self.deletions = AdapterDeletions(database, self._keeper, self._clock, grace_s)

    async def publish(
        self,
        scope: TenantScope,
        name: str,
        files: AdapterFiles,
        description: EngineDescription,
        limits: Quota,
        push: Push = PLAIN_PUSH,
    ) -> Published:
        """Validates and stores an uploaded adapter as a new version of `name`. Creates the adapter `name` if it does
        not exist.

        If the adapter already has a version with the same digest, changes nothing and returns that version. If it was
        deleted, restores it. `push.expects` says which number the next version had when the upload began, if that was
        earlier than now.
        Raises ValidationFailed for a wrong tensor or field, for a rank above the tenant's limit, and if the engine
        cannot apply the adapter.
        Raises Conflict if the adapter was deleted and can be restored, or if another upload has made a version of it
        meanwhile: of two uploads of one name at one time, one wins.
        Raises BudgetSpent if the tenant would have more adapters or bytes than its limits allow, and Unavailable if the
        engine or the storage does not answer. After an error, the upload is not stored.
        """
        check_adapter_name(name, description.model_name)
        if not push.expects:
            push = replace(push, expects=await self.next_version(scope, name))
        async with self._inspector.peft_files(scope, files, description) as found:
            return await self._publish(scope, name, found, description, limits, push)

    async def _publish(
        self,
        scope: TenantScope,
        name: str,
        files: AdapterFiles,
        description: EngineDescription,
        limits: Quota,
        push: Push,
    ) -> Published:
        identified = await self._inspector.identify(scope, files, description)
        check_rank(identified, limits)
        upload = Upload(name, files, identified, description.fingerprint)
        async with self._database.read() as session:
            reader = AdapterReader(session, scope)
            existing = await reader.find_any(name)
            check_not_deleted(existing)
            if existing and (version := _with_digest(existing, upload.digest)):
                return Published(existing, version)
            await _check_parent(reader, push.provenance.parent)
            is_known = await is_referenced(session, upload.digest)
            check_limits(await reader.usage(), upload, limits, is_new=_is_new(existing))
        async with self._keeper.keeping(upload):
            if not is_known:
                await self._prove(upload)
            async with self._database.write() as session:
                adapter = await self._record(session, scope, upload, limits, push)
        version = _with_digest(adapter, upload.digest)
        assert version is not None
        return Published(adapter, version)

    async def get(self, scope: TenantScope, name: str, *, deleted_too: bool = False) -> Adapter:
        """Returns the tenant's adapter with this name. Raises NotFound if it does not exist.

        With `deleted_too`, also returns one that was deleted and can be restored.
        """
        async with self._database.read() as session:
            reader = AdapterReader(session, scope)
            found = await (reader.find_any(name) if deleted_too else reader.find(name))
        if found is None:
            raise unknown_adapter(name)
        return found

    async def usage_of(self, owner: LimitOwner) -> AdapterUsage:
        """Returns what counts in the limits of an owner: a tenant's adapters, an organisation's, or those that a key or
        an end user has pushed first.
        """
        async with self._database.read() as session:
            return await usage_of(session, owner)

    async def all_versions(self, limit: int) -> Sequence[OwnedVersion]:
        """Returns the `limit` newest adapter versions of all tenants, for the operator. Those of a tenant that was deleted
        are among them until they are erased.
        """
        async with self._database.read() as session:
            return await newest_versions(session, limit)

    async def list(
        self, scope: TenantScope, request: PageRequest | None = None, wanted: AdapterFilter = ALL_ADAPTERS
    ) -> Page[Adapter]:
        """Returns one page of the tenant's adapters that fit a filter, sorted by the time of their creation.

        Raises NotFound if `request.after` is not the id of an adapter of this tenant.
        """
        request = request or PageRequest()
        async with self._database.read() as session:
            page = await AdapterReader(session, scope).page(request, wanted)
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

    async def resolve(
        self, scope: TenantScope, model: str, base_name: str, caller: Caller, *, pinned: ResolvedModel | None = None
    ) -> ResolvedModel:
        """Returns the weights that a request's `model` selects at present.

        If an alias has several versions, a caller always gets the same one of them. `pinned` is what the caller used
        last: if it has the same `model`, and the alias still leads to its version, that version stays.
        Raises NotFound (code model_not_found) if the tenant has no such adapter, version or alias.
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
        version = _choose(adapter, reference, caller, pinned.version if pinned and pinned.requested == model else None)
        if version is None:
            raise unknown_model(model)
        return ResolvedModel(model, version, defaults=adapter.defaults)

    async def erase(self, scope: TenantScope) -> bool:
        """Deletes all adapters of a deleted tenant, and files that an interrupted call has left. Returns True.

        Raises Unavailable if files cannot be removed; then call it again.
        """
        await self.deletions.delete_all(scope)
        await self.sweep()
        return True

    async def sweep(self) -> tuple[str, ...]:
        """Removes all stored files that no version of any tenant needs, such as files left by a crash. Returns their
        digests.

        Safe at any time, because an upload writes its files again if they were removed while it runs.
        """
        return await self._keeper.sweep()

    async def next_version(self, scope: TenantScope, name: str) -> int:
        """Returns the number that the next version of `name` will have. Raises Conflict if the adapter was deleted and
        can be restored.
        """
        async with self._database.read() as session:
            existing = await AdapterReader(session, scope).find_any(name)
        check_not_deleted(existing)
        return 1 if existing is None else existing.next_version

    async def _record(
        self, session: WriteSession, scope: TenantScope, upload: Upload, limits: Quota, push: Push
    ) -> Adapter:
        """Writes the rows of one upload. Checks names and limits again, under locks."""
        writer, now = AdapterWriter(session, scope), self._clock.now()
        if not await writer.lock_tenant():
            raise NotPermitted("This tenant was deleted: it takes no more adapters.", code="tenant_deleted")
        existing = await writer.lock(upload.name)
        check_not_deleted(existing)
        if existing and _with_digest(existing, upload.digest):
            return existing
        deleted = existing and _with_digest(existing, upload.digest, deleted=True)
        if existing and deleted:
            await writer.mark_version(existing.id, deleted.version, None)
            await writer.audit(now, push.actor, "adapter.version.restored", deleted.label, {"digest": deleted.digest})
            return await writer.reload(upload.name)
        if (1 if existing is None else existing.next_version) != push.expects:
            message = f"Another upload has made a version of '{upload.name}' meanwhile: look at it, then push again."
            raise Conflict(message, param="name", code="concurrent_upload")
        check_limits(await writer.usage(), upload, limits, is_new=_is_new(existing))
        for owner in await find_limits_of_begun(session, TenantId(scope), push.limited_key, push.end_user_id):
            begun = await usage_of(session, LimitOwner(owner.level, owner.owner_id, TenantId(scope)))
            check_limits(begun, upload, owner.quota, is_new=_is_new(existing), level=owner.level)
        if (held := await hold_organisation(session, scope)) is not None:
            check_rank(upload.identified, held.quota, Level.ORGANISATION)
            check_limits(held.usage, upload, held.quota, is_new=_is_new(existing), level=Level.ORGANISATION)
        await self._keeper.claim(session, upload)
        adapter = existing or Adapter(AdapterId(new_id("adp")), upload.name, now)
        if existing is None:
            await writer.add_adapter(adapter)
        if _is_new(existing):
            await writer.set_beginner(adapter.id, push.limited_key, push.end_user_id)
        number = await writer.take_version_number(adapter.id)
        version = replace(version_of(upload, adapter, number, now), is_held=push.is_held, provenance=push.origin)
        await writer.add_version(version, upload.base_fingerprint)
        await writer.audit(now, push.actor, "adapter.uploaded", version.label, upload_details(version))
        return replace(adapter, versions=(*adapter.versions, version), next_version=number + 1)

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


def _choose(
    adapter: Adapter, reference: ModelReference, caller: Caller, pinned: AdapterVersion | None
) -> AdapterVersion | None:
    """Returns the version that a reference stands for: `@3` names a version, and `@alias` an alias.

    Without both, uses the default alias. Without that alias, uses the newest version that is not held. Returns None for an unknown
    reference.
    """
    if reference.version is not None:
        return adapter.version(reference.version)
    alias = reference.alias or DEFAULT_ALIAS
    target = adapter.aliases.get(alias)
    if target is None:
        return adapter.served if reference.alias is None else None
    if pinned is not None and pinned.adapter_id == adapter.id and pinned.version in target.versions:
        return adapter.version(pinned.version)
    return adapter.version(target.choose(f"{adapter.id}@{alias}", caller))


def _with_digest(adapter: Adapter, digest: str, *, deleted: bool = False) -> AdapterVersion | None:
    versions = adapter.deleted_versions if deleted else adapter.versions
    return next((version for version in versions if version.digest == digest), None)


async def _check_parent(reader: AdapterReader, parent: str | None) -> None:
    """Raises ValidationFailed if the version from which an upload was trained is not one of the tenant's."""
    if parent is None:
        return
    reference = parse_reference(parent)
    adapter = None if reference is None else await reader.find_any(reference.name)
    versions = () if adapter is None else (*adapter.versions, *adapter.deleted_versions)
    if reference is None or all(version.version != reference.version for version in versions):
        raise ValidationFailed("parent must be a version of yours, such as support@3.", param="parent")


def _is_new(existing: Adapter | None) -> bool:
    """Returns whether a version makes an adapter that does not count in the tenant's limits yet."""
    return existing is None or not (existing.versions or existing.deleted_versions)
