"""Taking the rows of a session away, with everything that only it stands on.

Owns the statements; never a rule, never a transaction. The one place where a history's rows are deleted.
Every statement is scoped by tenant, but for the search for what nobody stands on any more.
"""

from sqlalchemy import ColumnElement, delete, exists, or_, select
from sqlalchemy.orm import aliased

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import CheckpointId, SessionId, TenantId
from graftwork.platform.principals import TenantScope
from graftwork.sessions.agent_session import SessionKind, SessionStatus
from graftwork.sessions.tables import CheckpointRow, EventRow, ItemRow, ResponseRow, SessionRow, ToolCallRow, TurnRow


async def is_used(database: ReadSession, scope: TenantScope, session_id: SessionId) -> bool:
    """Whether a response is one of its turns, or another session was forked from its checkpoints."""
    statement = select(SessionRow.id).where(SessionRow.id == session_id, SessionRow.tenant_id == scope, _is_used())
    return await database.scalar(statement) is not None


async def find_unused(database: ReadSession, before: float) -> list[tuple[TenantId, SessionId]]:
    """Chains of responses without a response, at rest and untouched since `before`."""
    statement = select(SessionRow.tenant_id, SessionRow.id).where(
        SessionRow.kind == SessionKind.RESPONSES.value,
        SessionRow.status != SessionStatus.RUNNING.value,
        SessionRow.updated_at < before,
        ~_is_used(),
    )
    rows = (await database.execute(statement)).all()
    return [(TenantId(tenant_id), SessionId(session_id)) for tenant_id, session_id in rows]


async def find_maker(database: ReadSession, scope: TenantScope, checkpoint_id: CheckpointId) -> SessionId | None:
    """The session that made a checkpoint."""
    statement = select(CheckpointRow.session_id).where(
        CheckpointRow.id == checkpoint_id, CheckpointRow.tenant_id == scope
    )
    found = await database.scalar(statement)
    return None if found is None else SessionId(found)


async def delete_session(database: WriteSession, scope: TenantScope, session_id: SessionId) -> None:
    """Delete a session that is not used, and every row of its own."""
    own = select(CheckpointRow.id).where(CheckpointRow.session_id == session_id, CheckpointRow.tenant_id == scope)
    await database.execute(delete(ItemRow).where(ItemRow.checkpoint_id.in_(own), ItemRow.tenant_id == scope))
    for table in (EventRow, ToolCallRow, CheckpointRow, TurnRow):
        await database.execute(delete(table).where(table.session_id == session_id, table.tenant_id == scope))
    await database.execute(delete(SessionRow).where(SessionRow.id == session_id, SessionRow.tenant_id == scope))


def _is_used() -> ColumnElement[bool]:
    """Of a row of sessions. Whoever stands on a session's checkpoints was forked from one of them."""
    fork = aliased(SessionRow)
    response = exists().where(ResponseRow.session_id == SessionRow.id)
    own = select(CheckpointRow.id).where(CheckpointRow.session_id == SessionRow.id).correlate(SessionRow)
    forked = exists().where(fork.id != SessionRow.id, fork.origin_id.in_(own)).correlate(SessionRow)
    return or_(response, forked)
