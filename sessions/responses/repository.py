"""The rows of responses.

Owns the statements; never a rule, never a transaction. A response's row never changes.
Every statement is scoped by tenant, but for the search for what has grown old.
"""

from sqlalchemy import delete, insert, select

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import SessionId, TenantId
from graftwork.platform.principals import TenantScope
from graftwork.sessions.responses.response_record import ResponseRecord, turn_of
from graftwork.sessions.tables import ResponseRow


async def insert_response(database: WriteSession, scope: TenantScope, record: ResponseRecord) -> None:
    """Store a response."""
    await database.execute(
        insert(ResponseRow).values(
            id=record.response_id,
            tenant_id=scope,
            session_id=record.session_id,
            request=dict(record.echo),
            created_at=record.created_at,
        )
    )


async def find_response(database: ReadSession, scope: TenantScope, response_id: str) -> ResponseRecord | None:
    """One response."""
    row = await database.scalar(
        select(ResponseRow).where(ResponseRow.id == response_id, ResponseRow.tenant_id == scope)
    )
    return None if row is None else _record(row)


async def find_older(database: ReadSession, before: float, limit: int) -> list[tuple[TenantId, ResponseRecord]]:
    """Responses of all tenants from before that time, the oldest first."""
    statement = select(ResponseRow).where(ResponseRow.created_at < before).order_by(ResponseRow.created_at)
    rows = await database.scalars(statement.limit(limit))
    return [(TenantId(row.tenant_id), _record(row)) for row in rows]


async def delete_response(database: WriteSession, scope: TenantScope, response_id: str) -> None:
    """Delete one response; its turn stays."""
    await database.execute(delete(ResponseRow).where(ResponseRow.id == response_id, ResponseRow.tenant_id == scope))


def _record(row: ResponseRow) -> ResponseRecord:
    return ResponseRecord(turn_of(row.id), SessionId(row.session_id), row.request, row.created_at)
