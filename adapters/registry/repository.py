"""Contains the SQL statements of the adapter registry. Never opens or commits a transaction: the caller does.

Invariant: every statement reads or changes rows of one tenant only, except `expired_adapters`, which is for the sweep,
and `newest_versions`, which is for the operator.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Select, delete, exists, func, select, update

from graftwork.adapters.format.defaults import AdapterDefaults
from graftwork.adapters.format.specs import (
    Adapter,
    AdapterVersion,
    AliasTarget,
    OwnedVersion,
    Provenance,
    is_adapter_name,
)
from graftwork.adapters.inspection.upload import AdapterUsage
from graftwork.adapters.registry.tables import (
    AdapterAliasRow,
    AdapterRow,
    AdapterTagRow,
    AdapterVersionRow,
)
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import AdapterId, EndUserId, KeyId, TenantId, new_id
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.repository import add_audit_entry
from graftwork.platform.tenancy.tables import TenantRow
from graftwork.platform.tenancy.tenants import AuditEntry, TenantStatus

_ID = re.compile(r"[a-z0-9_]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdapterFilter:
    """Which adapters of a tenant a list has. An empty field lets all pass."""

    tags: tuple[str, ...] = ()
    """The adapter has all these tags."""
    name: str | None = None
    """The adapter's name has this text."""
    base: str | None = None
    """A version was made for the base model with this fingerprint."""
    is_deleted: bool = False
    """Whether the list has the adapters that were deleted and can be restored, instead of the others."""

    def narrow(self, statement: Select[AdapterRow]) -> Select[AdapterRow]:
        for tag in self.tags:
            statement = statement.where(
                exists().where(AdapterTagRow.adapter_id == AdapterRow.id, AdapterTagRow.tag == tag)
            )
        if self.name:
            statement = statement.where(AdapterRow.name.contains(self.name, autoescape=True))
        if self.base:
            made_for = AdapterVersionRow.base_fingerprint == self.base
            statement = statement.where(exists().where(AdapterVersionRow.adapter_id == AdapterRow.id, made_for))
        return statement.where(AdapterRow.deleted_at.is_not(None)) if self.is_deleted else statement


ALL_ADAPTERS = AdapterFilter()


