"""Taking the rows of a session away, with everything that only it stands on.

Owns the statements; never a rule, never a transaction. The one place where a history's rows are deleted.
Every statement is scoped by tenant, but for the search for what nobody stands on any more.
"""

from dataclasses import asdict
from typing import Any, cast

from sqlalchemy import CTE, ColumnElement, and_, delete, exists, func, or_, select, update
from sqlalchemy.engine import CursorResult
from sqlalchemy.orm import aliased

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import CheckpointId, SessionId, TenantId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.session import SessionKind, SessionSettings, SessionStatus
from graftwork.sessions.store.tables import (
    CheckpointRow,
    EventRow,
    ItemRow,
    ResponseRow,
    SessionRow,
    ToolCallRow,
    TurnRow,
)


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


async def delete_unused_session(database: WriteSession, scope: TenantScope, session_id: SessionId) -> None:
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


async def find_expired(
    database: ReadSession, now: float, retention_s: float, before: SessionId | None, limit: int
) -> list[tuple[TenantId, SessionId]]:
    """Sessions that `AgentSession.is_over` says are over, and those of which more can go; the youngest ids first.

    `before` continues a search: forks are younger than what they were forked from, so they are found first.
    """
    statement = select(SessionRow.tenant_id, SessionRow.id).where(
        or_(is_over(now, retention_s), and_(SessionRow.status == SessionStatus.EXPIRED.value, _can_lose_more()))
    )
    if before is not None:
        statement = statement.where(SessionRow.id < before)
    rows = (await database.execute(statement.order_by(SessionRow.id.desc()).limit(limit))).all()
    return [(TenantId(tenant_id), SessionId(session_id)) for tenant_id, session_id in rows]


async def mark_expired(database: WriteSession, scope: TenantScope, session_id: SessionId) -> None:
    """Take a session that this transaction has locked out of everybody's sight, and empty its row and its ledger.

    What was answered in it as responses goes too: nobody can read those any more.
    """
    await database.execute(
        update(SessionRow)
        .where(SessionRow.id == session_id, SessionRow.tenant_id == scope)
        .values(
            status=SessionStatus.EXPIRED.value,
            settings=asdict(SessionSettings()),
            labels={},
            head_id=None,
            origin_id=None,
            ends_at=None,
            last_cache=None,
            epoch=SessionRow.epoch + 1,
        )
    )
    for table in (ToolCallRow, ResponseRow):
        await database.execute(delete(table).where(table.session_id == session_id, table.tenant_id == scope))


async def delete_events(database: WriteSession, scope: TenantScope, session_id: SessionId, limit: int) -> int:
    """Delete the oldest of a session's events, at most `limit` numbers of them; how many went."""
    mine = and_(EventRow.session_id == session_id, EventRow.tenant_id == scope)
    oldest = await database.scalar(select(func.min(EventRow.seq)).where(mine))
    if oldest is None:
        return 0
    result = await database.execute(delete(EventRow).where(mine, EventRow.seq < oldest + limit))
    return cast(CursorResult[Any], result).rowcount


async def delete_checkpoints(database: WriteSession, scope: TenantScope, session_id: SessionId, limit: int) -> int:
    """Delete checkpoints that no other session stands on, with their items, the deepest first; how many went."""
    kept = _kept_checkpoints(scope, session_id)
    statement = (
        select(CheckpointRow.id)
        .where(
            CheckpointRow.session_id == session_id,
            CheckpointRow.tenant_id == scope,
            CheckpointRow.id.not_in(select(kept.c.id)),
        )
        .order_by(CheckpointRow.depth.desc())
        .limit(limit)
    )
    loose = (await database.scalars(statement)).all()
    if loose:
        await database.execute(delete(ItemRow).where(ItemRow.checkpoint_id.in_(loose), ItemRow.tenant_id == scope))
        await database.execute(
            delete(CheckpointRow).where(CheckpointRow.id.in_(loose), CheckpointRow.tenant_id == scope)
        )
    return len(loose)


async def delete_turns(database: WriteSession, scope: TenantScope, session_id: SessionId) -> None:
    """Delete the turns whose checkpoint has gone, or that never had one."""
    made_checkpoints = select(CheckpointRow.turn_id).where(
        CheckpointRow.session_id == session_id, CheckpointRow.tenant_id == scope
    )
    await database.execute(
        delete(TurnRow).where(
            TurnRow.session_id == session_id, TurnRow.tenant_id == scope, TurnRow.id.not_in(made_checkpoints)
        )
    )


async def delete_expired_session(database: WriteSession, scope: TenantScope, session_id: SessionId) -> bool:
    """Delete an expired session's row, unless checkpoints of it are kept; whether it went."""
    result = await database.execute(
        delete(SessionRow).where(
            SessionRow.id == session_id,
            SessionRow.tenant_id == scope,
            SessionRow.status == SessionStatus.EXPIRED.value,
            ~exists().where(CheckpointRow.session_id == session_id),
        )
    )
    return cast(CursorResult[Any], result).rowcount == 1


def is_over(now: float, retention_s: float) -> ColumnElement[bool]:
    """`AgentSession.is_over` in SQL, but for what is marked as expired; null for what has no end. Indexed."""
    closed_without_its_own = and_(
        SessionRow.status == SessionStatus.CLOSED.value,
        SessionRow.retention_s.is_(None),
        SessionRow.closed_at <= now - retention_s,
    )
    return or_(SessionRow.ends_at <= now, closed_without_its_own)


def _can_lose_more() -> ColumnElement[bool]:
    """Of an expired session: events are left, or no checkpoint is, or one at the end of a branch is nobody's ground."""
    its_checkpoints = exists().where(CheckpointRow.session_id == SessionRow.id)
    child = aliased(CheckpointRow)
    loose = exists().where(
        CheckpointRow.session_id == SessionRow.id,
        ~exists().where(child.parent_id == CheckpointRow.id),
        ~_is_fork_point(CheckpointRow.tenant_id),
    )
    return or_(exists().where(EventRow.session_id == SessionRow.id), ~its_checkpoints, loose)


def _is_fork_point(tenant: Any) -> ColumnElement[bool]:
    """Whether a session was forked at a checkpoint. Expired sessions have given up where they came from."""
    fork = aliased(SessionRow)
    return exists().where(fork.tenant_id == tenant, fork.origin_id == CheckpointRow.id)


def _kept_checkpoints(scope: TenantScope, session_id: SessionId) -> CTE:
    """The ids of a session's checkpoints that others stand on: walked back from where others begin."""
    child = aliased(CheckpointRow)
    is_continued = exists().where(child.parent_id == CheckpointRow.id, child.session_id != session_id)
    kept = (
        select(CheckpointRow.id, CheckpointRow.parent_id)
        .where(
            CheckpointRow.session_id == session_id,
            CheckpointRow.tenant_id == scope,
            or_(is_continued, _is_fork_point(scope)),
        )
        .cte("kept", recursive=True)
    )
    parents: Any = (
        select(CheckpointRow.id, CheckpointRow.parent_id)
        .join(kept, CheckpointRow.id == kept.c.parent_id)
        .where(CheckpointRow.session_id == session_id)
    )
    return kept.union(parents)
