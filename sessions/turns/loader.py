"""Finds the session for an id that a client sent.

Decides which sessions a client can see. Response chains, and sessions past their time to live, are hidden.
Invariant: a loaded session whose status is running has a process that runs its turn.
"""

from graftwork.platform.clock import Clock
from graftwork.platform.errors import NotFound
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.session import AgentSession, SessionKind
from graftwork.sessions.store.session_store import SessionStore
from graftwork.sessions.store.turn_store import TurnStore
from graftwork.sessions.turns.kv import History
from graftwork.sessions.turns.running import RunningTurns


class SessionLoader:
    """Loads sessions of all tenants."""

    def __init__(self, sessions: SessionStore, turns: TurnStore, running: RunningTurns, clock: Clock) -> None:
        self._sessions = sessions
        self._turns = turns
        self._running = running
        self._clock = clock

    async def load(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Loads a session or conversation. Raises NotFound."""
        session = await self.load_any(scope, session_id)
        if session.kind is SessionKind.RESPONSES:
            raise _unknown_session()
        return session

    async def load_any(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Loads a session of any kind. Raises NotFound.

        Fails its turn first if the lease has expired and the turn does not run here.
        """
        if not may_be_id(session_id):
            raise _unknown_session()
        session = await self._sessions.load(scope, session_id)
        turn_id = session.running_turn_id
        has_expired = session.lease_expires_at is not None and session.lease_expires_at <= self._clock.now()
        if turn_id is None or not has_expired or turn_id in self._running.turn_ids:
            return session
        await self._turns.fail_interrupted(scope, session.session_id, turn_id)
        return await self._sessions.load(scope, session_id)

    async def history(self, scope: TenantScope, session: AgentSession) -> History:
        """Reads the session's token ids up to its head."""
        return History(session, await self._turns.token_ids(scope, session))


def may_be_id(text: str) -> bool:
    """Returns whether `text` could be an id. Other texts may contain characters that PostgreSQL refuses."""
    return text.isascii() and text.isprintable()


def _unknown_session() -> NotFound:
    return NotFound("The session does not exist.", code="session_not_found")
