"""Contains the SQL statements over exports, and those that read a tenant's rows for them. Never commits.

Invariant: each statement reads or changes rows of one tenant only, except those for the gateways that make the exports
of all tenants: `find_free`, `claim` and `find_expired`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import ColumnElement, Select, delete, func, not_, or_, select, tuple_, update
from sqlalchemy.engine import CursorResult

from graftwork.platform.contents.rows import opened_row, row_opener
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.exports.export import Export, ExportFailure, ExportStatus
from graftwork.platform.exports.sections import Section
from graftwork.platform.exports.tables import ExportRow
from graftwork.platform.gateways import repository as gateways
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.ids import TenantId
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.tenancy.principals import TenantScope

_ENDED = (ExportStatus.COMPLETED, ExportStatus.FAILED)
_CHANGED = {"synchronize_session": False}

# Exports


async def add(session: WriteSession, export: Export) -> None:
    session.add(
        ExportRow(
            id=export.id,
            tenant_id=export.tenant_id,
            status=str(export.status),
            requested_by=export.requested_by,
            created_at=export.created_at,
            num_rows=0,
            size_bytes=0,
            attempts=0,
            epoch=0,
        )
    )
    await session.flush()


async def find(session: ReadSession, scope: TenantScope, export_id: str) -> Export | None:
    row = await session.scalar(_of(scope).where(ExportRow.id == export_id))
    return _export(row) if row else None


async def page(session: ReadSession, scope: TenantScope, request: PageRequest) -> Page[Export]:
    statement = _of(scope)
    is_ascending = request.order is Order.ASCENDING
    if request.after is not None:
        statement = statement.where(ExportRow.id > request.after if is_ascending else ExportRow.id < request.after)
    by = ExportRow.id.asc() if is_ascending else ExportRow.id.desc()
    rows = await session.scalars(statement.order_by(by).limit(request.limit + 1))
    return cut([_export(row) for row in rows.all()], request)


async def count(session: ReadSession, scope: TenantScope) -> tuple[int, int]:
    """Returns how many exports the tenant has, and how many of them have not ended."""
    mine = select(func.count()).select_from(ExportRow).where(ExportRow.tenant_id == scope)
    kept = (await session.execute(mine)).scalar_one()
    unended = (await session.execute(mine.where(ExportRow.status.not_in(_ENDED)))).scalar_one()
    return int(kept), int(unended)


async def forget(session: WriteSession, scope: TenantScope, export_id: str) -> bool:
    """Deletes the row of an export. Returns False if there is none."""
    mine = delete(ExportRow).where(ExportRow.tenant_id == scope, ExportRow.id == export_id)
    return cast(CursorResult[Any], await session.execute(mine)).rowcount == 1


async def forget_all(session: WriteSession, scope: TenantScope) -> None:
    await session.execute(delete(ExportRow).where(ExportRow.tenant_id == scope))


async def find_expired(session: ReadSession, now: float, limit: int) -> list[tuple[TenantId, str]]:
    """Returns exports of all tenants whose time is over."""
    statement = select(ExportRow.tenant_id, ExportRow.id).where(ExportRow.expires_at < now)
    found = await session.execute(statement.order_by(ExportRow.expires_at).limit(limit))
    return [(TenantId(tenant_id), export_id) for tenant_id, export_id in found.all()]


# Claims


async def find_free(session: ReadSession, lease: GatewayLease, not_after: float) -> str | None:
    """Returns the id of the oldest export of all tenants that has not ended and that no other living gateway makes.

    An export that could not go on is left out until the time `not_after` has passed since its last try.
    """
    free = select(ExportRow.id).where(
        ExportRow.status.not_in(_ENDED),
        _is_free(session, lease),
        (ExportRow.attempts == 0) | (ExportRow.started_at.is_(None)) | (ExportRow.started_at < not_after),
    )
    return await session.scalar(free.order_by(ExportRow.id).limit(1))


async def claim(session: WriteSession, lease: GatewayLease, export_id: str, now: float) -> Export | None:
    """Lets this gateway make an export, in a new epoch. Returns None if another gateway was faster."""
    mine = update(ExportRow).where(ExportRow.id == export_id, ExportRow.status.not_in(_ENDED), _is_free(session, lease))
    taken = mine.values(
        gateway=lease.gateway_id,
        epoch=ExportRow.epoch + 1,
        attempts=ExportRow.attempts + 1,
        status=ExportStatus.RUNNING,
        started_at=now,
        num_rows=0,
        size_bytes=0,
    )
    if cast(CursorResult[Any], await session.execute(taken.execution_options(**_CHANGED))).rowcount == 0:
        return None
    return _export((await session.execute(select(ExportRow).where(ExportRow.id == export_id))).scalar_one())


async def change(session: WriteSession, claimed: Export, values: Mapping[str, Any]) -> bool:
    """Changes an export that this gateway makes. Returns False if it was deleted or claimed by another gateway."""
    mine = update(ExportRow).where(
        ExportRow.tenant_id == claimed.tenant_id, ExportRow.id == claimed.id, ExportRow.epoch == claimed.epoch
    )
    changed = await session.execute(mine.values(**values).execution_options(**_CHANGED))
    return cast(CursorResult[Any], changed).rowcount == 1


# A tenant's rows


async def rows_after(
    session: ReadSession,
    section: Section,
    scope: TenantScope,
    parents: Sequence[str] | None,
    after: tuple[Any, ...] | None,
    limit: int,
) -> list[dict[str, Any]]:
    """Returns rows of a tenant in one table, by the names of their columns, in the order of the primary key, decrypted.

    `after` is the primary key of the last row that the caller has. `parents` are the values of the section's
    `parent_column` to which the rows belong; None for all.
    """
    table = section.table.__table__
    statement = select(*table.columns)
    if section.owner is not None:
        statement = statement.where(table.c[section.owner] == scope)
    if section.parent_column is not None:
        assert parents is not None, "these rows are found by those that they belong to"
        statement = statement.where(table.c[section.parent_column].in_(parents))
    keys = section.table.__mapper__.primary_key
    if after is not None:
        statement = statement.where(tuple_(*keys) > after if len(keys) > 1 else keys[0] > after[0])
    found = await session.execute(statement.order_by(*keys).limit(limit))
    opener = await row_opener(session, scope)
    return [opened_row(opener, section.table, dict(row)) for row in found.mappings()]


async def has_row(session: ReadSession, section: Section, scope: TenantScope, key: tuple[Any, ...]) -> bool:
    """Returns whether a tenant has the row with this primary key."""
    table = section.table.__table__
    is_it = [column == value for column, value in zip(section.table.__mapper__.primary_key, key, strict=True)]
    assert section.owner is not None
    owner = table.c[section.owner]
    return await session.scalar(select(owner).where(owner == scope, *is_it).limit(1)) is not None


def _of(scope: TenantScope) -> Select[ExportRow]:
    return select(ExportRow).where(ExportRow.tenant_id == scope)


def _is_free(session: ReadSession, lease: GatewayLease) -> ColumnElement[bool]:
    """Returns the condition that no other living gateway makes the export.

    What this gateway has claimed is free too: it claims when it makes nothing, so it has failed to give that back.
    """
    own = ExportRow.gateway == lease.gateway_id
    return or_(own, not_(gateways.is_alive(session, ExportRow.gateway, lease.lease_s, lease.clock)))


def _export(row: ExportRow) -> Export:
    failure = None if row.error_code is None else ExportFailure(row.error_code, row.error_message or "")
    return Export(
        id=row.id,
        tenant_id=TenantId(row.tenant_id),
        status=ExportStatus(row.status),
        created_at=row.created_at,
        requested_by=row.requested_by,
        started_at=row.started_at,
        ended_at=row.ended_at,
        expires_at=row.expires_at,
        num_rows=row.num_rows,
        size_bytes=row.size_bytes,
        sha256=row.sha256,
        failure=failure,
        attempts=row.attempts,
        epoch=row.epoch,
    )
