"""A turn's life in the database: begun, written to, ended once.

Owns the transactions of a running turn, and what is left behind by one that nobody runs any more.
Never starts a model.
Invariant: the head moves in the very transaction that ends a turn well; every other end leaves it where it was.
Whoever writes shows a lease, and a lease that is no longer the session's writes nothing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import CapacityAbsent, Conflict, GraftworkError
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant
from graftwork.sessions.core.events import EventDraft, EventType, SessionEvent, number_events, turn_created
from graftwork.sessions.core.items import Item, ItemType
from graftwork.sessions.core.lease import LeaseLost, SessionLease
from graftwork.sessions.core.session import AgentSession, LedgerCall, SessionStatus, Turn, TurnStatus
from graftwork.sessions.core.transcript import EMPTY_TRANSCRIPT, Checkpoint, Opening, Transcript, join_chain
from graftwork.sessions.store import history_rows as history
from graftwork.sessions.store import session_rows as repository
from graftwork.sessions.store import turn_rows as turn_log

NO_DEADLINES: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """How a turn ended. `drafts` are its events not stored yet, the terminal one last."""

    status: TurnStatus
    drafts: Sequence[EventDraft]
    checkpoint: Checkpoint | None = None
    """Where the head goes; None leaves it."""
    items: Sequence[Item] = ()
    """What the checkpoint adds: the turn's input, then the answer."""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    cache: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    deadlines: Mapping[str, float] = field(default_factory=dict)
    """When the output of a tool is expected, by the tool's name."""


def ledger_of(
    checkpoint: Checkpoint, items: Sequence[Item], deadlines: Mapping[str, float] = NO_DEADLINES
) -> tuple[LedgerCall, ...]:
    """The unanswered calls at the end of a checkpoint; `deadlines` by the tools' names."""
    calls = [item for item in items if item.type is ItemType.FUNCTION_CALL]
    if not checkpoint.awaits_tools:
        return ()
    return tuple(
        LedgerCall(
            checkpoint_id=checkpoint.checkpoint_id,
            position=position,
            call_id=call.call_id,
            name=call.body["name"],
            arguments=call.body["arguments"],
            deadline_at=deadlines.get(call.body["name"]),
        )
        for position, call in enumerate(calls)
    )


