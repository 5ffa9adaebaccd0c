"""Finding a session by the id that a client knows it by, as it is now.

Owns what of a session can be seen: a chain of responses only from within, and never a turn that nobody runs any more.
"""

from graftwork.platform.clock import Clock
from graftwork.platform.errors import NotFound
from graftwork.platform.ids import SessionId
from graftwork.platform.tenancy.principals import Principal, TenantScope
from graftwork.sessions.core.session import AgentSession, SessionKind, SessionStatus
from graftwork.sessions.store.session_store import SessionStore
from graftwork.sessions.store.turn_store import TurnStore
from graftwork.sessions.turns.kv import History
from graftwork.sessions.turns.launcher import TurnLauncher


class SessionAccess:
    """Sessions of all tenants, for the verbs."""

    def __init__(self, sessions: SessionStore, turns: TurnStore, launcher: TurnLauncher, clock: Clock) -> None:
        self._sessions = sessions
        self._turns = turns
        self._launcher = launcher
        self._clock = clock

    async def load(self, scope: TenantScope, session_id: str) -> AgentSession:
        """What clients know as a session, or as a conversation. Raises NotFound."""
        session = await self.load_any(scope, session_id)
        if session.kind is SessionKind.RESPONSES:
            raise _unknown_session()
        return session

    async def load_any(self, scope: TenantScope, session_id: str) -> AgentSession:
        """The same, of chains of responses too; a turn that nobody runs any more is ended first. Raises NotFound."""
        if not may_be_id(session_id):
            raise _unknown_session()
        session = await self._sessions.load(scope, session_id)
        turn_id = session.running_turn_id
        has_expired = session.lease_expires_at is not None and session.lease_expires_at <= self._clock.now()
        if turn_id is None or not has_expired or turn_id in self._launcher.turn_ids:
            return session
        await self._turns.fail_interrupted(scope, session.session_id, turn_id)
        return await self._sessions.load(scope, session_id)

    async def is_running(self, scope: TenantScope, session_id: SessionId) -> bool:
        return (await self.load_any(scope, session_id)).status is SessionStatus.RUNNING

    async def history(self, principal: Principal, session: AgentSession) -> History:
        """The tokens up to the head."""
        return History(session, await self._turns.token_ids(principal.scope(), session))


def may_be_id(text: str) -> bool:
    """PostgreSQL cannot even be asked about some characters, and no id has them."""
    return text.isascii() and text.isprintable()


def _unknown_session() -> NotFound:
    return NotFound("The session does not exist.", code="session_not_found")
