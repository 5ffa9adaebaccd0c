"""Contains SQL statements over tenants, the audit log and idempotency keys.

Owns the conversion between rows and the platform's own types. Never commits: the caller that opened the session does.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import ColumnElement, Select, and_, delete, not_, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import CursorResult

from graftwork.platform.database import Base, ReadSession, WriteSession
from graftwork.platform.gateways import repository as gateways
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.ids import OrganisationId, TenantId
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.tenancy.tables import (
    ApiKeyRow,
    AuditRow,
    IdempotencyRow,
    OrganisationRow,
    OwnerQuotaRow,
    QuotaRow,
    TenantRow,
)
from graftwork.platform.tenancy.tenants import AuditEntry, Tenant, TenantStatus

ERASED_ADAPTER = "deleted"
"""The name of every adapter in the usage rows of an erased tenant."""

Row = TypeVar("Row", TenantRow, ApiKeyRow, AuditRow, OrganisationRow)


# Tenants


async def add_tenant(session: WriteSession, tenant: Tenant) -> None:
    session.add(
        TenantRow(
            id=tenant.id,
            name=tenant.name,
            status=str(tenant.status),
            weight=tenant.weight,
            service_tier_ceiling=tenant.service_tier_ceiling,
            created_at=tenant.created_at,
            organisation_id=tenant.organisation_id,
        )
    )
    await session.flush()


async def find_tenant(session: ReadSession, tenant_id: TenantId) -> Tenant | None:
    """Returns the tenant, or None if there is no such tenant or if it was deleted."""
    statement = select(TenantRow).where(TenantRow.id == tenant_id, TenantRow.status != TenantStatus.DELETED)
    row = await session.scalar(statement)
    return _tenant(row) if row else None


async def hold_tenant(session: WriteSession, tenant_id: TenantId) -> Tenant | None:
    """Returns the tenant, and locks its row until the transaction ends. Returns None if the tenant is unknown or was
    deleted.
    """
    statement = select(TenantRow).where(TenantRow.id == tenant_id, TenantRow.status != TenantStatus.DELETED)
    row = await session.scalar(statement.with_for_update())
    return _tenant(row) if row else None


async def list_tenants(
    session: ReadSession, page: PageRequest, organisation_id: OrganisationId | None = None
) -> Page[Tenant]:
    """Returns one page of the tenants that were not deleted: of an organisation, or of all for None."""
    statement = select(TenantRow).where(TenantRow.status != TenantStatus.DELETED)
    if organisation_id is not None:
        statement = statement.where(TenantRow.organisation_id == organisation_id)
    return cut([_tenant(row) for row in await page_of(session, statement, TenantRow, page)], page)


async def newest_tenants(session: ReadSession, limit: int) -> list[Tenant]:
    """Returns at most `limit` tenants that were not deleted, the newest first."""
    statement = select(TenantRow).where(TenantRow.status != TenantStatus.DELETED)
    return [_tenant(row) for row in await session.scalars(statement.order_by(TenantRow.id.desc()).limit(limit))]


async def change_tenant(session: WriteSession, tenant_id: TenantId, changes: Mapping[str, Any]) -> None:
    await session.execute(update(TenantRow).where(TenantRow.id == tenant_id).values(**changes))


async def delete_belongings(session: WriteSession, tenant_id: TenantId) -> None:
    """Deletes a tenant's API keys, all limits of it and in it, and its idempotency keys with their stored answers.

    The tenant's usage records and its entries in the audit log stay.
    """
    await session.execute(delete(ApiKeyRow).where(ApiKeyRow.tenant_id == tenant_id))
    await session.execute(delete(QuotaRow).where(QuotaRow.tenant_id == tenant_id))
    await session.execute(delete(OwnerQuotaRow).where(OwnerQuotaRow.tenant_id == tenant_id))
    await session.execute(delete(IdempotencyRow).where(IdempotencyRow.owner == tenant_id))


# The audit log


async def add_audit_entry(session: WriteSession, entry: AuditEntry) -> None:
    session.add(
        AuditRow(
            id=entry.id,
            at=entry.at,
            actor=entry.actor,
            action=entry.action,
            tenant_id=entry.tenant_id,
            target=entry.target,
            details=entry.details,
        )
    )
    await session.flush()


async def list_audit_entries(session: ReadSession, page: PageRequest) -> Page[AuditEntry]:
    rows = await page_of(session, select(AuditRow), AuditRow, page)
    return cut([_audit_entry(row) for row in rows], page)


# Idempotency keys


async def claim_idempotency_key(session: WriteSession, values: Mapping[str, Any]) -> bool:
    """Inserts the row of an idempotency key, which reserves the key for one attempt. Returns False if the row exists."""
    return await insert_once(session, IdempotencyRow, values)


async def drop_lapsed_idempotency_key(
    session: WriteSession, owner: str, key: str, answered_before: float, lease: GatewayLease
) -> None:
    """Deletes the row of one idempotency key if it has lapsed, so that the key is free again.

    A row with an answer has lapsed if it was created before `answered_before`, in Unix seconds. A row without an answer
    has lapsed if its gateway is not alive.
    """
    mine = and_(IdempotencyRow.owner == owner, IdempotencyRow.key == key)
    await session.execute(delete(IdempotencyRow).where(mine, _has_lapsed(session, answered_before, lease)))


async def drop_lapsed_idempotency_keys(session: WriteSession, answered_before: float, lease: GatewayLease) -> int:
    """Deletes the rows of all idempotency keys that have lapsed. Returns the number of deleted rows."""
    lapsed = delete(IdempotencyRow).where(_has_lapsed(session, answered_before, lease))
    return cast(CursorResult[Any], await session.execute(lapsed)).rowcount


async def find_idempotency_key(session: ReadSession, owner: str, key: str) -> IdempotencyRow:
    """Returns the row of an idempotency key. The row must exist: call this in the transaction that failed to insert it."""
    statement = select(IdempotencyRow).where(IdempotencyRow.owner == owner, IdempotencyRow.key == key)
    return (await session.execute(statement)).scalar_one()


async def answer_idempotency_key(
    session: WriteSession, owner: str, key: str, claim: str, values: Mapping[str, Any]
) -> bool:
    """Stores the answer of a request, or the work that will answer it, in the row of its idempotency key.

    Changes nothing and returns False if `claim` is not the id of the attempt that has reserved the key.
    """
    answering = update(IdempotencyRow).where(*_attempt(owner, key, claim)).values(**values)
    return cast(CursorResult[Any], await session.execute(answering)).rowcount == 1


async def free_idempotency_key(
    session: WriteSession, owner: str, key: str, claim: str, *, also_answered: bool = False
) -> None:
    """Deletes the row of an idempotency key, so that the key is free again.

    Changes nothing if the request was answered, unless `also_answered`, or if `claim` is not the id of the attempt that
    has reserved the key.
    """
    mine = _attempt(owner, key, claim)
    if not also_answered:
        mine = (*mine, IdempotencyRow.status.is_(None))
    await session.execute(delete(IdempotencyRow).where(*mine))


# What the above share


def _has_lapsed(session: ReadSession, answered_before: float, lease: GatewayLease) -> ColumnElement[bool]:
    is_alive = gateways.is_alive(session, IdempotencyRow.gateway, lease.lease_s, lease.clock)
    return or_(
        and_(IdempotencyRow.body.is_not(None), IdempotencyRow.created_at < answered_before),
        and_(IdempotencyRow.body.is_(None), not_(is_alive)),
    )


def _attempt(owner: str, key: str, claim: str) -> tuple[ColumnElement[bool], ...]:
    return IdempotencyRow.owner == owner, IdempotencyRow.key == key, IdempotencyRow.claim == claim


async def page_of(session: ReadSession, statement: Select[Row], row: type[Row], page: PageRequest) -> Sequence[Row]:
    """Returns the rows of one page, plus one more if further rows follow."""
    if page.order is Order.ASCENDING:
        statement = statement.order_by(row.id)
        behind = row.id > page.after if page.after else None
    else:
        statement = statement.order_by(row.id.desc())
        behind = row.id < page.after if page.after else None
    if behind is not None:
        statement = statement.where(behind)
    return (await session.scalars(statement.limit(page.limit + 1))).all()


async def insert_once(session: WriteSession, row: type[Base], values: Mapping[str, Any]) -> bool:
    """Inserts a row, unless its primary key exists. Returns whether the row was inserted."""
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    result = await session.execute(insert(row).values(**values).on_conflict_do_nothing())
    return cast(CursorResult[Any], result).rowcount == 1


def _tenant(row: TenantRow) -> Tenant:
    return Tenant(
        id=TenantId(row.id),
        name=row.name,
        status=TenantStatus(row.status),
        weight=row.weight,
        service_tier_ceiling=row.service_tier_ceiling,
        created_at=row.created_at,
        organisation_id=None if row.organisation_id is None else OrganisationId(row.organisation_id),
    )


def _audit_entry(row: AuditRow) -> AuditEntry:
    return AuditEntry(
        id=row.id,
        at=row.at,
        actor=row.actor,
        action=row.action,
        tenant_id=TenantId(row.tenant_id),
        target=row.target,
        details=row.details,
    )