class AdapterReader:
    """Reads the adapters of one tenant, inside the transaction of the caller's database session."""

    def __init__(self, session: ReadSession, scope: TenantScope) -> None:
        self._session = session
        self._scope = scope

    async def find(self, name: str) -> Adapter | None:
        return await self._find(name, self._with_versions())

    async def find_any(self, name: str) -> Adapter | None:
        """Returns the adapter with this name, also if it or all its versions were deleted."""
        return await self._find(name, self._own_adapters())

    async def all(self) -> tuple[Adapter, ...]:
        """Returns all adapters of the tenant, sorted by name."""
        return await self._load(self._with_versions().order_by(AdapterRow.name))

    async def page(self, request: PageRequest, wanted: "AdapterFilter") -> Page[Adapter] | None:
        """Returns one page of the tenant's adapters that fit a filter, sorted by the time of their creation.

        Returns None if `request.after` is not the id of an adapter of this tenant.
        """
        statement = wanted.narrow(self._own_adapters() if wanted.is_deleted else self._with_versions())
        if request.after is not None:
            if not await self._exists(request.after):
                return None
            newer = AdapterRow.id > request.after
            statement = statement.where(newer if request.order is Order.ASCENDING else AdapterRow.id < request.after)
        by = AdapterRow.id.asc() if request.order is Order.ASCENDING else AdapterRow.id.desc()
        return cut(await self._load(statement.order_by(by).limit(request.limit + 1)), request)

    async def usage(self) -> AdapterUsage:
        """Returns what counts in the tenant's limits. What was deleted counts until it can no longer be restored."""
        kept = exists().where(AdapterVersionRow.tenant_id == self._scope, AdapterVersionRow.adapter_id == AdapterRow.id)
        adapters = select(func.count()).select_from(self._own_adapters().where(kept).subquery())
        stored = select(func.coalesce(func.sum(AdapterVersionRow.size_bytes), 0)).where(
            AdapterVersionRow.tenant_id == self._scope
        )
        return AdapterUsage(await self._scalar(adapters), await self._scalar(stored))

    def _own_adapters(self) -> Select[AdapterRow]:
        """Selects also the adapters without versions. Their rows remember which version numbers were used."""
        return select(AdapterRow).where(AdapterRow.tenant_id == self._scope)

    def _with_versions(self) -> Select[AdapterRow]:
        """Selects the adapters that exist for the tenant: with its last version, an adapter is gone.

        Adapters and versions that can still be restored are gone too.
        """
        versions = exists().where(
            AdapterVersionRow.tenant_id == self._scope,
            AdapterVersionRow.adapter_id == AdapterRow.id,
            AdapterVersionRow.deleted_at.is_(None),
        )
        return self._own_adapters().where(AdapterRow.deleted_at.is_(None), versions)

    async def _find(self, name: str, statement: Select[AdapterRow]) -> Adapter | None:
        if not is_adapter_name(name):  # keeps text that a database cannot store out of the statement
            return None
        found = await self._load(statement.where(AdapterRow.name == name))
        return found[0] if found else None

    async def _exists(self, adapter_id: str) -> bool:
        if not _ID.fullmatch(adapter_id):
            return False
        return (
            await self._session.scalars(self._own_adapters().where(AdapterRow.id == adapter_id))
        ).first() is not None

    async def _scalar(self, statement: Select[int]) -> int:
        return int((await self._session.execute(statement)).scalar_one())  # PostgreSQL sums to a Decimal

    async def _load(self, statement: Select[AdapterRow]) -> tuple[Adapter, ...]:
        """Returns the adapters that `statement` selects, with versions, aliases and tags. Runs four statements."""
        rows = (await self._session.scalars(statement)).all()
        ids = [row.id for row in rows]
        versions = await self._session.scalars(
            select(AdapterVersionRow)
            .where(AdapterVersionRow.tenant_id == self._scope, AdapterVersionRow.adapter_id.in_(ids))
            .order_by(AdapterVersionRow.version)
        )
        aliases = await self._session.scalars(
            select(AdapterAliasRow)
            .where(AdapterAliasRow.tenant_id == self._scope, AdapterAliasRow.adapter_id.in_(ids))
            .order_by(AdapterAliasRow.alias)
        )
        tags = await self._session.scalars(
            select(AdapterTagRow)
            .where(AdapterTagRow.tenant_id == self._scope, AdapterTagRow.adapter_id.in_(ids))
            .order_by(AdapterTagRow.tag)
        )
        return _assemble(rows, versions.all(), aliases.all(), tags.all())


