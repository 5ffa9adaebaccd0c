"""Finds and renews the leases in the rows of sessions, by the time of the database.

Owns the SQL statements. Never opens a transaction and never checks a rule: the caller does both.
Every statement is limited to one tenant, except those for the turns of this process, and the search for interrupted turns.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from sqlalchemy import BigInteger, ColumnElement, Float, Table, and_, bindparam, case, or_, select, update
from sqlalchemy.sql.dml import ReturningUpdate

from graftwork.platform.clock import Clock
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.gateways.repository import database_now, now_in
from graftwork.platform.ids import SessionId, TenantId, TurnId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.lease import SessionLease
from graftwork.sessions.core.session import SessionStatus
from graftwork.sessions.store.tables import SessionRow


async def find_interrupted(
    database: ReadSession, owner: str, clock: Clock | None
) -> list[tuple[TenantId, SessionId, TurnId]]:
    """Finds turns of all tenants that are marked as running, but that may have no process any more.

    These are the turns whose lease has expired, and the turns whose lease belongs to the process named `owner`. `clock`
    replaces the database's own time in tests.
    """
    statement = select(SessionRow.tenant_id, SessionRow.id, SessionRow.running_turn_id).where(
        SessionRow.status == SessionStatus.RUNNING.value,
        or_(_has_expired(database, clock), SessionRow.lease_owner == owner),
    )
    rows = (await database.execute(statement)).all()
    return [(TenantId(tenant), SessionId(session), TurnId(turn)) for tenant, session, turn in rows if turn is not None]


async def has_expired(database: ReadSession, scope: TenantScope, session_id: str, clock: Clock | None) -> bool:
    """Returns whether the lease of the session's turn has expired. `clock` replaces the database's own time in tests."""
    statement = select(_has_expired(database, clock))
    statement = statement.where(SessionRow.id == session_id, SessionRow.tenant_id == scope)
    return bool(await database.scalar(statement))


def _has_expired(database: ReadSession, clock: Clock | None) -> ColumnElement[bool]:
    """Returns the condition that a session's turn has no lease, or one that has expired."""
    return or_(SessionRow.lease_expires_at.is_(None), SessionRow.lease_expires_at <= database_now(database, clock))


async def extend_leases(
    database: WriteSession,
    leases: Sequence[SessionLease],
    lease_s: float,
    clock: Clock | None,
    last_seqs: Sequence[int] = (),
) -> dict[SessionId, bool]:
    """Renews the leases of running turns, so that they expire in `lease_s` seconds.

    `clock` replaces the database's own time in tests.
    Returns, by session id, whether a client has asked to cancel the turn. A session whose lease is lost is missing in
    the result.
    `last_seqs` is empty, or has the number of the last stored event for each lease. Locks the rows of the sessions.
    """
    dialect, found = database.get_bind().dialect.name, dict[SessionId, bool]()
    for first in range(0, len(leases), _AT_ONCE):
        part, seqs = leases[first : first + _AT_ONCE], last_seqs[first : first + _AT_ONCE]
        values: dict[str, Any] = {"lease_s": lease_s} | ({} if clock is None else {"now": clock.now()})
        for number, lease in enumerate(part):
            held = zip(_HELD, (lease.session_id, lease.scope, lease.epoch, lease.turn_id), strict=True)
            values |= {f"{name}_{number}": value for name, value in held}
        values |= {f"seq_{number}": seq for number, seq in enumerate(seqs)}
        statement = _extending(dialect, len(part), has_seqs=bool(seqs), has_clock=clock is not None)
        rows = (await database.execute(statement, values)).all()
        found |= {SessionId(session_id): cancel_requested for session_id, cancel_requested in rows}
    return found


_AT_ONCE = 32
"""The most leases that one statement renews."""
_HELD = ("id", "tenant_id", "epoch", "running_turn_id")
"""The columns that say whether a lease is held."""


@cache
def _extending(dialect: str, num_leases: int, *, has_seqs: bool, has_clock: bool) -> ReturningUpdate[str, bool]:
    """Returns the statement that renews so many leases. Each is built once, for every turn runs it several times."""
    table = cast("Table", SessionRow.__table__)
    now = bindparam("now", type_=Float) if has_clock else now_in(dialect)
    held = [and_(*(table.c[name] == bindparam(f"{name}_{number}") for name in _HELD)) for number in range(num_leases)]
    values: dict[str, Any] = {"lease_expires_at": now + bindparam("lease_s", type_=Float)}
    if has_seqs:
        seqs = (bindparam(f"seq_{number}", type_=BigInteger) for number in range(num_leases))
        values["last_seq"] = case(*zip(held, seqs, strict=True))
    return update(table).where(or_(*held)).values(values).returning(SessionRow.id, SessionRow.cancel_requested)
