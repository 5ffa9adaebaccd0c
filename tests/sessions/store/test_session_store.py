"""Tests of sessions in the database."""

from graftwork.platform.database import Database
from graftwork.sessions.core.session import SessionKind, SessionStatus
from graftwork.sessions.service import NewSession
from graftwork.sessions.store.session_store import SessionStore
from tests.sessions.session_process import SessionProcess, new_principal


async def test_sessions_are_counted_by_status_over_all_tenants(database: Database) -> None:
    """The counts hold what tenants list as sessions: no conversations, and no response chains."""
    process, first, second = SessionProcess(database), new_principal(), new_principal()
    sessions = SessionStore(database, process.clock, retention_s=60.0)
    closed = await process.session(first)
    await process.service.close_session(first, closed.session_id)
    suspended = await process.session(second)
    await process.service.suspend(second, suspended.session_id)
    for principal in (first, second):
        await process.session(principal)
    for kind in (SessionKind.CONVERSATION, SessionKind.RESPONSES):
        await process.service.create(first, NewSession("tiny", kind=kind))

    counts = await sessions.count_by_status()

    assert counts == {SessionStatus.CLOSED: 1, SessionStatus.SUSPENDED: 1, SessionStatus.IDLE: 2}