class AdapterWriter(AdapterReader):
    """Reads and changes the adapters of one tenant, inside the transaction of the caller's database session."""

    def __init__(self, session: WriteSession, scope: TenantScope) -> None:
        super().__init__(session, scope)
        self._writer = session

    async def lock_tenant(self) -> bool:
        """Locks the tenant's row until the end of the transaction. Returns False if the tenant was deleted.

        So the uploads of one tenant are recorded one after another, and none can exceed the tenant's limits.
        """
        statement = select(TenantRow.status).where(TenantRow.id == self._scope)
        status = await self._session.scalar(statement.with_for_update(key_share=True))
        return status != TenantStatus.DELETED

    async def lock(self, name: str) -> Adapter | None:
        """Locks the adapter's row until the end of the transaction. Returns the adapter with its versions and aliases.

        Also returns an adapter whose versions were all deleted. Returns None if the adapter does not exist.
        """
        return await self._find(name, self._own_adapters().with_for_update())

    async def reload(self, name: str) -> Adapter:
        """Returns an adapter that this transaction has changed."""
        await self._writer.flush()
        self._writer.expire_all()
        adapter = await self._find(name, self._own_adapters())
        assert adapter is not None
        return adapter

    async def digests(self) -> set[str]:
        """Returns the digests of all versions of the tenant, also of those that were deleted."""
        statement = select(AdapterVersionRow.digest).where(AdapterVersionRow.tenant_id == self._scope)
        return set((await self._session.scalars(statement)).all())

    async def audit(self, at: float, actor: str, action: str, target: str, details: dict[str, Any]) -> None:
        """Adds an entry to the audit log. `actor` is the id of an API key, or the operator's name."""
        entry = AuditEntry(new_id("aud"), at, actor, action, TenantId(self._scope), target, details)
        await add_audit_entry(self._writer, entry)

    async def add_adapter(self, adapter: Adapter) -> None:
        self._session.add(
            AdapterRow(
                id=adapter.id,
                tenant_id=self._scope,
                name=adapter.name,
                next_version=1,
                created_at=adapter.created_at,
            )
        )
        await self._session.flush()

    async def set_beginner(self, adapter_id: AdapterId, key_id: KeyId | None, end_user_id: EndUserId | None) -> None:
        """Sets in whose limits the adapter counts, besides the tenant's: those of whoever has pushed its first version."""
        await self._session.execute(
            update(AdapterRow)
            .where(AdapterRow.tenant_id == self._scope, AdapterRow.id == adapter_id)
            .values(key_id=key_id, end_user_id=end_user_id)
        )

    async def set_tags(self, adapter_id: AdapterId, tags: Sequence[str]) -> None:
        """Replaces the adapter's tags."""
        await self._session.execute(
            delete(AdapterTagRow).where(AdapterTagRow.tenant_id == self._scope, AdapterTagRow.adapter_id == adapter_id)
        )
        self._writer.add_all([AdapterTagRow(adapter_id=adapter_id, tag=tag, tenant_id=self._scope) for tag in tags])
        await self._writer.flush()

    async def set_defaults(self, adapter_id: AdapterId, defaults: AdapterDefaults) -> None:
        await self._session.execute(
            update(AdapterRow)
            .where(AdapterRow.tenant_id == self._scope, AdapterRow.id == adapter_id)
            .values(defaults=defaults.to_json() or None)
        )

    async def take_version_number(self, adapter_id: AdapterId) -> int:
        """Reserves and returns the number for the adapter's next version. No later call returns the same number."""
        row = (await self._session.scalars(self._own_adapters().where(AdapterRow.id == adapter_id))).one()
        number = row.next_version
        row.next_version = number + 1
        return number

    async def add_version(self, version: AdapterVersion, base_fingerprint: str) -> None:
        self._session.add(
            AdapterVersionRow(
                adapter_id=version.adapter_id,
                version=version.version,
                tenant_id=self._scope,
                digest=version.digest,
                base_fingerprint=base_fingerprint,
                rank=version.rank,
                target_modules=list(version.target_modules),
                size_bytes=version.size_bytes,
                created_at=version.created_at,
                is_held=version.is_held,
                provenance=asdict(version.provenance),
            )
        )
        await self._session.flush()

    async def mark_adapter(self, adapter_id: AdapterId, deleted_at: float | None) -> None:
        """Sets when an adapter was deleted; None restores it."""
        await self._session.execute(
            update(AdapterRow)
            .where(AdapterRow.tenant_id == self._scope, AdapterRow.id == adapter_id)
            .values(deleted_at=deleted_at)
        )

    async def mark_version(self, adapter_id: AdapterId, version: int, deleted_at: float | None) -> None:
        """Sets when a version was deleted; None restores it."""
        await self._session.execute(
            update(AdapterVersionRow)
            .where(
                AdapterVersionRow.tenant_id == self._scope,
                AdapterVersionRow.adapter_id == adapter_id,
                AdapterVersionRow.version == version,
            )
            .values(deleted_at=deleted_at)
        )

    async def delete_adapter(self, adapter_id: AdapterId) -> None:
        """Deletes an adapter's row. The database then deletes the rows of the adapter's versions and aliases."""
        await self._session.execute(
            delete(AdapterRow).where(AdapterRow.tenant_id == self._scope, AdapterRow.id == adapter_id)
        )

    async def delete_all_adapters(self) -> None:
        """Deletes all adapters of the tenant, including those whose versions were all deleted."""
        await self._session.execute(delete(AdapterRow).where(AdapterRow.tenant_id == self._scope))

    async def delete_version(self, adapter_id: AdapterId, version: int) -> None:
        await self._session.execute(
            delete(AdapterVersionRow).where(
                AdapterVersionRow.tenant_id == self._scope,
                AdapterVersionRow.adapter_id == adapter_id,
                AdapterVersionRow.version == version,
            )
        )


