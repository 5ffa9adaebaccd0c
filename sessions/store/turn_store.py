"""Stores turns in the database: begins them, appends their events, and ends each of them once.

Owns the transactions of a running turn, and of a turn whose process has stopped. Never calls the engine.
Invariant: the transaction that completes a turn also moves the session's head to the turn's checkpoint. A turn that
fails or is cancelled does not move the head. A process must hold the session's lease to write its turn.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graftwork.engine.core.events import CacheReport, DraftReport
from graftwork.platform.answers.usage import Money
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, ReadSession, WriteSession
from graftwork.platform.errors import Conflict
from graftwork.platform.ids import KeyId, RequestId, SessionId, TurnId
from graftwork.platform.ledger.repository import add_usage
from graftwork.platform.ledger.usage import UsageEvent, UsageOutcome
from graftwork.platform.prices.price_list import PriceBook
from graftwork.platform.tenancy.idempotency import TurnClaim
from graftwork.platform.tenancy.key_rows import find_key
from graftwork.platform.tenancy.organisation_rows import organisation_of
from graftwork.platform.tenancy.principals import AdminPrincipal, Principal, TenantScope, scope_of_tenant
from graftwork.sessions.core.events import EventType, SessionEvent, number_events, turn_created
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.lease import LeaseLost, SessionLease
from graftwork.sessions.core.session import AgentSession, SessionStatus, Turn, TurnStatus
from graftwork.sessions.core.transcript import EMPTY_TRANSCRIPT, Opening, Transcript, join_chain
from graftwork.sessions.core.views import turn_usage_body, usage_body
from graftwork.sessions.store import lease_rows, session_rows, turn_rows
from graftwork.sessions.store.event_log import EventBatch
from graftwork.sessions.store.turn_outcome import (
    TurnOutcome,
    at_rest,
    ended,
    failure_event,
    interrupted_error,
    ledger_of,
)
from graftwork.sessions.store.turn_rows import Delivered


class TurnStore:
    """Stores the turns and events of all tenants. Each method is one transaction."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        owner: str,
        lease_s: float,
        lease_clock: Clock | None = None,
        book: PriceBook | None = None,
    ) -> None:
        """`book` has the prices of turns whose process has stopped; None if they have none. `owner` names this process, and `lease_s` is the length of a lease in seconds. Leases are measured by the
        database's own time, so the clocks of gateways do not matter; in tests, `lease_clock` replaces it.

        If the process has the same name after a restart, its interrupted turns are found at once. Otherwise they are
        found when their leases expire.
        """
        self._database = database
        self._clock = clock
        self._owner = owner
        self._lease_s = lease_s
        self._lease_clock = lease_clock
        self._book = book or PriceBook()

    async def transcript(self, scope: TenantScope, session: AgentSession, opening: Opening) -> Transcript:
        """Reads the history that the next turn of a session continues.

        `opening` has the instructions and tools of the next prompt. If they have changed since the last turn, the
        result has the items of the whole history, so that the whole history can be encoded again.
        """
        if session.head_id is None:
            return replace(EMPTY_TRANSCRIPT, opening=opening.digest)
        head_id = session.head_id

        async def work(database: ReadSession) -> Transcript:
            chain = await turn_rows.find_chain(database, scope, head_id)
            head = chain[-1]
            if head.opening in (None, opening.digest):
                head_items = await turn_rows.find_items(database, scope, head_id)
                return Transcript(join_chain(chain), head, head_items, head.opening)
            all_items = await turn_rows.find_all_items(database, scope, head_id)
            return Transcript((), head, all_items, opening.digest, must_encode_all=True)

        return await self._database.read_whole(work)

    async def whole_transcript(self, scope: TenantScope, session: AgentSession, opening: str) -> Transcript:
        """Reads the items of a session's whole history, to be encoded again.

        `opening` is what the next checkpoint stores as its opening.
        """
        if session.head_id is None:
            return replace(EMPTY_TRANSCRIPT, opening=opening)
        async with self._database.read() as database:
            head = await turn_rows.find_checkpoint(database, scope, session.head_id)
            items = await turn_rows.find_all_items(database, scope, session.head_id)
        return Transcript((), head, items, opening, must_encode_all=True)

    async def token_ids(self, scope: TenantScope, session: AgentSession) -> tuple[int, ...]:
        """Reads the token ids of a session's history, up to its head (its latest checkpoint)."""
        if session.head_id is None:
            return ()
        async with self._database.read() as database:
            return join_chain(await turn_rows.find_chain(database, scope, session.head_id))

    async def begin(
        self,
        principal: Principal,
        seen: AgentSession,
        turn_id: TurnId,
        new_items: Sequence[Item],
        made_with: Mapping[str, Any] | None = None,
    ) -> tuple[SessionLease, Turn]:
        """Stores a new turn of a session as running, and gives this process the lease of the session.

        `seen` is the session as the caller has read it. `made_with` describes how the answer is made: the sampling, and
        the digests of the model's files. The turn becomes the answer to the request's idempotency key.
        Raises Conflict if the session has changed since the caller has read it, or if another request has the key now.
        """
        now, scope = self._clock.now(), principal.scope()

        async def work(database: WriteSession) -> tuple[SessionLease, Turn]:
            session = await session_rows.find_session(database, scope, seen.session_id, lock=True)
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
                key_id=principal.key_id,
            )
            running = replace(
                session,
                status=SessionStatus.RUNNING,
                epoch=session.epoch + 1,
                running_turn_id=turn_id,
                lease_owner=self._owner,
                cancel_requested=False,
                model=seen.model,
                updated_at=now,
            )
            await session_rows.update_session(database, running)
            lease = SessionLease(session.session_id, scope, turn_id, self._owner, running.epoch)
            await lease_rows.extend_leases(database, [lease], self._lease_s, self._lease_clock)
            await turn_rows.insert_turn(database, scope, turn)
            if principal.turn_claim is not None:
                await principal.turn_claim.record_turn(database, session.session_id, turn_id)
            await session_rows.note_turn_of_outputs(database, scope, session.session_id, session.ledger, turn_id)
            return lease, turn

        return await self._database.write_whole(work)

    async def append(self, batches: Sequence[EventBatch]) -> Sequence[bool | None]:
        """Stores events of many turns, and renews the turns' leases. Storing the same batch again changes nothing.

        Returns, for each batch, whether a client has asked to cancel the turn. If the lease of a turn is lost, stores
        none of its events and returns None for its batch.
        """
        now = self._clock.now()
        leases = [batch.lease for batch in batches]
        last_seqs = [batch.events[-1].seq for batch in batches]

        async def work(database: WriteSession) -> dict[SessionId, bool]:
            held = await lease_rows.extend_leases(database, leases, self._lease_s, self._lease_clock, last_seqs)
            kept = [batch for batch in batches if batch.lease.session_id in held]
            if kept:
                events = [(batch.lease.scope, event) for batch in kept for event in batch.events]
                await turn_rows.insert_events(database, events, now)
            return held

        held = await self._database.write_whole(work)
        return [held.get(lease.session_id) for lease in leases]

    async def renew(self, lease: SessionLease) -> bool:
        """Renews the lease of a turn. Returns whether a client has asked to cancel the turn.

        Raises LeaseLost if another process has taken over the session.
        """
        held = await self._database.write_whole(
            lambda database: lease_rows.extend_leases(database, [lease], self._lease_s, self._lease_clock)
        )
        if lease.session_id not in held:
            raise LeaseLost(lease.session_id)
        return held[lease.session_id]

    async def end(
        self,
        lease: SessionLease,
        outcome: TurnOutcome,
        usage_row: UsageEvent | None = None,
        claim: TurnClaim | None = None,
    ) -> tuple[SessionEvent, ...]:
        """Stores how a turn ended, with its usage row. Returns the last events of the turn, with their numbers.

        `claim` is that of the turn's request. If the request is a line of a batch, the row is kept with the claim.
        Raises LeaseLost if another process has taken over the session.
        """

        async def work(database: WriteSession) -> tuple[SessionEvent, ...]:
            session = await session_rows.find_session(database, lease.scope, lease.session_id, lock=True)
            if session is None or session.epoch != lease.epoch or session.running_turn_id != lease.turn_id:
                raise LeaseLost(lease.session_id)
            if usage_row is not None and claim is not None and claim.line is not None:
                await claim.keep_usage(database, lease.turn_id, usage_row)
            elif usage_row is not None:
                await add_usage(database, usage_row)
            return await self._end(database, lease.scope, session, lease.turn_id, outcome)

        return await self._database.write_whole(work)

    async def find_interrupted(
        self, running_here: Callable[[], Collection[TurnId]]
    ) -> list[tuple[TenantScope, SessionId, TurnId]]:
        """Finds turns of all tenants that are marked as running, but that no process runs any more.

        `running_here` is a function that returns the ids of the turns of this process. It is called after the search,
        so that its result includes a turn that began during the search.
        """
        async with self._database.read() as database:
            found = await lease_rows.find_interrupted(database, self._owner, self._lease_clock)
        alive = running_here()
        return [
            (scope_of_tenant(AdminPrincipal(), tenant_id), session_id, turn_id)
            for tenant_id, session_id, turn_id in found
            if turn_id not in alive
        ]

    async def has_expired(self, scope: TenantScope, session_id: SessionId) -> bool:
        """Returns whether no process has a valid lease of the session."""
        async with self._database.read() as database:
            return await lease_rows.has_expired(database, scope, session_id, self._lease_clock)

    async def fail_interrupted(self, scope: TenantScope, session_id: SessionId, turn_id: TurnId) -> None:
        """Ends a turn as failed, because the process that ran it has stopped.

        In the same transaction, stores the usage row for the tokens that the stored events had delivered, unless the turn
        answers a line of a batch, which is then answered anew and costs nothing until it is. If the events had delivered
        nothing, the row has no tokens: an engine may have begun. Does nothing if the turn has already ended, or if another
        process still has a valid lease for it.
        """
        error = interrupted_error()
        outcome = TurnOutcome(TurnStatus.FAILED, [failure_event(error)], error=error.body()["error"])
        async with self._database.write() as database:
            session = await session_rows.find_session(database, scope, session_id, lock=True)
            if session is None or session.running_turn_id != turn_id:
                return
            has_expired = await lease_rows.has_expired(database, scope, session_id, self._lease_clock)
            if not has_expired and session.lease_owner != self._owner:
                return
            turn = await turn_rows.find_turn(database, scope, turn_id)
            assert turn is not None
            delivered = await turn_rows.find_delivered(database, scope, turn)
            if turn.key_id is not None and turn.batch_id is None:
                prices = self._book.in_force(session.tenant_id, turn.service_tier or "default", turn.created_at)
                row = _usage_row(session, turn, turn.key_id, delivered or _NOTHING, self._clock.now())
                key = await find_key(database, session.tenant_id, turn.key_id)
                organisation_id = await organisation_of(database, session.tenant_id)
                first_key_id = None if key is None else key.first_key_id
                row = replace(row, organisation_id=organisation_id, first_key_id=first_key_id).priced(prices)
                is_billed = await add_usage(database, row)  # else its process has already found that it costs nothing
                if delivered is not None:
                    used = turn_usage_body(_usage_of(delivered), (0, 0, 0), Money.of_prices(row.cost.atoms, prices))
                    outcome = replace(outcome, cache=delivered.cache, usage=used if is_billed else None)
            await self._end(database, scope, replace(session, epoch=session.epoch + 1), turn_id, outcome)

    async def find_turn(self, scope: TenantScope, turn_id: TurnId) -> Turn | None:
        """Finds a turn, with the items of its answer. Returns None if the turn does not exist."""

        async def work(database: ReadSession) -> Turn | None:
            turn = await turn_rows.find_turn(database, scope, turn_id)
            if turn is None or turn.checkpoint_id is None:
                return turn
            items = await turn_rows.find_items(database, scope, turn.checkpoint_id)
            return replace(turn, output=items[len(turn.input) :])

        return await self._database.read_whole(work)

    async def list_events(
        self, scope: TenantScope, session_id: SessionId, after: int, limit: int
    ) -> tuple[SessionEvent, ...]:
        """Returns up to `limit` stored events of a session whose number is above `after`, in order."""
        async with self._database.read() as database:
            return await turn_rows.list_events(database, scope, session_id, after, limit)

    async def _end(
        self,
        database: WriteSession,
        scope: TenantScope,
        session: AgentSession,
        turn_id: TurnId,
        outcome: TurnOutcome,
    ) -> tuple[SessionEvent, ...]:
        now = self._clock.now()
        turn = await turn_rows.find_turn(database, scope, turn_id)
        assert turn is not None
        if outcome.checkpoint is not None:
            await turn_rows.insert_checkpoint(database, scope, outcome.checkpoint, outcome.items)
            ledger = ledger_of(outcome.checkpoint, outcome.items, outcome.deadlines)
            await session_rows.insert_ledger(database, scope, session.session_id, ledger)
            session = replace(session, head_id=outcome.checkpoint.checkpoint_id, ledger=ledger)
        drafts = list(outcome.drafts)
        if session.last_seq < turn.first_seq and drafts[0].type is not EventType.TURN_CREATED:
            drafts.insert(0, turn_created(None))
        after_seq = session.last_seq if outcome.after_seq is None else outcome.after_seq
        last_seq = after_seq + len(drafts)
        events = number_events(drafts, session.session_id, turn_id, last_seq)
        await turn_rows.insert_events(database, [(scope, event) for event in events], now)
        await turn_rows.update_turn(database, scope, ended(turn, outcome, now))
        await session_rows.update_session(database, at_rest(session, outcome, last_seq, now))
        return events


