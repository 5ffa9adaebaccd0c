"""Reads and writes the rows of turns and of their events.

Owns the SQL statements. Never decides a rule or opens a transaction. An event's row never changes.
Every statement is scoped by tenant.
"""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import CheckpointId, SessionId, TurnId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.events import EventType, SessionEvent
from graftwork.sessions.core.items import item_from_body
from graftwork.sessions.core.session import Turn, TurnStatus
from graftwork.sessions.store.tables import EventRow, TurnRow


async def insert_turn(database: WriteSession, scope: TenantScope, turn: Turn) -> None:
    """Stores a new turn."""
    await database.execute(
        insert(TurnRow).values(
            id=turn.turn_id,
            tenant_id=scope,
            session_id=turn.session_id,
            parent_id=turn.parent_id,
            first_seq=turn.first_seq,
            input=[item.body for item in turn.input],
            created_at=turn.created_at,
            made_with=turn.made_with,
            **_changing_columns(turn),
        )
    )


async def update_turn(database: WriteSession, scope: TenantScope, turn: Turn) -> None:
    """Stores how a turn ended. Its output is stored as the items of its checkpoint."""
    await database.execute(
        update(TurnRow).where(TurnRow.id == turn.turn_id, TurnRow.tenant_id == scope).values(**_changing_columns(turn))
    )


async def find_turn(database: ReadSession, scope: TenantScope, turn_id: str) -> Turn | None:
    """Finds one turn, without its output."""
    row = await database.scalar(select(TurnRow).where(TurnRow.id == turn_id, TurnRow.tenant_id == scope))
    return None if row is None else _turn_from_row(row)


async def insert_events(database: WriteSession, events: Iterable[tuple[TenantScope, SessionEvent]], at: float) -> None:
    """Stores events under their numbers. Skips an event whose number is stored already."""
    rows: list[dict[str, Any]] = [
        {
            "session_id": event.session_id,
            "seq": event.seq,
            "tenant_id": scope,
            "turn_id": event.turn_id,
            "type": event.type.value,
            "fields": dict(event.fields),
            "at": at,
        }
        for scope, event in events
    ]
    insert_or_skip = sqlite.insert if database.get_bind().dialect.name == "sqlite" else postgresql.insert
    await database.execute(insert_or_skip(EventRow).on_conflict_do_nothing(), rows)


async def list_events(
    database: ReadSession, scope: TenantScope, session_id: SessionId, after: int, limit: int
) -> tuple[SessionEvent, ...]:
    """Lists up to `limit` events whose number is above `after`, in order."""
    statement = (
        select(EventRow)
        .where(EventRow.session_id == session_id, EventRow.tenant_id == scope, EventRow.seq > after)
        .order_by(EventRow.seq)
        .limit(limit)
    )
    return tuple(_event_from_row(row) for row in await database.scalars(statement))


def _changing_columns(turn: Turn) -> dict[str, Any]:
    return {
        "status": turn.status.value,
        "checkpoint_id": turn.checkpoint_id,
        "finish_reason": turn.finish_reason,
        "usage": turn.usage,
        "cache": turn.cache,
        "error": turn.error,
        "finished_at": turn.finished_at,
    }


def _turn_from_row(row: TurnRow) -> Turn:
    return Turn(
        turn_id=TurnId(row.id),
        session_id=SessionId(row.session_id),
        status=TurnStatus(row.status),
        parent_id=None if row.parent_id is None else CheckpointId(row.parent_id),
        first_seq=row.first_seq,
        input=tuple(item_from_body(body) for body in row.input),
        created_at=row.created_at,
        checkpoint_id=None if row.checkpoint_id is None else CheckpointId(row.checkpoint_id),
        finish_reason=row.finish_reason,
        usage=row.usage,
        cache=row.cache,
        error=row.error,
        finished_at=row.finished_at,
        made_with=row.made_with,
    )


def _event_from_row(row: EventRow) -> SessionEvent:
    return SessionEvent(SessionId(row.session_id), TurnId(row.turn_id), row.seq, EventType(row.type), row.fields)
