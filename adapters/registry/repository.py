"""Contains the SQL statements of the adapter registry. Never opens or commits a transaction: the caller does.

Invariant: every statement reads or changes rows of one tenant only, except the statements about stored files, and
`newest_versions`, which is for the operator. A file is known by its digest, and versions of several tenants can share one file. So these statements ask whether a version of
any tenant still uses the file with a given digest.
"""

import re
from collections.abc import Iterable, Sequence

from sqlalchemy import Select, delete, exists, func, select
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from graftwork.adapters.format.specs import Adapter, AdapterVersion, AliasTarget, OwnedVersion, is_adapter_name
from graftwork.adapters.inspection.upload import AdapterUsage
from graftwork.adapters.registry.tables import AdapterAliasRow, AdapterRow, AdapterVersionRow, ArtifactRow
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import AdapterId, TenantId
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.tables import TenantRow
from graftwork.platform.tenancy.tenants import TenantStatus

_ID = re.compile(r"[a-z0-9_]{1,64}", re.ASCII)


class AdapterReader:
    """Reads the adapters of one tenant, inside the transaction of the caller's database session."""

    def __init__(self, session: ReadSession, scope: TenantScope) -> None:
        self._session = session
        self._scope = scope

    async def find(self, name: str) -> Adapter | None:
        return await self._find(name, self._with_versions())

    async def all(self) -> tuple[Adapter, ...]:
        """Returns all adapters of the tenant, sorted by name."""
        return await self._load(self._with_versions().order_by(AdapterRow.name))

    async def page(self, request: PageRequest) -> Page[Adapter] | None:
        """Returns one page of the tenant's adapters, sorted by the time of their creation.

        Returns None if `request.after` is not the id of an adapter of this tenant.
        """
        statement = self._with_versions()
        if request.after is not None:
            if not await self._exists(request.after):
                return None
            newer = AdapterRow.id > request.after
            statement = statement.where(newer if request.order is Order.ASCENDING else AdapterRow.id < request.after)
        by = AdapterRow.id.asc() if request.order is Order.ASCENDING else AdapterRow.id.desc()
        return cut(await self._load(statement.order_by(by).limit(request.limit + 1)), request)

    async def usage(self) -> AdapterUsage:
        adapters = select(func.count()).select_from(self._with_versions().subquery())
        stored = select(func.coalesce(func.sum(AdapterVersionRow.size_bytes), 0)).where(
            AdapterVersionRow.tenant_id == self._scope
        )
        return AdapterUsage(await self._scalar(adapters), await self._scalar(stored))

    def _own_adapters(self) -> Select[AdapterRow]:
        """Selects also the adapters without versions. Their rows remember which version numbers were used."""
        return select(AdapterRow).where(AdapterRow.tenant_id == self._scope)

    def _with_versions(self) -> Select[AdapterRow]:
        """Selects the adapters that exist for the tenant: with its last version, an adapter is gone."""
        versions = exists().where(
            AdapterVersionRow.tenant_id == self._scope, AdapterVersionRow.adapter_id == AdapterRow.id
        )
        return self._own_adapters().where(versions)

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
        """Returns the adapters that `statement` selects, with versions and aliases. Runs three statements."""
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
        return _assemble(rows, versions.all(), aliases.all())


class AdapterWriter(AdapterReader):
    """Reads and changes the adapters of one tenant, inside the transaction of the caller's database session."""

    def __init__(self, session: WriteSession, scope: TenantScope) -> None:
        super().__init__(session, scope)

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
            )
        )
        await self._session.flush()

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

    async def set_alias(self, adapter_id: AdapterId, alias: str, target: AliasTarget, at: float) -> None:
        await self.delete_alias(adapter_id, alias)
        weights = [[float(version), share] for version, share in target.weights]
        self._session.add(
            AdapterAliasRow(adapter_id=adapter_id, alias=alias, tenant_id=self._scope, weights=weights, updated_at=at)
        )
        await self._session.flush()

    async def delete_alias(self, adapter_id: AdapterId, alias: str) -> None:
        await self._session.execute(
            delete(AdapterAliasRow).where(
                AdapterAliasRow.tenant_id == self._scope,
                AdapterAliasRow.adapter_id == adapter_id,
                AdapterAliasRow.alias == alias,
            )
        )


class ArtifactLedger:
    """The table that lists the digest of every adapter whose files are stored.

    The row of a digest is written before the files, and deleted after them.
    """

    def __init__(self, session: WriteSession) -> None:
        self._session = session

    async def claim(self, digest: str, at: float) -> None:
        """Inserts the row of a digest if it is missing, and locks the row until the end of the transaction.

        `at` is the present time in Unix seconds.
        """
        is_postgresql = self._session.get_bind().dialect.name == "postgresql"
        insert = postgresql_insert if is_postgresql else sqlite_insert
        statement = insert(ArtifactRow).values(digest=digest, claimed_at=at)
        await self._session.execute(
            statement.on_conflict_do_update(index_elements=[ArtifactRow.digest], set_={"claimed_at": at})
        )

    async def lock_unreferenced(self, digest: str) -> bool:
        """Locks the row of a digest until the end of the transaction.

        Returns True if the row exists and no version of any tenant has the digest, so that the files may be removed.
        """
        statement = select(ArtifactRow.digest).where(ArtifactRow.digest == digest).with_for_update()
        if (await self._session.execute(statement)).first() is None:
            return False
        return not await is_referenced(self._session, digest)

    async def forget(self, digest: str) -> None:
        await self._session.execute(delete(ArtifactRow).where(ArtifactRow.digest == digest))


async def is_referenced(session: ReadSession, digest: str) -> bool:
    """Returns whether at least one adapter version, of any tenant, has this digest."""
    statement = select(exists().where(AdapterVersionRow.digest == digest))
    return bool((await session.execute(statement)).scalar_one())


async def unreferenced_digests(session: ReadSession) -> tuple[str, ...]:
    """Returns the digests whose files are stored although no version of any tenant has the digest."""
    statement = select(ArtifactRow.digest).where(~exists().where(AdapterVersionRow.digest == ArtifactRow.digest))
    return tuple((await session.scalars(statement)).all())


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
        .order_by(AdapterVersionRow.created_at.desc())
        .limit(limit)
    )
    return [OwnedVersion(TenantId(row[0]), *row[1:]) for row in (await session.execute(statement)).all()]


def _assemble(
    rows: Sequence[AdapterRow], versions: Iterable[AdapterVersionRow], aliases: Iterable[AdapterAliasRow]
) -> tuple[Adapter, ...]:
    names = {row.id: row.name for row in rows}
    versions_by_id: dict[str, list[AdapterVersion]] = {row.id: [] for row in rows}
    aliases_by_id: dict[str, dict[str, AliasTarget]] = {row.id: {} for row in rows}
    for version in versions:
        versions_by_id[version.adapter_id].append(_version(version, names[version.adapter_id]))
    for alias in aliases:
        weights = tuple((int(version), share) for version, share in alias.weights)
        aliases_by_id[alias.adapter_id][alias.alias] = AliasTarget(weights)
    return tuple(
        Adapter(AdapterId(row.id), row.name, row.created_at, tuple(versions_by_id[row.id]), aliases_by_id[row.id])
        for row in rows
    )


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
    )