class TurnStore:
    """Turns and events of all tenants; each verb is one transaction."""

    def __init__(self, database: Database, clock: Clock, owner: str, lease_s: float) -> None:
        """`owner` names this process among those that share the database; it must not change over a restart
        for what the restart cut off to be found at once, rather than when the lease runs out."""
        self._database = database
        self._clock = clock
        self._owner = owner
        self._lease_s = lease_s

    async def transcript(self, scope: TenantScope, session: AgentSession, opening: Opening) -> Transcript:
        """The history that a session's next turn continues, behind `opening`."""
        if session.head_id is None:
            return replace(EMPTY_TRANSCRIPT, opening=opening.digest)
        async with self._database.read() as database:
            chain = await history.find_chain(database, scope, session.head_id)
            head = chain[-1]
            if head.opening in (None, opening.digest):
                head_items = await history.find_items(database, scope, session.head_id)
                return Transcript(join_chain(chain), head, head_items, head.opening)
            all_items = await history.find_all_items(database, scope, session.head_id)
        return Transcript((), head, all_items, opening.digest, is_anew=True)

    async def token_ids(self, scope: TenantScope, session: AgentSession) -> tuple[int, ...]:
        """What stands up to the session's head."""
        if session.head_id is None:
            return ()
        async with self._database.read() as database:
            return join_chain(await history.find_chain(database, scope, session.head_id))

    async def begin(
        self,
        scope: TenantScope,
        seen: AgentSession,
        turn_id: TurnId,
        new_items: Sequence[Item],
        made_with: Mapping[str, Any] | None = None,
    ) -> tuple[SessionLease, Turn]:
        """Start a turn on a session that still is as it was `seen`. Raises Conflict if it is not."""
        now = self._clock.now()
        async with self._database.write() as database:
            session = await repository.find_session(database, scope, seen.session_id, lock=True)
            if session is None or session.epoch != seen.epoch:
                raise Conflict(
                    "The session changed while the turn was made ready: read it, and send the turn again.",
                    code="session_changed",
                    details={"head": None if session is None else session.head_id},
                )
            turn = Turn(
                turn_id=turn_id,
                session_id=session.session_id,
                status=TurnStatus.RUNNING,
                parent_id=session.head_id,
                first_seq=session.last_seq + 1,
                input=tuple(new_items),
                created_at=now,
                made_with=made_with,
            )
            running = replace(
                session,
                status=SessionStatus.RUNNING,
                epoch=session.epoch + 1,
                running_turn_id=turn_id,
                lease_owner=self._owner,
                lease_expires_at=now + self._lease_s,
                cancel_requested=False,
                model=seen.model,
                updated_at=now,
            )
            await repository.update_session(database, running)
            await turn_log.insert_turn(database, scope, turn)
            await repository.mark_taken(database, scope, session.session_id, session.ledger, turn_id)
        return SessionLease(session.session_id, scope, turn_id, self._owner, running.epoch), turn

    async def append_events(
        self, lease: SessionLease, drafts: Sequence[EventDraft]
    ) -> tuple[tuple[SessionEvent, ...], bool]:
        """Store events under the next numbers, and renew the lease; True if a cancel is asked for. Raises LeaseLost."""
        now = self._clock.now()
        async with self._database.write() as database:
            extended = await repository.extend_lease(database, lease, now + self._lease_s, len(drafts))
            if extended is None:
                raise LeaseLost(lease.session_id)
            events = number_events(drafts, lease.session_id, lease.turn_id, extended[0])
            await turn_log.insert_events(database, lease.scope, events, now)
        return events, extended[1]

    async def renew(self, lease: SessionLease) -> bool:
        """Renew the lease; True if a cancel is asked for. Raises LeaseLost."""
        async with self._database.write() as database:
            extended = await repository.extend_lease(database, lease, self._clock.now() + self._lease_s)
        if extended is None:
            raise LeaseLost(lease.session_id)
        return extended[1]

    async def end(self, lease: SessionLease, outcome: TurnOutcome) -> tuple[SessionEvent, ...]:
        """Store how the turn ended, and its last events. Raises LeaseLost."""
        async with self._database.write() as database:
            session = await repository.find_session(database, lease.scope, lease.session_id, lock=True)
            if session is None or session.epoch != lease.epoch or session.running_turn_id != lease.turn_id:
                raise LeaseLost(lease.session_id)
            return await self._end(database, lease.scope, session, lease.turn_id, outcome)

    async def find_interrupted(
        self, running_here: Callable[[], Collection[TurnId]]
    ) -> list[tuple[TenantScope, SessionId, TurnId]]:
        """Turns that are marked as running, but by nobody.

        `running_here` is asked after the look, so that a turn which began meanwhile is known to be alive.
        """
        async with self._database.read() as database:
            found = await repository.find_interrupted(database, self._owner, self._clock.now())
        alive = running_here()
        return [
            (scope_of_tenant(AdminPrincipal(), tenant_id), session_id, turn_id)
            for tenant_id, session_id, turn_id in found
            if turn_id not in alive
        ]

    async def fail_interrupted(self, scope: TenantScope, session_id: SessionId, turn_id: TurnId) -> None:
        """End a turn that nobody runs any more; nothing happens if somebody has ended it since."""
        error = interrupted_error()
        outcome = TurnOutcome(TurnStatus.FAILED, [failure_event(error)], error=error.body()["error"])
        async with self._database.write() as database:
            session = await repository.find_session(database, scope, session_id, lock=True)
            if session is None or session.running_turn_id != turn_id or not self._is_abandoned(session):
                return
            await self._end(database, scope, replace(session, epoch=session.epoch + 1), turn_id, outcome)

    async def find_turn(self, scope: TenantScope, turn_id: TurnId) -> Turn | None:
        """A turn with its output."""
        async with self._database.read() as database:
            turn = await turn_log.find_turn(database, scope, turn_id)
            if turn is None or turn.checkpoint_id is None:
                return turn
            items = await history.find_items(database, scope, turn.checkpoint_id)
        return replace(turn, output=items[len(turn.input) :])

    async def list_events(
        self, scope: TenantScope, session_id: SessionId, after: int, limit: int
    ) -> tuple[SessionEvent, ...]:
        """Stored events behind number `after`."""
        async with self._database.read() as database:
            return await turn_log.list_events(database, scope, session_id, after, limit)

    def _is_abandoned(self, session: AgentSession) -> bool:
        expired = session.lease_expires_at is None or session.lease_expires_at <= self._clock.now()
        return expired or session.lease_owner == self._owner

    async def _end(
        self,
        database: WriteSession,
        scope: TenantScope,
        session: AgentSession,
        turn_id: TurnId,
        outcome: TurnOutcome,
    ) -> tuple[SessionEvent, ...]:
        now = self._clock.now()
        turn = await turn_log.find_turn(database, scope, turn_id)
        assert turn is not None
        if outcome.checkpoint is not None:
            await history.insert_checkpoint(database, scope, outcome.checkpoint, outcome.items)
            ledger = ledger_of(outcome.checkpoint, outcome.items, outcome.deadlines)
            await repository.insert_ledger(database, scope, session.session_id, ledger)
            session = replace(session, head_id=outcome.checkpoint.checkpoint_id, ledger=ledger)
        drafts = list(outcome.drafts)
        if session.last_seq < turn.first_seq and drafts[0].type is not EventType.TURN_CREATED:
            drafts.insert(0, turn_created(None))
        last_seq = session.last_seq + len(drafts)
        events = number_events(drafts, session.session_id, turn_id, last_seq)
        await turn_log.insert_events(database, scope, events, now)
        await turn_log.update_turn(database, scope, _ended(turn, outcome, now))
        await repository.update_session(database, _at_rest(session, outcome, last_seq, now))
        return events


def _ended(turn: Turn, outcome: TurnOutcome, now: float) -> Turn:
    return replace(
        turn,
        status=outcome.status,
        checkpoint_id=None if outcome.checkpoint is None else outcome.checkpoint.checkpoint_id,
        finish_reason=outcome.finish_reason,
        usage=outcome.usage,
        cache=outcome.cache,
        error=outcome.error,
        finished_at=now,
    )


def _at_rest(session: AgentSession, outcome: TurnOutcome, last_seq: int, now: float) -> AgentSession:
    return replace(
        session,
        status=session.resting_status,
        running_turn_id=None,
        lease_owner=None,
        lease_expires_at=None,
        cancel_requested=False,
        last_seq=last_seq,
        last_cache=session.last_cache if outcome.cache is None else outcome.cache,
        updated_at=now,
    )


def failure_event(error: GraftworkError) -> EventDraft:
    """The terminal event of a turn that failed."""
    return EventDraft(EventType.TURN_FAILED, {"error": error.body()["error"]})


def interrupted_error() -> CapacityAbsent:
    """What befell a turn whose process went away."""
    return CapacityAbsent(
        "The turn was cut off because the server that ran it stopped; the session stands where it stood before: "
        "send the turn, or the tool outputs, again.",
        code="turn_interrupted",
        retry_after_s=0.0,
    )
