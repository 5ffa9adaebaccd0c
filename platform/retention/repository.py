"""Contains the SQL statements over the tenants' retention. Never commits: the caller that opened the session does.

Invariant: each statement is over one tenant, except `find_all`, which is for the sweep.
"""

from sqlalchemy import delete, select

from graftwork.platform.answers.data_rights import Retention
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import TenantId
from graftwork.platform.retention.tables import RetentionRow
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.tables import TenantRow
from graftwork.platform.tenancy.tenants import TenantStatus

_FIELDS = tuple(Retention.model_fields)


async def find(session: ReadSession, scope: TenantScope) -> Retention:
    row = await session.get(RetentionRow, scope)
    return Retention() if row is None else _retention(row)


async def put(session: WriteSession, scope: TenantScope, retention: Retention, now: float) -> None:
    """Sets or replaces the retention of a tenant."""
    await session.merge(RetentionRow(tenant_id=scope, changed_at=now, **retention.body()))
    await session.flush()


async def forget(session: WriteSession, scope: TenantScope) -> None:
    await session.execute(delete(RetentionRow).where(RetentionRow.tenant_id == scope))


async def find_all(session: ReadSession, after: str, limit: int) -> list[tuple[TenantId, Retention]]:
    """Returns the retention of up to `limit` tenants that were not deleted, in the order of their ids, after one id."""
    mine = select(RetentionRow).join(TenantRow, TenantRow.id == RetentionRow.tenant_id)
    living = mine.where(TenantRow.status != TenantStatus.DELETED, RetentionRow.tenant_id > after)
    rows = await session.scalars(living.order_by(RetentionRow.tenant_id).limit(limit))
    return [(TenantId(row.tenant_id), _retention(row)) for row in rows]


def _retention(row: RetentionRow) -> Retention:
    return Retention(**{name: getattr(row, name) for name in _FIELDS})
