"""Contains the SQL statements over the limits of tenants and of other owners: organisations, keys and end users.

Never commits: the caller that opened the session does. What requests read is in `request_rows.py`.
"""

from sqlalchemy import ColumnElement, bindparam, delete, select
from sqlalchemy.orm import InstrumentedAttribute

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import EndUserId, KeyId, OrganisationId, TenantId
from graftwork.platform.quotas.limits import Level, OwnerLimits
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.tables import OwnerQuotaRow, QuotaRow, TenantRow

_HELD_BY_ORGANISATION = (
    select(OwnerQuotaRow)
    .join(TenantRow, TenantRow.organisation_id == OwnerQuotaRow.owner_id)
    .where(TenantRow.id == bindparam("of_tenant"), OwnerQuotaRow.level == str(Level.ORGANISATION))
    .with_for_update(of=OwnerQuotaRow)
)
"""The limits of a tenant's organisation. The statement is built once, for every new session runs it."""


async def find_quota(session: ReadSession, tenant_id: TenantId) -> Quota:
    """Returns a tenant's limits. If none were ever set, the result has no limits."""
    return _quota(await session.get(QuotaRow, tenant_id))


async def put_quota(session: WriteSession, tenant_id: TenantId, quota: Quota) -> None:
    await session.merge(QuotaRow(tenant_id=tenant_id, **quota.as_mapping()))
    await session.flush()


async def find_owner_quota(session: ReadSession, owner_id: str, tenant_id: TenantId | None) -> Quota:
    """Returns the limits of an organisation, for which `tenant_id` is None, or of an owner in a tenant."""
    row = await session.get(OwnerQuotaRow, owner_id)
    return _quota(row if row is not None and row.tenant_id == tenant_id else None)


async def put_owner_quota(
    session: WriteSession, level: Level, owner_id: str, tenant_id: TenantId | None, quota: Quota
) -> None:
    """Replaces the limits of an owner. Without any limit, the owner has no row."""
    if quota.is_empty:
        mine = (OwnerQuotaRow.owner_id == owner_id, OwnerQuotaRow.tenant_id.is_not_distinct_from(tenant_id))
        await session.execute(delete(OwnerQuotaRow).where(*mine))
        return
    row = OwnerQuotaRow(owner_id=owner_id, level=str(level), tenant_id=tenant_id, **quota.as_mapping())
    await session.merge(row)
    await session.flush()


async def hold_organisation_quota(session: WriteSession, tenant_id: TenantId) -> tuple[OrganisationId, Quota] | None:
    """Returns the tenant's organisation with its limits; None if it has none of either.

    Locks the limits until the transaction ends, so that no two tenants of the organisation pass them together.
    """
    row = await session.scalar(_HELD_BY_ORGANISATION, {"of_tenant": tenant_id})
    return None if row is None else (OrganisationId(row.owner_id), _quota(row))


async def find_limits_of_begun(
    session: ReadSession, tenant_id: TenantId, key_id: KeyId | None, end_user_id: EndUserId | None
) -> list[OwnerLimits]:
    """Returns the limits of the key and the end user that begin something in a tenant, the wider first.

    An end user without limits of its own has those of each end user. Owners without limits are left out.
    """
    names = [one for one in (key_id, end_user_id, end_user_id and tenant_id) if one is not None]
    if not names:
        return []
    statement = select(OwnerQuotaRow).where(OwnerQuotaRow.owner_id.in_(names), OwnerQuotaRow.tenant_id == tenant_id)
    found = {row.owner_id: _quota(row) for row in await session.scalars(statement)}
    of_user = None if end_user_id is None else found.get(end_user_id) or found.get(tenant_id)
    owners = [(Level.KEY, key_id, found.get(key_id or "")), (Level.USER, end_user_id, of_user)]
    return [OwnerLimits(level, owner, quota) for level, owner, quota in owners if owner and quota is not None]


def tenants_of(owner_id: str, tenant_id: TenantId | None, column: InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """Returns the condition that a row's tenant is that of an owner of limits, or one of an organisation's tenants."""
    if tenant_id is not None:
        return column == tenant_id
    return column.in_(select(TenantRow.id).where(TenantRow.organisation_id == owner_id))


def _quota(row: QuotaRow | OwnerQuotaRow | None) -> Quota:
    return Quota() if row is None else Quota(**{limit: getattr(row, limit) for limit in Quota.model_fields})
