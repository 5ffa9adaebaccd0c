"""Sessions at rest in the database: made, read, forked, rewound, answered, closed.

Owns the transactions of everything that happens to a session but its running turn.
Never starts a model; the rules are AgentSession's.
Invariant: whatever moves the head, the model or the lease raises the epoch, so that a plan made before is found out.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, ReadSession, WriteSession
from graftwork.platform.errors import BudgetSpent, Conflict, GraftworkError, NotFound
from graftwork.platform.ids import CallId, SessionId, TurnId, new_id
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.seed_history import turn_without_events, unencoded
from graftwork.sessions.core.session import (
    AgentSession,
    LedgerCall,
    SessionKind,
    SessionStatus,
    ToolOutput,
    new_outputs,
)
from graftwork.sessions.core.transcript import Checkpoint
from graftwork.sessions.store import deletion_rows as removal
from graftwork.sessions.store import history_rows as history
from graftwork.sessions.store import session_rows as repository
from graftwork.sessions.store import turn_rows as turn_log
from graftwork.sessions.store.turn_store import ledger_of


@dataclass(frozen=True, slots=True)
class AcceptedOutputs:
    """A session after tool outputs came in."""

    session: AgentSession
    outputs: tuple[ToolOutput, ...]
    """What is stored for the calls that were named, in the order they were named."""
    concerns_head: bool
    """Whether one of them is a call that the head ends in."""
    turn_id: TurnId | None
    """The latest turn that took one of them."""

    @property
    def may_continue(self) -> bool:
        """Whether every call that the head ends in is answered, and no turn runs that took the answers."""
        waits = self.session.status in (SessionStatus.AWAITING_TOOL, SessionStatus.SUSPENDED)
        return waits and self.concerns_head and not self.session.awaited_call_ids


@dataclass(frozen=True, slots=True)
class SessionChange:
    """What a PATCH asks for; None leaves a thing as it is."""

    model: ResolvedModel | None = None
    metadata: Mapping[str, str] | None = None


class SessionStore:
    """Sessions of all tenants; each verb is one transaction."""

    def __init__(self, database: Database, clock: Clock, retention_s: float) -> None:
        """`retention_s`: seconds that a closed session stays readable if it does not say otherwise."""
        self._database = database
        self._clock = clock
        self._retention_s = retention_s

    async def create(
        self, scope: TenantScope, session: AgentSession, max_sessions: int | None, items: Sequence[Item] = ()
    ) -> AgentSession:
        """Store a new session, which begins with these items; the first turn encodes them.

        Raises BudgetSpent if the tenant would then have more than `max_sessions` open.
        """
        first = unencoded(session, items) if items else None
        session = session if first is None else replace(session, head_id=first.checkpoint_id)
        async with self._database.write() as database:
            await self._insert(database, scope, [session], max_sessions)
            if first is not None:
                await turn_log.insert_turn(database, scope, turn_without_events(first, items))
                await history.insert_checkpoint(database, scope, first, items)
        return session

    async def load(self, scope: TenantScope, session_id: str) -> AgentSession:
        """A session as it is now. Raises NotFound."""
        async with self._database.read() as database:
            return self._known(await repository.find_session(database, scope, session_id), session_id)

    async def list_sessions(self, scope: TenantScope, page: PageRequest) -> Page[AgentSession]:
        """One page of a tenant's sessions, closed ones included until their time is up."""
        async with self._database.read() as database:
            return await repository.list_sessions(database, scope, page, self._clock.now(), self._retention_s)

    async def list_items(self, scope: TenantScope, session: AgentSession, page: PageRequest) -> Page[Item]:
        """One page of a session's history, up to its head."""
        if session.head_id is None:
            return Page((), has_more=False)
        async with self._database.read() as database:
            return await history.list_items(database, scope, session.head_id, page)

    async def head(self, scope: TenantScope, session: AgentSession) -> Checkpoint | None:
        """The checkpoint that a session stands at."""
        if session.head_id is None:
            return None
        async with self._database.read() as database:
            return await history.find_checkpoint(database, scope, session.head_id)

    async def accept_outputs(
        self, scope: TenantScope, session_id: str, outputs: Sequence[ToolOutput]
    ) -> AcceptedOutputs:
        """Store the outputs that are new, all of them or none. Raises NotFound, Conflict."""
        wanted = list(dict.fromkeys(given.call_id for given in outputs))
        async with self._locked(scope, session_id) as (database, session):
            session.check_open()
            calls = await self._known_calls(database, scope, session, wanted)
            stored = await self._stored_outputs(database, scope, session, calls, wanted)
            fresh = new_outputs(stored, outputs)
            if fresh:
                session.check_at_rest()
            for given in fresh:
                await self._answer(database, scope, session, calls[given.call_id], given)
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
        count: int,
        max_sessions: int | None,
        kind: SessionKind = SessionKind.SESSION,
    ) -> list[AgentSession]:
        """New sessions that share the history up to `at`, the head by default. Raises NotFound, BudgetSpent."""
        async with self._locked(scope, session_id) as (database, session):
            session.check_open()
            checkpoint = await self._own_checkpoint(database, scope, session, at or session.head_id)
            children = [self._child(session, checkpoint, kind) for _ in range(count)]
            await self._insert(database, scope, children, max_sessions)
            ledger = await self._open_ledger(database, scope, checkpoint, children)
        return [_resting(replace(child, ledger=ledger)) for child in children]

    async def rewind(self, scope: TenantScope, session_id: str, to: str) -> AgentSession:
        """Move the head to a checkpoint of the session's own, forward as well as back. Raises NotFound, Conflict."""
        async with self._locked(scope, session_id) as (database, session):
            session.check_at_rest()
            checkpoint = await self._own_checkpoint(database, scope, session, to)
            assert checkpoint is not None
            ledger = await self._open_ledger(database, scope, checkpoint, [session])
            moved = replace(session, head_id=checkpoint.checkpoint_id, ledger=ledger, epoch=session.epoch + 1)
            return await self._update(database, _resting(moved))

    async def change(self, scope: TenantScope, session_id: str, change: SessionChange) -> AgentSession:
        """Apply a PATCH. Another model needs a session at rest. Raises Conflict."""
        async with self._locked(scope, session_id) as (database, session):
            session.check_open()
            if change.metadata is not None:
                session = replace(session, metadata=change.metadata)
            if change.model is not None:
                session.check_at_rest()
                session = replace(session, model=change.model, epoch=session.epoch + 1)
            return await self._update(database, session)

    async def suspend(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Put a session that is at rest to sleep; its next turn or tool output wakes it. Raises Conflict."""
        async with self._locked(scope, session_id) as (database, session):
            session.check_at_rest()
            return await self._update(database, replace(session, status=SessionStatus.SUSPENDED))

    async def close(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Make a session read-only; nothing happens if it is. Raises Conflict while a turn runs."""
        async with self._locked(scope, session_id) as (database, session):
            if session.status is SessionStatus.CLOSED:
                return session
            session.check_at_rest()
            closed = replace(session, status=SessionStatus.CLOSED, epoch=session.epoch + 1)
            return await self._update(database, replace(closed, closed_at=self._clock.now()))

    async def request_cancel(self, scope: TenantScope, session_id: str, turn_id: TurnId | None = None) -> AgentSession:
        """Ask whichever process runs the session's turn, that one if it is named, to stop it; nothing if none runs."""
        async with self._locked(scope, session_id) as (database, session):
            if session.status is not SessionStatus.RUNNING or turn_id not in (None, session.running_turn_id):
                return session
            return await self._update(database, replace(session, cancel_requested=True))

    async def hide(self, scope: TenantScope, session_id: str) -> AgentSession:
        """Keep a session only for the responses that stand on it."""
        async with self._locked(scope, session_id) as (database, session):
            return await self._update(database, replace(session, kind=SessionKind.RESPONSES))

    async def remove_unused(self, scope: TenantScope, session_id: SessionId) -> None:
        """Take away a chain of responses that nothing stands on, then the one it was forked from, and so on.

        One that is used, that runs, or that is no such chain stays as it is.
        """
        following: SessionId | None = session_id
        while following is not None:
            async with self._database.write() as database:
                following = await self._remove(database, scope, following)

    async def find_unused(self, before: float) -> list[tuple[TenantScope, SessionId]]:
        """Chains of responses of all tenants that nothing stands on, untouched since `before`."""
        async with self._database.read() as database:
            found = await removal.find_unused(database, before)
        return [(scope_of_tenant(AdminPrincipal(), tenant_id), session_id) for tenant_id, session_id in found]

    async def _remove(self, database: WriteSession, scope: TenantScope, session_id: SessionId) -> SessionId | None:
        """Take one away if nothing stands on it; the session that it stood on."""
        session = await repository.find_session(database, scope, session_id, lock=True)
        if session is None or session.kind is not SessionKind.RESPONSES or session.status is SessionStatus.RUNNING:
            return None
        if await removal.is_used(database, scope, session_id):
            return None
        await removal.delete_unused_session(database, scope, session_id)
        return None if session.origin_id is None else await removal.find_maker(database, scope, session.origin_id)

    @asynccontextmanager
    async def _locked(self, scope: TenantScope, session_id: str) -> AsyncGenerator[tuple[WriteSession, AgentSession]]:
        """A transaction in which nobody else can change the session. Raises NotFound."""
        async with self._database.write() as database:
            session = await repository.find_session(database, scope, session_id, lock=True)
            yield database, self._known(session, session_id)

    async def _update(self, database: WriteSession, session: AgentSession) -> AgentSession:
        updated = replace(session, updated_at=self._clock.now())
        await repository.update_session(database, updated)
        return updated

    async def _insert(
        self, database: WriteSession, scope: TenantScope, sessions: Sequence[AgentSession], max_sessions: int | None
    ) -> None:
        if max_sessions is not None:
            await repository.hold_tenant(database, scope)
            num_open = await repository.count_open_sessions(database, scope, self._clock.now())
            if num_open + len(sessions) > max_sessions:
                raise BudgetSpent(
                    f"{num_open} sessions are open and at most {max_sessions} may be: close some first.",
                    code="max_sessions",
                )
        for session in sessions:
            await repository.insert_session(database, session)

    def _child(self, parent: AgentSession, checkpoint: Checkpoint | None, kind: SessionKind) -> AgentSession:
        now = self._clock.now()
        checkpoint_id = None if checkpoint is None else checkpoint.checkpoint_id
        awaits = checkpoint is not None and checkpoint.awaits_tools
        return AgentSession(
            session_id=new_session_id(kind),
            tenant_id=parent.tenant_id,
            kind=kind,
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

    async def _open_ledger(
        self,
        database: WriteSession,
        scope: TenantScope,
        checkpoint: Checkpoint | None,
        sessions: Sequence[AgentSession],
    ) -> tuple[LedgerCall, ...]:
        """Every call at the end of the checkpoint awaited, in each of the sessions."""
        if checkpoint is None or not checkpoint.awaits_tools:
            return ()
        ledger = ledger_of(checkpoint, await history.find_items(database, scope, checkpoint.checkpoint_id))
        for session in sessions:
            await repository.insert_ledger(database, scope, session.session_id, ledger)
        return ledger

    async def _own_checkpoint(
        self, database: ReadSession, scope: TenantScope, session: AgentSession, checkpoint_id: str | None
    ) -> Checkpoint | None:
        """A checkpoint that the session made, or that stands before its fork. Raises NotFound."""
        if checkpoint_id is None:
            return None
        found = await history.find_checkpoint(database, scope, checkpoint_id)
        if found is not None:
            if found.session_id == session.session_id:
                return found
            if session.origin_id and await history.is_in_chain(database, scope, session.origin_id, checkpoint_id):
                return found
        raise NotFound(f"The checkpoint {checkpoint_id} does not exist in this session.", code="checkpoint_not_found")

    async def _known_calls(
        self, database: ReadSession, scope: TenantScope, session: AgentSession, call_ids: Sequence[CallId]
    ) -> dict[CallId, LedgerCall]:
        """Which of those calls stand in the session's ledger, at its head or where it has stood before."""
        earlier = await repository.find_answered_calls(database, scope, session.session_id, call_ids)
        named = (call for call in session.ledger if call.call_id in call_ids)
        return {call.call_id: call for call in [*earlier, *named]}

    async def _stored_outputs(
        self,
        database: ReadSession,
        scope: TenantScope,
        session: AgentSession,
        calls: Mapping[CallId, LedgerCall],
        call_ids: Sequence[CallId],
    ) -> dict[CallId, str | None]:
        """The output of each call, None if it has none yet; those from before a fork too. Raises NotFound, Conflict."""
        stored = {call.call_id: call.output for call in calls.values()}
        if session.origin_id is not None and not stored.keys() >= set(call_ids):
            inherited = await history.find_outputs(database, scope, session.origin_id)
            stored = {item.call_id: item.body["output"] for item in inherited} | stored
        for call_id in call_ids:
            if call_id not in stored:
                raise _unknown_call(session, call_id)
        return stored

    async def _wake(self, database: WriteSession, scope: TenantScope, session: AgentSession) -> AgentSession:
        """The session with its ledger as it is now; answering ends a suspension."""
        assert session.head_id is not None
        ledger = await repository.find_ledger(database, scope, session.session_id, session.head_id)
        return await self._update(database, _resting(replace(session, ledger=ledger)))

    async def _answer(
        self,
        database: WriteSession,
        scope: TenantScope,
        session: AgentSession,
        call: LedgerCall,
        given: ToolOutput,
    ) -> None:
        if call.checkpoint_id != session.head_id:
            raise Conflict(
                f"The session has moved away from the call {call.call_id}: rewind to its checkpoint to answer it.",
                param="outputs",
                code="call_not_awaited",
                details={"call_id": call.call_id, "head": session.head_id},
            )
        await repository.save_output(database, scope, session.session_id, call, given.output, self._clock.now())

    def _known(self, session: AgentSession | None, session_id: str) -> AgentSession:
        if session is None or self._is_gone(session):
            raise NotFound(f"The session {session_id} does not exist.", code="session_not_found")
        return session

    def _is_gone(self, session: AgentSession) -> bool:
        return session.is_over(self._clock.now(), self._retention_s)


def _unknown_call(session: AgentSession, call_id: CallId) -> GraftworkError:
    """Why there is nothing that such an output could answer."""
    if not session.ledger:
        return Conflict(
            f"The session awaits no tool output, and made no call {call_id}: read its items to see where it stands.",
            param="outputs",
            code="awaits_no_tool",
            details={"head": session.head_id},
        )
    return NotFound(f"The session made no call {call_id}.", param="outputs", code="call_not_found")


_ID_PREFIXES = {SessionKind.SESSION: "ses", SessionKind.RESPONSES: "chain", SessionKind.CONVERSATION: "conv"}


def new_session_id(kind: SessionKind) -> SessionId:
    """A new id, which tells what it is of."""
    return SessionId(new_id(_ID_PREFIXES[kind]))


def _resting(session: AgentSession) -> AgentSession:
    return replace(session, status=session.resting_status)
