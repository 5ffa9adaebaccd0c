"""Deletes sessions whose time to live has passed, and those that are older than their tenant wants.

    mark as expired ──► delete events ──► delete checkpoints, items and turns ──► delete the session's row
    (no client can read it)               (not checkpoints that forks share)      (once no checkpoint is left)

Owns these transactions, each of a limited size, and frees the KV. AgentSession decides whether a session's time has
passed. Never changes a session that runs a turn. Rows that a session shares with its forks stay until the last fork is
deleted.
Invariant: if a crash interrupts a sweep, the next sweep continues it.
"""

import logging
from collections.abc import Awaitable, Callable

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import InternalFailure
from graftwork.platform.ids import SessionId
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.sessions.core.session import AgentSession, SessionKind, SessionStatus
from graftwork.sessions.core.transcript import join_chain
from graftwork.sessions.store import deletion_rows, session_rows
from graftwork.sessions.store.turn_rows import find_chain
from graftwork.sessions.turns.kv import History, SessionKvClient

_log = logging.getLogger("graftwork.sessions")

_SESSIONS_PER_QUERY = 100
_EVENTS_PER_TRANSACTION = 2_000
_CHECKPOINTS_PER_TRANSACTION = 200

DeleteSome = Callable[[WriteSession, TenantScope, SessionId, int], Awaitable[int]]


class SessionSweeper:
    """Deletes the sessions whose time to live has passed, for all tenants.

    Several processes may sweep the same database at the same time.
    """

    def __init__(self, database: Database, clock: Clock, kv: SessionKvClient, retention_s: float) -> None:
        """Makes the sweeper.

        `retention_s` is the time in seconds that a closed session stays readable if it has no time to live of its own.
        """
        self._database = database
        self._clock = clock
        self._kv = kv
        self._retention_s = retention_s

    async def sweep(self) -> int:
        """Deletes the sessions whose time to live has passed. Returns how many of them are completely deleted.

        A session with forks can only be deleted completely after its last fork. So this method searches again after
        each round that deleted a session.
        """
        num_deleted = 0
        while num_more := await self._round():
            num_deleted += num_more
        if num_deleted:
            _log.info("%d sessions were over and are deleted", num_deleted)
        return num_deleted

    async def delete_unchanged(self, scope: TenantScope, kind: SessionKind, before: float) -> int:
        """Deletes the sessions of a tenant, of one kind, that were last changed before a time in Unix seconds.

        Leaves out sessions that run a turn. Returns how many it has deleted or, if forks share their rows, hidden.
        """
        num_deleted, after = 0, None
        while True:
            async with self._database.read() as database:
                found = await deletion_rows.find_unchanged(
                    database, scope, kind, before, after=after, limit=_SESSIONS_PER_QUERY
                )
            for session_id in found:
                if await self._expire(scope, session_id, lambda session: session.updated_at < before):
                    await self._delete_rows(scope, session_id)
                    num_deleted += 1
            if len(found) < _SESSIONS_PER_QUERY:
                return num_deleted
            after = found[-1]

    async def _round(self) -> int:
        num_deleted, before = 0, None
        while found := await self._find(before):
            for scope, session_id in found:
                num_deleted += await self._remove(scope, session_id)
            before = found[-1][1]
        return num_deleted

    async def _find(self, before: SessionId | None) -> list[tuple[TenantScope, SessionId]]:
        async with self._database.read() as database:
            found = await deletion_rows.find_expired(
                database, self._clock.now(), self._retention_s, before, _SESSIONS_PER_QUERY
            )
        return [(scope_of_tenant(AdminPrincipal(), tenant_id), session_id) for tenant_id, session_id in found]

    async def _remove(self, scope: TenantScope, session_id: SessionId) -> bool:
        def is_over(session: AgentSession) -> bool:
            return session.is_over(self._clock.now(), self._retention_s)

        return await self._expire(scope, session_id, is_over) and await self._delete_rows(scope, session_id)

    async def _delete_rows(self, scope: TenantScope, session_id: SessionId) -> bool:
        """Deletes the rows of an expired session that no fork needs. Returns whether nothing is left of it."""
        await self._delete_all(deletion_rows.delete_events, scope, session_id, _EVENTS_PER_TRANSACTION)
        await self._delete_all(deletion_rows.delete_checkpoints, scope, session_id, _CHECKPOINTS_PER_TRANSACTION)
        async with self._database.write() as database:
            await deletion_rows.delete_turns(database, scope, session_id)
            return await deletion_rows.delete_expired_session(database, scope, session_id)

    async def _expire(self, scope: TenantScope, session_id: SessionId, is_due: Callable[[AgentSession], bool]) -> bool:
        """Marks the session as expired and frees its KV. Returns whether the session is expired now.

        Does not change a session that runs a turn, or that was used since the search, so that it is not due any more.
        """
        async with self._database.write() as database:
            session = await session_rows.find_state(database, scope, session_id, lock=True)
            if session is None or session.status is SessionStatus.RUNNING or not is_due(session):
                return False
            if session.status is SessionStatus.EXPIRED:
                return True
            token_ids = await _readable_tokens(database, scope, session)
            await deletion_rows.mark_expired(database, scope, session_id)
        await self._kv.close(History(session, token_ids))
        return True

    async def _delete_all(self, delete: DeleteSome, scope: TenantScope, session_id: SessionId, limit: int) -> None:
        num_rows = limit
        while num_rows:
            async with self._database.write() as database:
                num_rows = await delete(database, scope, session_id, limit)


async def _readable_tokens(database: WriteSession, scope: TenantScope, session: AgentSession) -> tuple[int, ...]:
    """Returns the token ids of a session's history; none if they cannot be decrypted, for that must not keep its rows."""
    if session.head_id is None:
        return ()
    try:
        return join_chain(await find_chain(database, scope, session.head_id))
    except InternalFailure as error:
        _log.error("session_deleted_unread", extra={"session_id": session.session_id, "reason": error.message})
        return ()
