"""Contains the SQL statements over files. Never commits: the caller that opened the session does.

Invariant: each statement reads or changes rows of one tenant only, except `find_lapsed`, which is for the sweep.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

from sqlalchemy import Select, and_, delete, exists, func, or_, select, update
from sqlalchemy.engine import CursorResult

from graftwork.platform.batches.stored_file import FilePurpose, StoredFile
from graftwork.platform.batches.tables import BatchRow, FileRow
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import TenantId
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.tenancy.principals import TenantScope


async def add(session: WriteSession, file: StoredFile) -> None:
    session.add(FileRow(**asdict(file)))
    await session.flush()


async def find(session: ReadSession, scope: TenantScope, file_id: str) -> StoredFile | None:
    """Returns a file that is ready."""
    row = await session.scalar(_of(scope).where(FileRow.id == file_id, FileRow.is_ready))
    return _file(row) if row else None


async def page(
    session: ReadSession, scope: TenantScope, purposes: Sequence[FilePurpose], now: float, request: PageRequest
) -> Page[StoredFile]:
    """Returns one page of the tenant's files with one of these purposes, without those that have expired."""
    wanted = (FileRow.purpose.in_([str(one) for one in purposes]), FileRow.expires_at > now)
    statement = _of(scope).where(FileRow.is_ready, *wanted)
    is_ascending = request.order is Order.ASCENDING
    if request.after is not None:
        statement = statement.where(FileRow.id > request.after if is_ascending else FileRow.id < request.after)
    by = FileRow.id.asc() if is_ascending else FileRow.id.desc()
    rows = await session.scalars(statement.order_by(by).limit(request.limit + 1))
    return cut([_file(row) for row in rows.all()], request)


async def sum_bytes(session: ReadSession, scope: TenantScope) -> int:
    """Returns how many bytes all the tenant's files have, also those that are being written."""
    total = await session.scalar(select(func.sum(FileRow.size_bytes)).where(FileRow.tenant_id == scope))
    return int(total or 0)


async def make_ready(session: WriteSession, scope: TenantScope, file_id: str, size_bytes: int) -> bool:
    """Shows a file whose content is complete. Returns False if its row is gone, because its tenant was erased."""
    mine = update(FileRow).where(FileRow.tenant_id == scope, FileRow.id == file_id)
    values = mine.values(is_ready=True, size_bytes=size_bytes).execution_options(synchronize_session=False)
    return cast(CursorResult[Any], await session.execute(values)).rowcount == 1


async def hide(session: WriteSession, scope: TenantScope, file_id: str) -> None:
    """Makes a file unready, so that nobody finds it from now on."""
    mine = update(FileRow).where(FileRow.tenant_id == scope, FileRow.id == file_id)
    await session.execute(mine.values(is_ready=False).execution_options(synchronize_session=False))


async def forget(session: WriteSession, scope: TenantScope, file_id: str) -> None:
    """Deletes the row of a file whose content is gone."""
    await session.execute(delete(FileRow).where(FileRow.tenant_id == scope, FileRow.id == file_id))


async def forget_all(session: WriteSession, scope: TenantScope) -> None:
    await session.execute(delete(FileRow).where(FileRow.tenant_id == scope))


async def user_of(session: ReadSession, scope: TenantScope, file_id: str) -> str | None:
    """Returns the id of a batch of the tenant that has not ended and reads this file; None if there is none."""
    using = select(BatchRow.id).where(BatchRow.tenant_id == scope, BatchRow.input_file_id == file_id)
    return await session.scalar(using.where(BatchRow.ended_at.is_(None)).limit(1))


async def find_lapsed(
    session: ReadSession, now: float, unready_before: float, limit: int
) -> list[tuple[TenantId, str]]:
    """Returns files of all tenants that nobody needs any more: those that have expired, and those that were begun before
    `unready_before` and never became ready. A file that a batch still reads is left out.
    """
    lapsed = or_(FileRow.expires_at < now, and_(FileRow.is_ready.is_(False), FileRow.created_at < unready_before))
    is_used = exists().where(BatchRow.input_file_id == FileRow.id, BatchRow.ended_at.is_(None))
    statement = select(FileRow.tenant_id, FileRow.id).where(lapsed, ~is_used).order_by(FileRow.expires_at)
    found = await session.execute(statement.limit(limit))
    return [(TenantId(tenant_id), file_id) for tenant_id, file_id in found.all()]


async def find_older(session: ReadSession, scope: TenantScope, before: float, limit: int) -> list[str]:
    """Returns files of the tenant that were created before a time, in Unix seconds, and that no open batch reads."""
    is_used = exists().where(BatchRow.input_file_id == FileRow.id, BatchRow.ended_at.is_(None))
    old = select(FileRow.id).where(FileRow.tenant_id == scope, FileRow.created_at < before, FileRow.is_ready, ~is_used)
    return list((await session.scalars(old.order_by(FileRow.id).limit(limit))).all())


def _of(scope: TenantScope) -> Select[FileRow]:
    return select(FileRow).where(FileRow.tenant_id == scope)


def _file(row: FileRow) -> StoredFile:
    return StoredFile(
        id=row.id,
        tenant_id=TenantId(row.tenant_id),
        purpose=FilePurpose(row.purpose),
        filename=row.filename,
        size_bytes=row.size_bytes,
        created_at=row.created_at,
        expires_at=row.expires_at,
        is_ready=row.is_ready,
    )
