"""Stores sessions in the database: create, read, fork, rewind, store tool outputs, close.

Owns every transaction on a session, except the transactions of its running turn. Never starts a turn, and has no rules:
the rules for changes of a session are in AgentSession.
Invariant: a change of the head (the latest checkpoint), the model or the lease raises the session's epoch, a counter. A
turn that was planned with an older epoch is refused.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import Conflict, NotFound, NotPermitted
from graftwork.platform.ids import ItemId, KeyId, SessionId, TurnId
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.quotas.limits import OwnerLimits
from graftwork.platform.tenancy.limit_book import LimitOwner
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.session import (
    AgentSession,
    SessionKind,
    SessionStatus,
    ToolOutput,
    new_outputs,
    new_session_id,
)
from graftwork.sessions.core.transcript import Checkpoint
from graftwork.sessions.store import deletion_rows, histories, session_limits, session_rows, tool_calls, turn_rows
from graftwork.sessions.store.histories import DEFAULT_LIMITS, HistoryLimits
from graftwork.sessions.store.tool_calls import AcceptedOutputs


@dataclass(frozen=True, slots=True)
class SessionChange:
    """The changes that a PATCH request makes to a session. A field that is None changes nothing."""

    model: ResolvedModel | None = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class NewForks:
    """How many forks of a session are made, of which kind, and in the limits of which API key they count."""

    count: int = 1
    kind: SessionKind = SessionKind.SESSION
    key_id: KeyId | None = None


class SessionStore:
    """Stores the sessions of all tenants. Each method is one transaction."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        retention_s: float,
        limits: HistoryLimits = DEFAULT_LIMITS,
    ) -> None:
        """`retention_s` is the time in seconds that a closed session stays readable if it has no time to live of its own.
        `limits` bound what clients add to a history without a response.
        """
        self._database = database
        self._clock = clock
        self._retention_s = retention_s
        self._limits = limits

    async def create(
        self, scope: TenantScope, session: AgentSession, limits: Sequence[OwnerLimits] = (), items: Sequence[Item] = ()
    ) -> AgentSession:
        """Stores a new session whose history is `items`. The session's first turn encodes the items to token ids.

        Raises BudgetSpent if one of the owners of `limits`, or the tenant's organisation, would then have more open
        sessions than it may.
        """

        async def work(database: WriteSession) -> AgentSession:
            await self._insert(database, scope, [session], limits)
            if not items:
                return session
            started = await histories.add_items(database, scope, session, None, items, self._clock.now(), self._limits)
            return await self._update(database, _resting(started))

        return await self._database.write_whole(work)

    async def add_items(self, scope: TenantScope, seen: AgentSession, items: Sequence[Item]) -> None:
        """Adds items to the end of a session's history, which the next turn encodes again.

        Raises Conflict if a turn runs, or if the session has changed since the caller has read it as `seen`. Raises
        PayloadTooLarge if the history would exceed the limits of this store.
        """
        async with self._locked(scope, seen.session_id) as (database, session):
            session.check_at_rest()
            if session.epoch != seen.epoch:
                raise Conflict("The history changed meanwhile: send the items again.", code="session_changed")
            parent = await histories.own_checkpoint(database, scope, session, session.head_id)
            answered = replace(session, epoch=session.epoch + 1, ledger=())
            now = self._clock.now()
            longer = await histories.add_items(database, scope, answered, parent, items, now, self._limits)
            await self._update(database, _resting(longer))

    async def hide_item(self, scope: TenantScope, session_id: str, item_id: str) -> AgentSession:
        """Hides an item from the prompts and lists of a session from now on. A tool call and its output go together.

        The next turn encodes the history again. Histories that share the item keep it. Does nothing if the item is
        hidden already. Raises Conflict while a turn runs, and NotFound.
        """
        async with self._locked(scope, session_id) as (database, session):
            session.check_at_rest()
            shorter = await histories.hide_item(database, scope, session, item_id, self._clock.now())
            return session if shorter is session else await self._update(database, _resting(shorter))

    async def load(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Reads a session. Raises NotFound if no session has this id, or if its time to live has passed."""
        found = await self._database.read_whole(partial(session_rows.find_session, scope=scope, session_id=session_id))
        return self._checked(found, session_id)

    async def list_sessions(self, scope: TenantScope, page: PageRequest) -> Page[AgentSession]:
        """Reads one page of a tenant's sessions. Includes closed sessions whose time to live has not passed."""
        async with self._database.read() as database:
            return await session_rows.list_sessions(database, scope, page, self._clock.now(), self._retention_s)

    async def count_by_status(self) -> Mapping[SessionStatus, int]:
        """Counts the sessions of all tenants by status, for the metrics.

        Leaves out conversations, internal sessions of the Responses API, and expired sessions.
        """
        async with self._database.read() as database:
            return await session_rows.count_by_status(database)

    async def count_open(self, owner: LimitOwner) -> int:
        """Counts the open sessions of an owner of limits: a tenant's, an organisation's, or those that a key or an end
        user has begun.
        """
        async with self._database.read() as database:
            return await session_rows.count_open_sessions(database, owner, self._clock.now())

    async def list_items(self, scope: TenantScope, session: AgentSession, page: PageRequest) -> Page[Item]:
        """Reads one page of the items of a session's history, up to the latest checkpoint."""
        if session.head_id is None:
            return Page((), has_more=False)
        async with self._database.read() as database:
            return await turn_rows.list_items(database, scope, session.head_id, page)

    async def find_items(
        self, scope: TenantScope, item_ids: Sequence[str], check: Callable[[Mapping[ItemId, int]], None]
    ) -> dict[ItemId, Item]:
        """Reads the items of the tenant that have these ids. An id that no item has is missing in the result.

        First calls `check` with the lengths of the items, in characters of JSON. It may raise an error.
        """
        async with self._database.read() as database:
            check(await turn_rows.find_item_sizes(database, scope, item_ids))
            found = await turn_rows.find_items_by_id(database, scope, item_ids)
        return {item.item_id: item for item in found}

    async def find_item(self, scope: TenantScope, session: AgentSession, item_id: str) -> Item | None:
        """Reads one item of a session's history. Returns None if the history has no item with this id."""
        async with self._database.read() as database:
            return await turn_rows.find_item_in(database, scope, session.head_id or "", item_id)

    async def head(self, scope: TenantScope, session: AgentSession) -> Checkpoint | None:
        """Reads the session's head, which is its latest checkpoint. Returns None if the history is empty."""
        if session.head_id is None:
            return None
        async with self._database.read() as database:
            return await turn_rows.find_checkpoint(database, scope, session.head_id)

    async def accept_outputs(
        self, scope: TenantScope, session_id: str, outputs: Sequence[ToolOutput]
    ) -> AcceptedOutputs:
        """Stores those of the tool outputs that are not stored yet. After an error, no output of this call is stored.

        Raises NotFound if the session or a tool call does not exist. Raises Conflict if an output differs from the
        stored one, or if the session cannot take an output now.
        """
        wanted = list(dict.fromkeys(given.call_id for given in outputs))
        async with self._locked(scope, session_id) as (database, session):
            session.check_open()
            calls = await tool_calls.known_calls(database, scope, session, wanted)
            stored = await tool_calls.stored_outputs(database, scope, session, calls, wanted)
            fresh = new_outputs(stored, outputs)
            if fresh:
                session.check_at_rest()
            for given in fresh:
                await tool_calls.save_output(database, scope, session, calls[given.call_id], given, self._clock.now())
            if fresh:
                session = await self._wake(database, scope, session)
        stored |= {given.call_id: given.output for given in fresh}
        turn_ids = [call.turn_id for call in calls.values() if call.turn_id is not None]
        return AcceptedOutputs(
            session=session,
            outputs=tuple(ToolOutput(call_id, stored[call_id] or "") for call_id in wanted),
            concerns_head=any(call.call_id in calls for call in session.ledger),
            turn_id=max(turn_ids, default=None),
        )

    async def fork(
        self,
        scope: TenantScope,
        session_id: str,
        at: str | None,
        forks: NewForks,
        limits: Sequence[OwnerLimits] = (),
    ) -> list[AgentSession]:
        """Creates new sessions that share the history of a session up to one of its checkpoints.

        `at` is the id of this checkpoint; None means the latest one. `limits` are those of `create`.
        Raises Conflict if the session is closed. Can also raise NotFound or BudgetSpent.
        """
        async with self._locked(scope, session_id) as (database, session):
            session.check_open()
            checkpoint = await histories.own_checkpoint(database, scope, session, at or session.head_id)
            children = [self._child(session, checkpoint, forks) for _ in range(forks.count)]
            await self._insert(database, scope, children, limits)
            ledger = await histories.open_ledger(database, scope, checkpoint, children)
        return [_resting(replace(child, ledger=ledger)) for child in children]

    async def rewind(self, scope: TenantScope, session_id: str, to: str) -> AgentSession:
        """Moves a session back to one of its checkpoints. `to` is the id of this checkpoint.

        Raises NotFound, or Conflict if a turn runs or the session is closed.
        """
        async with self._locked(scope, session_id) as (database, session):
            session.check_at_rest()
            checkpoint = await histories.own_checkpoint(database, scope, session, to)
            assert checkpoint is not None
            ledger = await histories.open_ledger(database, scope, checkpoint, [session])
            moved = replace(session, head_id=checkpoint.checkpoint_id, ledger=ledger, epoch=session.epoch + 1)
            return await self._update(database, _resting(moved))

    async def change(self, scope: TenantScope, session_id: str, change: SessionChange) -> AgentSession:
        """Stores the changes that a PATCH request makes to a session.

        Raises Conflict if the session is closed, or if the model is to change while a turn runs. Can also raise
        NotFound.
        """
        async with self._locked(scope, session_id) as (database, session):
            session.check_open()
            if change.metadata is not None:
                session = replace(session, metadata=change.metadata)
            if change.model is not None:
                session.check_at_rest()
                session = replace(session, model=change.model, epoch=session.epoch + 1)
            return await self._update(database, session)

    async def suspend(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Marks a session as suspended until its next turn or tool output.

        Does not move the session's KV: the caller does that. Raises Conflict while a turn runs. Can also raise
        NotFound.
        """
        async with self._locked(scope, session_id) as (database, session):
            session.check_at_rest()
            return await self._update(database, replace(session, status=SessionStatus.SUSPENDED))

    async def close(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Makes a session read-only. Does nothing if the session is already closed.

        Raises Conflict while a turn runs. Can also raise NotFound.
        """
        async with self._locked(scope, session_id) as (database, session):
            if session.status is SessionStatus.CLOSED:
                return session
            session.check_at_rest()
            closed = replace(session, status=SessionStatus.CLOSED, epoch=session.epoch + 1)
            return await self._update(database, replace(closed, closed_at=self._clock.now()))

    async def request_cancel(self, scope: TenantScope, session_id: str, turn_id: TurnId | None = None) -> AgentSession:
        """Asks the process that runs a session's turn to cancel the turn.

        Does nothing if no turn runs. If `turn_id` is given, also does nothing if another turn runs.
        """
        async with self._locked(scope, session_id) as (database, session):
            if session.status is not SessionStatus.RUNNING or turn_id not in (None, session.running_turn_id):
                return session
            return await self._update(database, replace(session, cancel_requested=True))

    async def hide(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Hides a session from clients: they can no longer list it or read it.

        From now on, the session counts as an internal session of the Responses API.
        """
        async with self._locked(scope, session_id) as (database, session):
            return await self._update(database, replace(session, kind=SessionKind.RESPONSES))

    async def remove_unused(self, scope: TenantScope, session_id: SessionId) -> None:
        """Deletes an internal session of the Responses API, if no response and no fork uses the session.

        Then does the same with the session from which the deleted session was forked, and so on.
        Keeps sessions of other kinds, and sessions that run a turn.
        """
        following: SessionId | None = session_id
        while following is not None:
            async with self._database.write() as database:
                following = await self._remove(database, scope, following)

    async def find_unused(self, before: float) -> list[tuple[TenantScope, SessionId]]:
        """Finds internal sessions of the Responses API, of all tenants, that no response and no fork uses any more.

        Leaves out sessions that run a turn, and sessions that were changed at or after `before` (Unix seconds).
        """
        async with self._database.read() as database:
            found = await deletion_rows.find_unused(database, before)
        return [(scope_of_tenant(AdminPrincipal(), tenant_id), session_id) for tenant_id, session_id in found]

    async def _remove(self, database: WriteSession, scope: TenantScope, session_id: SessionId) -> SessionId | None:
        """Deletes an internal session of the Responses API, if nothing uses the session.

        Returns the session from which it was forked.
        Returns None if the session stays, or if it was not forked from another session.
        """
        session = await session_rows.find_state(database, scope, session_id, lock=True)
        if session is None or session.kind is not SessionKind.RESPONSES or session.status is SessionStatus.RUNNING:
            return None
        if await deletion_rows.is_used(database, scope, session_id):
            return None
        await deletion_rows.delete_unused_session(database, scope, session_id)
        return (
            None
            if session.origin_id is None
            else await deletion_rows.find_session_of_checkpoint(database, scope, session.origin_id)
        )

    @asynccontextmanager
    async def _locked(self, scope: TenantScope, session_id: str) -> AsyncGenerator[tuple[WriteSession, AgentSession]]:
        """Opens a transaction that locks the session. Raises NotFound."""
        async with self._database.write() as database:
            session = await session_rows.find_session(database, scope, session_id, lock=True)
            yield database, self._checked(session, session_id)

    async def _update(self, database: WriteSession, session: AgentSession) -> AgentSession:
        updated = replace(session, updated_at=self._clock.now())
        await session_rows.update_session(database, updated)
        return updated

    async def _insert(
        self,
        database: WriteSession,
        scope: TenantScope,
        sessions: Sequence[AgentSession],
        limits: Sequence[OwnerLimits],
    ) -> None:
        if await session_rows.is_deleted_tenant(database, scope):
            raise NotPermitted("This tenant was deleted: it takes no more sessions.", code="tenant_deleted")
        if sessions[0].kind is SessionKind.SESSION:
            await session_limits.check(database, scope, len(sessions), limits, self._clock.now())
        for session in sessions:
            await session_rows.insert_session(database, session)

    def _child(self, parent: AgentSession, checkpoint: Checkpoint | None, forks: NewForks) -> AgentSession:
        now = self._clock.now()
        checkpoint_id = None if checkpoint is None else checkpoint.checkpoint_id
        awaits = checkpoint is not None and checkpoint.awaits_tools
        return AgentSession(
            session_id=new_session_id(forks.kind),
            tenant_id=parent.tenant_id,
            kind=forks.kind,
            key_id=forks.key_id,
            end_user_id=parent.end_user_id,
            status=SessionStatus.AWAITING_TOOL if awaits else SessionStatus.IDLE,
            model=parent.model,
            settings=parent.settings,
            metadata=parent.metadata,
            created_at=now,
            updated_at=now,
            retention_s=parent.retention_s,
            head_id=checkpoint_id,
            origin_id=checkpoint_id,
            forked_from=parent.session_id,
        )

    async def _wake(self, database: WriteSession, scope: TenantScope, session: AgentSession) -> AgentSession:
        """Reads the session's tool calls again, ends a suspension, and returns the stored session."""
        assert session.head_id is not None
        ledger = await session_rows.find_ledger(database, scope, session.session_id, session.head_id)
        return await self._update(database, _resting(replace(session, ledger=ledger)))

    def _checked(self, session: AgentSession | None, session_id: str) -> AgentSession:
        if session is None or self._is_gone(session):
            raise NotFound(f"The session {session_id} does not exist.", code="session_not_found")
        return session

    def _is_gone(self, session: AgentSession) -> bool:
        return session.is_over(self._clock.now(), self._retention_s)


def _resting(session: AgentSession) -> AgentSession:
    return replace(session, status=session.resting_status)
