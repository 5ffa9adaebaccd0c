"""Deletes the rows of sessions and of their histories. No other module does this.

Owns the SQL statements. Never opens a transaction and never decides what to delete: the caller does both.
Invariant: a row that a fork or a response still needs is kept. Every statement is limited to one tenant, except the two
searches for sessions to delete.
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
    HiddenItemRow,
    ItemRow,
    ResponseRow,
    SessionRow,
    ToolCallRow,
    TurnRow,
)


async def is_used(database: ReadSession, scope: TenantScope, session_id: SessionId) -> bool:
    """Returns whether a response uses the session, or another session was forked from this session."""
    statement = select(SessionRow.id).where(SessionRow.id == session_id, SessionRow.tenant_id == scope, _is_used())
    return await database.scalar(statement) is not None


async def find_unused(database: ReadSession, before: float) -> list[tuple[TenantId, SessionId]]:
    """Finds internal sessions of the Responses API, of all tenants, that no response uses any more.

    Leaves out sessions that run a turn, sessions from which another session was forked, and sessions that were changed
    at or after `before` (Unix seconds).
    """
    statement = select(SessionRow.tenant_id, SessionRow.id).where(
        SessionRow.kind == SessionKind.RESPONSES.value,
        SessionRow.status != SessionStatus.RUNNING.value,
        SessionRow.updated_at < before,
        ~_is_used(),
    )
    rows = (await database.execute(statement)).all()
    return [(TenantId(tenant_id), SessionId(session_id)) for tenant_id, session_id in rows]


async def find_session_of_checkpoint(
    database: ReadSession, scope: TenantScope, checkpoint_id: CheckpointId
) -> SessionId | None:
    """Returns the id of the session whose turn made a checkpoint. Returns None if the checkpoint does not exist."""
    statement = select(CheckpointRow.session_id).where(
        CheckpointRow.id == checkpoint_id, CheckpointRow.tenant_id == scope
    )
    found = await database.scalar(statement)
    return None if found is None else SessionId(found)


async def delete_unused_session(database: WriteSession, scope: TenantScope, session_id: SessionId) -> None:
    """Deletes all rows of a session. The caller must first check that no response and no fork uses the session."""
    own = select(CheckpointRow.id).where(CheckpointRow.session_id == session_id, CheckpointRow.tenant_id == scope)
    for part in (ItemRow, HiddenItemRow):
        await database.execute(delete(part).where(part.checkpoint_id.in_(own), part.tenant_id == scope))
    for table in (EventRow, ToolCallRow, CheckpointRow, TurnRow):
        await database.execute(delete(table).where(table.session_id == session_id, table.tenant_id == scope))
    await database.execute(delete(SessionRow).where(SessionRow.id == session_id, SessionRow.tenant_id == scope))


def _is_used() -> ColumnElement[bool]:
    """Returns whether a response refers to a row of `sessions`, or another session was forked from its checkpoints."""
    fork = aliased(SessionRow)
    response = exists().where(ResponseRow.session_id == SessionRow.id)
    own = select(CheckpointRow.id).where(CheckpointRow.session_id == SessionRow.id).correlate(SessionRow)
    forked = exists().where(fork.id != SessionRow.id, fork.origin_id.in_(own)).correlate(SessionRow)
    return or_(response, forked)


async def find_expired(
    database: ReadSession, now: float, retention_s: float, before: SessionId | None, limit: int
) -> list[tuple[TenantId, SessionId]]:
    """Finds up to `limit` sessions of all tenants that have rows to delete, the newest ids first.

    These are sessions whose time to live has passed at `now` (Unix seconds), and sessions marked as expired that still
    have rows. A fork comes before the session from which it was forked, because the fork is newer.
    `retention_s` is the default time to live of closed sessions, in seconds. `before` is the last id that the previous
    search found; None starts with the newest session.
    """
    statement = select(SessionRow.tenant_id, SessionRow.id).where(
        or_(is_over(now, retention_s), and_(SessionRow.status == SessionStatus.EXPIRED.value, _has_more_to_delete()))
    )
    if before is not None:
        statement = statement.where(SessionRow.id < before)
    rows = (await database.execute(statement.order_by(SessionRow.id.desc()).limit(limit))).all()
    return [(TenantId(tenant_id), SessionId(session_id)) for tenant_id, session_id in rows]


async def find_of_tenant(
    database: ReadSession, scope: TenantScope, after: SessionId | None, limit: int
) -> list[tuple[SessionId, SessionStatus]]:
    """Finds up to `limit` sessions of any kind and status of one tenant, in the order of their ids.

    `after` is the last id that the previous search found; None starts with the smallest id.
    """
    statement = select(SessionRow.id, SessionRow.status).where(SessionRow.tenant_id == scope)
    if after is not None:
        statement = statement.where(SessionRow.id > after)
    rows = (await database.execute(statement.order_by(SessionRow.id).limit(limit))).all()
    return [(SessionId(session_id), SessionStatus(status)) for session_id, status in rows]


async def find_unchanged(
    database: ReadSession,
    scope: TenantScope,
    kind: SessionKind,
    before: float,
    *,
    after: SessionId | None,
    limit: int,
) -> list[SessionId]:
    """Finds up to `limit` sessions of one tenant and kind that were last changed before the time `before` and run no
    turn, in the order of their ids. `after` is the last id that the previous search found.
    """
    at_rest = SessionRow.status.not_in((SessionStatus.RUNNING.value, SessionStatus.EXPIRED.value))
    mine = select(SessionRow.id).where(SessionRow.tenant_id == scope, SessionRow.kind == kind.value)
    statement = mine.where(at_rest, SessionRow.updated_at < before)
    if after is not None:
        statement = statement.where(SessionRow.id > after)
    return [SessionId(found) for found in await database.scalars(statement.order_by(SessionRow.id).limit(limit))]


async def detach_forks(database: WriteSession, scope: TenantScope, session_id: SessionId) -> None:
    """Cuts the histories of other sessions off the checkpoints of a session, so that these can be deleted.

    Only for a tenant that is erased: the other sessions cannot be read any more.
    """
    own = select(CheckpointRow.id).where(CheckpointRow.session_id == session_id, CheckpointRow.tenant_id == scope)
    await database.execute(
        update(CheckpointRow)
        .where(
            CheckpointRow.parent_id.in_(own), CheckpointRow.session_id != session_id, CheckpointRow.tenant_id == scope
        )
        .values(parent_id=None)
        .execution_options(synchronize_session=False)
    )


async def mark_expired(database: WriteSession, scope: TenantScope, session_id: SessionId) -> None:
    """Marks a session as expired, so that no client can read it, and clears the settings and metadata in its row.

    Also deletes the rows of the session's tool calls and responses. The caller's transaction must have locked the
    session.
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
    """Deletes up to `limit` events of a session, the oldest first. Returns the number of deleted events."""
    mine = and_(EventRow.session_id == session_id, EventRow.tenant_id == scope)
    oldest = await database.scalar(select(func.min(EventRow.seq)).where(mine))
    if oldest is None:
        return 0
    result = await database.execute(delete(EventRow).where(mine, EventRow.seq < oldest + limit))
    return cast(CursorResult[Any], result).rowcount


