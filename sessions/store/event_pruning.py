"""Deletes the events of turns that ended long ago. The turns, their items and their token ids stay.

Owns these statements and their transactions, each of a limited size. Never deletes an event of a turn that runs, that
ended lately, or whose response is still stored, because a stored response is read from its events. Deletes the events
of a session from its first one on, so the events that are left have no gap.
Invariant: the flag `has_events` of a turn is cleared only after the turn's last event is deleted. So if a crash
interrupts a run, the next run continues it.
"""

from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import ColumnElement, and_, delete, exists, func, literal, select, true, tuple_, update
from sqlalchemy.engine import CursorResult

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, ReadSession, WriteSession
from graftwork.platform.ids import SessionId, TenantId
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.sessions.store.tables import EventRow, ResponseRow, SessionRow, TurnRow

TURNS_PER_QUERY = 500
EVENTS_PER_TRANSACTION = 2_000


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in the list of turns, which is in the order of their ends."""

    finished_at: float
    turn_id: str


class EventPruner:
    """Deletes old events of all tenants. Several processes may do this on the same database at the same time."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        kept_s: float,
        *,
        turns_per_query: int = TURNS_PER_QUERY,
        events_per_transaction: int = EVENTS_PER_TRANSACTION,
    ) -> None:
        """`kept_s` is the time in seconds that events are kept after the end of their turn."""
        self._database = database
        self._clock = clock
        self._kept_s = kept_s
        self._turns_per_query = turns_per_query
        self._events_per_transaction = events_per_transaction

    async def prune(self) -> int:
        """Deletes the events that are too old. Returns their number."""
        before, num_deleted = self._clock.now() - self._kept_s, 0
        place: _Place | None = None
        while True:
            async with self._database.read() as database:
                sessions, place = await _find_sessions(database, before, place, self._turns_per_query)
            for tenant_id, session_id in sessions:
                num_deleted += await self._prune_session(tenant_id, session_id, before)
            if place is None:
                return num_deleted

    async def _prune_session(self, tenant_id: TenantId, session_id: SessionId, before: float) -> int:
        scope, num_deleted = scope_of_tenant(AdminPrincipal(), tenant_id), 0
        while True:
            async with self._database.write() as database:
                end = await _first_kept(database, scope, session_id, before)
                num_now = await _delete_events(database, scope, session_id, end, self._events_per_transaction)
                if num_now == 0:
                    await _clear_flags(database, scope, session_id, end, before)
            num_deleted += num_now
            if num_now == 0:
                return num_deleted


async def _find_sessions(
    database: ReadSession, before: float, after: _Place | None, limit: int
) -> tuple[list[tuple[TenantId, SessionId]], _Place | None]:
    """Finds sessions with turns that ended before a time in Unix seconds and may have events.

    Reads up to `limit` turns that come after the place `after`, with an index of the turns that have events. Also returns
    the place of the last turn that it has read, or None if there are no more turns.
    """
    statement = select(TurnRow.tenant_id, TurnRow.session_id, TurnRow.finished_at, TurnRow.id)
    statement = statement.where(TurnRow.has_events.is_(true()), TurnRow.finished_at < before)
    if after is not None:
        place = tuple_(literal(after.finished_at), literal(after.turn_id))
        statement = statement.where(tuple_(TurnRow.finished_at, TurnRow.id) > place)
    statement = statement.order_by(TurnRow.finished_at, TurnRow.id).limit(limit)
    rows = (await database.execute(statement)).all()
    sessions = dict.fromkeys((TenantId(row.tenant_id), SessionId(row.session_id)) for row in rows)
    is_last = len(rows) < limit
    return list(sessions), None if is_last else _Place(rows[-1].finished_at, rows[-1].id)


async def _first_kept(database: ReadSession, scope: TenantScope, session_id: SessionId, before: float) -> int:
    """Returns the number of the first event of a session that must stay. It may be one that does not exist yet."""
    mine = and_(TurnRow.session_id == session_id, TurnRow.tenant_id == scope)
    first = await database.scalar(select(func.min(TurnRow.first_seq)).where(mine, ~_is_over(before)))
    if first is not None:
        return first
    session = and_(SessionRow.id == session_id, SessionRow.tenant_id == scope)
    last = await database.scalar(select(SessionRow.last_seq).where(session))
    return 0 if last is None else last + 1


async def _delete_events(
    database: WriteSession, scope: TenantScope, session_id: SessionId, end: int, limit: int
) -> int:
    """Deletes up to `limit` events with numbers below `end`, the oldest first. Returns how many it has deleted."""
    mine = and_(EventRow.session_id == session_id, EventRow.tenant_id == scope, EventRow.seq < end)
    oldest = await database.scalar(select(func.min(EventRow.seq)).where(mine))
    if oldest is None:
        return 0
    result = await database.execute(delete(EventRow).where(mine, EventRow.seq < oldest + limit))
    return cast(CursorResult[Any], result).rowcount


async def _clear_flags(
    database: WriteSession, scope: TenantScope, session_id: SessionId, end: int, before: float
) -> None:
    """Notes that the turns that are over have no events any more. All events with numbers below `end` are deleted."""
    mine = and_(TurnRow.session_id == session_id, TurnRow.tenant_id == scope, TurnRow.first_seq <= end)
    await database.execute(
        update(TurnRow)
        .where(mine, _is_over(before))
        .values(has_events=False)
        .execution_options(synchronize_session=False)
    )


def _is_over(before: float) -> ColumnElement[bool]:
    """Returns the SQL condition for turns whose events nobody can ask for any more."""
    # Both ids differ only in their prefix, see `sessions/responses/record.py`.
    its_response = literal("resp_").concat(func.substr(TurnRow.id, len("turn_") + 1))
    has_response = exists().where(ResponseRow.id == its_response)
    return and_(TurnRow.finished_at.is_not(None), TurnRow.finished_at < before, ~has_response)
