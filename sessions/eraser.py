"""Erases all sessions of a deleted tenant: conversations, responses, turns, transcripts and events.

    cancel turns ──► mark every session as expired ──► delete events ──► detach forks ──► delete checkpoints and the rest

Owns these transactions, each of a limited size. Never frees KV: the engine forgets the whole tenant at once.
Invariants: no row of a session is deleted while a turn of the tenant runs. After a session is marked as expired, no
turn can begin in it. If a crash interrupts the work, the next call continues it.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

from graftwork.platform.database import Database
from graftwork.platform.errors import NotFound
from graftwork.platform.ids import SessionId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.session import SessionStatus
from graftwork.sessions.store import deletion_rows, session_rows
from graftwork.sessions.store.session_store import SessionStore

_SESSIONS_PER_QUERY = 100
_EVENTS_PER_TRANSACTION = 2_000
_CHECKPOINTS_PER_TRANSACTION = 200


class SessionEraser:
    """Erases the sessions of deleted tenants. Several processes may erase the same tenant at the same time."""

    def __init__(self, database: Database, store: SessionStore, recover: Callable[[], Awaitable[int]]) -> None:
        """`recover` ends the turns whose processes have died, so that these do not look as if they ran."""
        self._database = database
        self._store = store
        self._recover = recover

    async def erase(self, scope: TenantScope) -> bool:
        """Erases as much as it can. Returns whether the tenant has no session left.

        If turns run, asks their processes to cancel them, and deletes nothing before they have ended.
        """
        await self._recover()
        if await self._cancel_or_expire(scope):
            return False
        async for session_id, _ in self._sessions(scope):
            while not await self._delete_some(scope, session_id):
                pass
        return await self.is_done(scope)

    async def is_done(self, scope: TenantScope) -> bool:
        """Returns whether the tenant has no session left."""
        async with self._database.read() as database:
            return not await deletion_rows.find_of_tenant(database, scope, None, limit=1)

    async def _cancel_or_expire(self, scope: TenantScope) -> int:
        """Marks all sessions as expired that run no turn. Returns how many run one."""
        num_running = 0
        async for session_id, status in self._sessions(scope):
            if status is SessionStatus.EXPIRED or await self._expire(scope, session_id):
                continue
            num_running += 1
            with suppress(NotFound):  # it has ended meanwhile
                await self._store.request_cancel(scope, session_id)
        return num_running

    async def _expire(self, scope: TenantScope, session_id: SessionId) -> bool:
        """Marks a session as expired. Returns False and changes nothing if it runs a turn."""
        async with self._database.write() as database:
            session = await session_rows.find_state(database, scope, session_id, lock=True)
            if session is not None and session.status is SessionStatus.RUNNING:
                return False
            await deletion_rows.mark_expired(database, scope, session_id)
        return True

    async def _delete_some(self, scope: TenantScope, session_id: SessionId) -> bool:
        """Deletes rows of an expired session in one transaction. Returns whether the whole session is deleted."""
        async with self._database.write() as database:
            num_events = await deletion_rows.delete_events(database, scope, session_id, _EVENTS_PER_TRANSACTION)
            if num_events == _EVENTS_PER_TRANSACTION:
                return False
            await deletion_rows.detach_forks(database, scope, session_id)
            limit = _CHECKPOINTS_PER_TRANSACTION
            if await deletion_rows.delete_checkpoints(database, scope, session_id, limit) == limit:
                return False
            await deletion_rows.delete_turns(database, scope, session_id)
            await deletion_rows.delete_expired_session(database, scope, session_id)
        return True

    async def _sessions(self, scope: TenantScope) -> AsyncGenerator[tuple[SessionId, SessionStatus]]:
        """Yields all sessions of a tenant with their status, also those that clients cannot see."""
        page, after = None, None
        while page is None or page:
            async with self._database.read() as database:
                page = await deletion_rows.find_of_tenant(database, scope, after, _SESSIONS_PER_QUERY)
            for session_id, status in page:
                yield session_id, status
                after = session_id
