"""Finds and renews the leases in the rows of sessions, by the time of the database.

Owns the SQL statements. Never opens a transaction and never checks a rule: the caller does both.
Every statement is limited to one tenant, except those for the turns of this process, and the search for interrupted turns.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from sqlalchemy import BigInteger, ColumnElement, Float, Table, bindparam, case, literal, or_, select, tuple_, update
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
    if len(leases) == 1 and clock is None:
        (lease,) = leases
        key = {"of_id": lease.session_id, "of_tenant": lease.scope, "of_epoch": lease.epoch, "of_turn": lease.turn_id}
        seq = {"seq": last_seqs[0]} if last_seqs else {}
        one = _extending(database.get_bind().dialect.name, bool(last_seqs))
        rows = (await database.execute(one, {**key, **seq, "lease_s": lease_s})).all()
        return {SessionId(session_id): cancel_requested for session_id, cancel_requested in rows}
    held = tuple_(SessionRow.id, SessionRow.tenant_id, SessionRow.epoch, SessionRow.running_turn_id)
    values: dict[str, Any] = {"lease_expires_at": database_now(database, clock) + lease_s}
    if last_seqs:
        numbers = {lease.session_id: literal(seq, BigInteger) for lease, seq in zip(leases, last_seqs, strict=True)}
        values["last_seq"] = case(numbers, value=SessionRow.id)
    statement = (
        update(SessionRow)
        .where(held.in_([(lease.session_id, lease.scope, lease.epoch, lease.turn_id) for lease in leases]))
        .values(**values)
        .returning(SessionRow.id, SessionRow.cancel_requested)
        .execution_options(synchronize_session=False)
    )
    rows = (await database.execute(statement)).all()
    return {SessionId(session_id): cancel_requested for session_id, cancel_requested in rows}


@cache
def _extending(dialect: str, has_seq: bool) -> ReturningUpdate[str, bool]:
    """Returns the statement that renews one lease. It is built once, for a turn alone on its gateway runs it often."""
    held = (
        SessionRow.id == bindparam("of_id"),
        SessionRow.tenant_id == bindparam("of_tenant"),
        SessionRow.epoch == bindparam("of_epoch"),
        SessionRow.running_turn_id == bindparam("of_turn"),
    )
    values: dict[str, Any] = {"lease_expires_at": now_in(dialect) + bindparam("lease_s", type_=Float)}
    if has_seq:
        values["last_seq"] = bindparam("seq")
    renewed = update(cast("Table", SessionRow.__table__)).where(*held).values(values)
    return renewed.returning(SessionRow.id, SessionRow.cancel_requested)
