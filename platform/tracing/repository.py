"""Contains the SQL statements over the traces that all gateways share. Never commits: the caller that opened the session
does.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import Table, delete, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import TenantId
from graftwork.platform.tracing.tables import RequestTraceRow

_TRACES = cast(Table, RequestTraceRow.__table__)


async def add_traces(session: WriteSession, rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds the traces of requests. Those that are there already stay as they are: a writer whose connection is cut cannot
    know whether its rows are stored.
    """
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    if rows:
        await session.execute(insert(_TRACES).on_conflict_do_nothing(), list(rows))


async def find_trace(
    session: ReadSession, request_id: str, tenant_id: TenantId | None, ended_after: float
) -> bytes | None:
    """Returns the body of the latest request with this id, that ended after this time: the server's id, the client's or
    that of its work. With `tenant_id`, only of this tenant.
    """
    row = RequestTraceRow
    any_id = or_(row.id == request_id, row.client_request_id == request_id, row.work_id == request_id)
    found = select(row.body).where(any_id, row.ended_at > ended_after).order_by(row.ended_at.desc()).limit(1)
    if tenant_id is not None:
        found = found.where(row.tenant_id == tenant_id)
    return (await session.execute(found)).scalar_one_or_none()


async def keep_latest(session: WriteSession, tenant_id: TenantId | None, most: int) -> None:
    """Deletes all traces of a tenant, or of all (None), but the latest `most`."""
    row = RequestTraceRow
    of_whom = row.tenant_id == tenant_id if tenant_id is not None else row.tenant_id.is_not(None)
    oldest = select(row.ended_at).where(of_whom).order_by(row.ended_at.desc()).limit(1).offset(most)
    await session.execute(delete(row).where(of_whom, row.ended_at <= oldest.scalar_subquery()))


async def forget_older(session: WriteSession, ended_before: float) -> None:
    """Deletes the traces of requests that ended before this time."""
    await session.execute(delete(RequestTraceRow).where(RequestTraceRow.ended_at < ended_before))


async def forget_tenant(session: WriteSession, tenant_id: TenantId) -> None:
    """Deletes the traces of a tenant."""
    await session.execute(delete(RequestTraceRow).where(RequestTraceRow.tenant_id == tenant_id))
