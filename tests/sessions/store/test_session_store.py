"""Sessions in the database."""

from graftwork.platform.database import Database
from graftwork.sessions.core.session import SessionKind, SessionStatus
from graftwork.sessions.service import NewSession
from graftwork.sessions.store.session_store import SessionStore
from tests.sessions.fakes_sessions import World, new_principal


async def test_sessions_are_counted_by_status_over_all_tenants(database: Database) -> None:
    """The counts hold what tenants list as sessions: no conversations, and no response chains."""
    world, first, second = World(database), new_principal(), new_principal()
    sessions = SessionStore(database, world.clock, retention_s=60.0)
    closed = await world.session(first)
    await world.service.close_session(first, closed.session_id)
    suspended = await world.session(second)
    await world.service.suspend(second, suspended.session_id)
    for principal in (first, second):
        await world.session(principal)
    for kind in (SessionKind.CONVERSATION, SessionKind.RESPONSES):
        await world.service.create(first, NewSession("tiny", kind=kind))

    counts = await sessions.count_by_status()

    assert counts == {SessionStatus.CLOSED: 1, SessionStatus.SUSPENDED: 1, SessionStatus.IDLE: 2}
