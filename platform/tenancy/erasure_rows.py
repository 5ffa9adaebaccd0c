"""Contains the SQL statements about the erasure of deleted tenants. Never commits: the caller does."""

from typing import Any, cast

from sqlalchemy import select, update
from sqlalchemy.engine import CursorResult

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.repository import ERASED_ADAPTER
from graftwork.platform.tenancy.tables import AuditRow, TenantRow
from graftwork.platform.tenancy.tenants import Erasure, TenantStatus


async def find_unerased(session: ReadSession) -> list[Erasure]:
    """Returns the deleted tenants that are not erased yet, those first that were deleted first."""
    statement = select(TenantRow).where(TenantRow.status == TenantStatus.DELETED, TenantRow.erased_at.is_(None))
    return [_erasure(row) for row in await session.scalars(statement.order_by(TenantRow.deleted_at, TenantRow.id))]


async def find_deleted(session: ReadSession, since: float) -> list[TenantId]:
    """Returns the tenants that were deleted after `since`, in Unix seconds, by id."""
    statement = select(TenantRow.id).where(TenantRow.status == TenantStatus.DELETED, TenantRow.deleted_at > since)
    return [TenantId(tenant_id) for tenant_id in await session.scalars(statement.order_by(TenantRow.id))]


async def page_of_deleted(session: ReadSession, after: str, limit: int) -> list[Erasure]:
    """Returns up to `limit` deleted tenants in the order of their ids, after one id."""
    deleted = select(TenantRow).where(TenantRow.status == TenantStatus.DELETED, TenantRow.id > after)
    return [_erasure(row) for row in await session.scalars(deleted.order_by(TenantRow.id).limit(limit))]


async def erase_again(session: WriteSession, tenant_id: TenantId) -> bool:
    """Makes a deleted tenant count as not erased, so that all of it is erased again. Returns False if the tenant was not
    deleted.
    """
    deleted = update(TenantRow).where(TenantRow.id == tenant_id, TenantRow.status == TenantStatus.DELETED)
    return cast(CursorResult[Any], await session.execute(deleted.values(erased_at=None))).rowcount == 1


async def find_erasure(session: ReadSession, tenant_id: TenantId) -> Erasure | None:
    statement = select(TenantRow).where(TenantRow.id == tenant_id, TenantRow.status == TenantStatus.DELETED)
    row = await session.scalar(statement)
    return _erasure(row) if row else None


async def mark_erased(session: WriteSession, tenant_id: TenantId, at: float) -> bool:
    """Records that a deleted tenant is erased. Returns False if this was recorded before."""
    unerased = update(TenantRow).where(TenantRow.id == tenant_id, TenantRow.erased_at.is_(None))
    return cast(CursorResult[Any], await session.execute(unerased.values(erased_at=at))).rowcount == 1


async def erase_adapters_in_audit(session: WriteSession, tenant_id: TenantId) -> None:
    """Replaces the names of a tenant's adapters in the audit log. What was done, when, and by whom stays."""
    entries = update(AuditRow).where(AuditRow.tenant_id == tenant_id, AuditRow.action.startswith("adapter."))
    erase = entries.values(target=ERASED_ADAPTER, details={}).execution_options(synchronize_session=False)
    await session.execute(erase)


def _erasure(row: TenantRow) -> Erasure:
    return Erasure(TenantId(row.id), row.deleted_at, row.erased_at)