_TIERS = ("device_tokens", "host_tokens", "disk_tokens", "recomputed_tokens")
_NOTHING = Delivered(dict.fromkeys(("cached_tokens", *_TIERS), 0), 0)


def _usage_of(delivered: Delivered) -> Mapping[str, Any]:
    return usage_body(CacheReport(*(delivered.cache[tier] for tier in _TIERS)), delivered.answer_tokens, DraftReport())


def _usage_row(session: AgentSession, turn: Turn, key_id: KeyId, delivered: Delivered, now: float) -> UsageEvent:
    """Returns the usage row of a turn whose process has died."""
    return UsageEvent(
        request_id=RequestId(turn.turn_id),
        tenant_id=session.tenant_id,
        key_id=key_id,
        model=session.model.requested,
        adapter=session.model.adapter_label,
        session_id=session.charged_id,
        prompt_tokens=_usage_of(delivered)["prompt_tokens"],
        cached_tokens=delivered.cache["cached_tokens"],
        completion_tokens=delivered.answer_tokens,
        at=now,
        outcome=UsageOutcome.INTERRUPTED,
        host_tokens=delivered.cache["host_tokens"],
        disk_tokens=delivered.cache["disk_tokens"],
        service_tier=turn.service_tier,
        end_user_id=turn.end_user_id,
    )