async def delete_checkpoints(database: WriteSession, scope: TenantScope, session_id: SessionId, limit: int) -> int:
    """Deletes up to `limit` checkpoints of a session, with their items, the latest first.

    Keeps checkpoints that another session shares. Returns the number of deleted checkpoints.
    """
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
        for table in (ItemRow, HiddenItemRow):
            await database.execute(delete(table).where(table.checkpoint_id.in_(loose), table.tenant_id == scope))
        await database.execute(
            delete(CheckpointRow).where(CheckpointRow.id.in_(loose), CheckpointRow.tenant_id == scope)
        )
    return len(loose)


async def delete_turns(database: WriteSession, scope: TenantScope, session_id: SessionId) -> None:
    """Deletes those turns of a session that made no checkpoint, or whose checkpoint is deleted."""
    made_checkpoints = select(CheckpointRow.turn_id).where(
        CheckpointRow.session_id == session_id, CheckpointRow.tenant_id == scope
    )
    await database.execute(
        delete(TurnRow).where(
            TurnRow.session_id == session_id, TurnRow.tenant_id == scope, TurnRow.id.not_in(made_checkpoints)
        )
    )


async def delete_expired_session(database: WriteSession, scope: TenantScope, session_id: SessionId) -> bool:
    """Deletes the row of an expired session, unless the session still has checkpoints.

    Returns whether the row is deleted.
    """
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
    """Returns the SQL condition for sessions whose time to live has passed at `now` (Unix seconds).

    It is the rule of `AgentSession.is_over`, except that sessions already marked as expired do not count. For a session
    that has no end, the condition is null instead of false.
    `retention_s` is the default time to live of closed sessions, in seconds.
    """
    closed_without_its_own = and_(
        SessionRow.status == SessionStatus.CLOSED.value,
        SessionRow.retention_s.is_(None),
        SessionRow.closed_at <= now - retention_s,
    )
    return or_(SessionRow.ends_at <= now, closed_without_its_own)


def _has_more_to_delete() -> ColumnElement[bool]:
    """Returns whether an expired session has events, or no checkpoints, or a last checkpoint that no fork needs."""
    its_checkpoints = exists().where(CheckpointRow.session_id == SessionRow.id)
    child = aliased(CheckpointRow)
    loose = exists().where(
        CheckpointRow.session_id == SessionRow.id,
        ~exists().where(child.parent_id == CheckpointRow.id),
        ~_is_fork_point(CheckpointRow.tenant_id),
    )
    return or_(exists().where(EventRow.session_id == SessionRow.id), ~its_checkpoints, loose)


def _is_fork_point(tenant: Any) -> ColumnElement[bool]:
    """Returns whether a session was forked at a checkpoint.

    Expired sessions do not count: their `origin_id` is null.
    """
    fork = aliased(SessionRow)
    return exists().where(fork.tenant_id == tenant, fork.origin_id == CheckpointRow.id)


def _kept_checkpoints(scope: TenantScope, session_id: SessionId) -> CTE:
    """Returns the ids of a session's checkpoints that other sessions share, walked back from their fork points."""
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
