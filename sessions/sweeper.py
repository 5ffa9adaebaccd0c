"""Removes sessions whose time is over, with everything that hangs on them.

    over ── marked expired: nobody can read, wake or fork it ── events go ── checkpoints, items, turns go ── row goes
                                                                             └ but for those that forks stand on

Owns the transactions of removal, each bounded, and has the engine give up the KV; the rule of when a session is over is AgentSession's.
Never touches a session that runs, and never anything that a session still there stands on: that goes with its last
fork.
Invariant: whatever a crash leaves between two transactions is found by the next round.
"""

import logging
from collections.abc import Awaitable, Callable

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.ids import SessionId
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.sessions.core.session import SessionStatus
from graftwork.sessions.core.transcript import join_chain
from graftwork.sessions.store import deletion_rows, session_rows
from graftwork.sessions.store.history_rows import find_chain
from graftwork.sessions.turns.kv import History, SessionKv

_log = logging.getLogger("graftwork.sessions")

_SESSIONS_A_LOOK = 100
_EVENTS_A_TRANSACTION = 2_000
_CHECKPOINTS_A_TRANSACTION = 200

DeleteSome = Callable[[WriteSession, TenantScope, SessionId, int], Awaitable[int]]


class SessionSweeper:
    """Sweeps the sessions of all tenants; several gateways may sweep one database at once."""

    def __init__(self, database: Database, clock: Clock, kv: SessionKv, retention_s: float) -> None:
        """`retention_s` is the SessionStore's: how long a closed session stays if it does not say otherwise."""
        self._database = database
        self._clock = clock
        self._kv = kv
        self._retention_s = retention_s

    async def sweep(self) -> int:
        """Remove all that is over by now; how many sessions are gone without a trace.

        Rounds follow while they bring something: the last fork that goes may be all that something else waited for.
        """
        num_gone = 0
        while num_more := await self._round():
            num_gone += num_more
        if num_gone:
            _log.info("%d sessions were over and are gone", num_gone)
        return num_gone

    async def _round(self) -> int:
        num_gone, before = 0, None
        while found := await self._find(before):
            for scope, session_id in found:
                num_gone += await self._remove(scope, session_id)
            before = found[-1][1]
        return num_gone

    async def _find(self, before: SessionId | None) -> list[tuple[TenantScope, SessionId]]:
        async with self._database.read() as database:
            found = await deletion_rows.find_expired(
                database, self._clock.now(), self._retention_s, before, _SESSIONS_A_LOOK
            )
        return [(scope_of_tenant(AdminPrincipal(), tenant_id), session_id) for tenant_id, session_id in found]

    async def _remove(self, scope: TenantScope, session_id: SessionId) -> bool:
        if not await self._expire(scope, session_id):
            return False
        await self._delete_all(deletion_rows.delete_events, scope, session_id, _EVENTS_A_TRANSACTION)
        await self._delete_all(deletion_rows.delete_checkpoints, scope, session_id, _CHECKPOINTS_A_TRANSACTION)
        async with self._database.write() as database:
            await deletion_rows.delete_turns(database, scope, session_id)
            return await deletion_rows.delete_expired_session(database, scope, session_id)

    async def _expire(self, scope: TenantScope, session_id: SessionId) -> bool:
        """Whether the session is expired now; one that was woken since it was found stays as it is."""
        async with self._database.write() as database:
            session = await session_rows.find_session(database, scope, session_id, lock=True)
            if session is None or not session.is_over(self._clock.now(), self._retention_s):
                return False
            if session.status is SessionStatus.EXPIRED:
                return True
            chain = () if session.head_id is None else await find_chain(database, scope, session.head_id)
            await deletion_rows.mark_expired(database, scope, session_id)
        await self._kv.close(History(session, join_chain(chain)))
        return True

    async def _delete_all(self, delete: DeleteSome, scope: TenantScope, session_id: SessionId, limit: int) -> None:
        num_deleted = limit
        while num_deleted:
            async with self._database.write() as database:
                num_deleted = await delete(database, scope, session_id, limit)