async def expired_adapters(session: ReadSession, deleted_before: float) -> list[tuple[TenantId, str, int | None]]:
    """Returns what was deleted before a time: the tenant, the adapter's name, and the version; None for all versions."""
    adapters = select(AdapterRow.tenant_id, AdapterRow.name).where(AdapterRow.deleted_at < deleted_before)
    versions = (
        select(AdapterVersionRow.tenant_id, AdapterRow.name, AdapterVersionRow.version)
        .join(AdapterRow, AdapterRow.id == AdapterVersionRow.adapter_id)
        .where(AdapterVersionRow.deleted_at < deleted_before)
    )
    found: list[tuple[TenantId, str, int | None]] = [
        (TenantId(row[0]), row[1], None) for row in (await session.execute(adapters)).all()
    ]
    found += [(TenantId(row[0]), row[1], row[2]) for row in (await session.execute(versions)).all()]
    return found


async def newest_versions(session: ReadSession, limit: int) -> list[OwnedVersion]:
    """Returns at most `limit` adapter versions of all tenants, the newest first."""
    statement = (
        select(
            AdapterVersionRow.tenant_id,
            AdapterRow.name,
            AdapterVersionRow.version,
            AdapterVersionRow.digest,
            AdapterVersionRow.size_bytes,
        )
        .join(AdapterRow, AdapterRow.id == AdapterVersionRow.adapter_id)
        .where(AdapterRow.deleted_at.is_(None), AdapterVersionRow.deleted_at.is_(None))
        .order_by(AdapterVersionRow.created_at.desc())
        .limit(limit)
    )
    return [OwnedVersion(TenantId(row[0]), *row[1:]) for row in (await session.execute(statement)).all()]


def _assemble(
    rows: Sequence[AdapterRow],
    versions: Iterable[AdapterVersionRow],
    aliases: Iterable[AdapterAliasRow],
    tags: Iterable[AdapterTagRow],
) -> tuple[Adapter, ...]:
    names = {row.id: row.name for row in rows}
    versions_by_id: dict[str, list[AdapterVersion]] = {row.id: [] for row in rows}
    deleted_by_id: dict[str, list[AdapterVersion]] = {row.id: [] for row in rows}
    aliases_by_id: dict[str, dict[str, AliasTarget]] = {row.id: {} for row in rows}
    for version in versions:
        by_id = versions_by_id if version.deleted_at is None else deleted_by_id
        by_id[version.adapter_id].append(_version(version, names[version.adapter_id]))
    for alias in aliases:
        aliases_by_id[alias.adapter_id][alias.alias] = target_of(alias.weights)
    tags_by_id: dict[str, list[str]] = {row.id: [] for row in rows}
    for tag in tags:
        tags_by_id[tag.adapter_id].append(tag.tag)
    return tuple(
        Adapter(
            AdapterId(row.id),
            row.name,
            row.created_at,
            tuple(versions_by_id[row.id]),
            aliases_by_id[row.id],
            deleted_versions=tuple(deleted_by_id[row.id]),
            deleted_at=row.deleted_at,
            next_version=row.next_version,
            tags=tuple(tags_by_id[row.id]),
            defaults=AdapterDefaults.from_json(row.defaults),
        )
        for row in rows
    )


def target_of(weights: Iterable[Sequence[float]]) -> AliasTarget:
    """Reads an alias's target as the tables have it."""
    return AliasTarget(tuple((int(version), share) for version, share in weights))


def _version(row: AdapterVersionRow, name: str) -> AdapterVersion:
    return AdapterVersion(
        adapter_id=AdapterId(row.adapter_id),
        name=name,
        version=row.version,
        digest=row.digest,
        rank=row.rank,
        target_modules=tuple(row.target_modules),
        size_bytes=row.size_bytes,
        created_at=row.created_at,
        status="ready" if row.deleted_at is None else "deleted",
        is_held=row.is_held,
        deleted_at=row.deleted_at,
        base=row.base_fingerprint,
        provenance=Provenance(**(row.provenance or {})),
    )
