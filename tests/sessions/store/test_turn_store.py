"""Tests of the transactions of a turn, and of the leases that allow them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict
from graftwork.platform.ids import CheckpointId, TurnId
from graftwork.platform.ledger.spend_rows import find_spent
from graftwork.platform.quotas.quota import month_of
from graftwork.platform.tenancy.tenancy import Tenancy
from graftwork.sessions.core.events import EventDraft, EventType, number_events, output_text_delta, turn_created
from graftwork.sessions.core.items import message
from graftwork.sessions.core.lease import LeaseLost, SessionLease
from graftwork.sessions.core.session import AgentSession, SessionStatus, TurnStatus
from graftwork.sessions.core.transcript import Checkpoint
from graftwork.sessions.store.event_log import EventBatch
from graftwork.sessions.store.session_store import SessionStore
from graftwork.sessions.store.turn_outcome import TurnOutcome
from graftwork.sessions.store.turn_store import TurnStore
from tests.sessions.session_process import LEASE_S, SessionProcess, principal

ME = principal()
SCOPE = ME.scope()
TURN = TurnId("turn_1")
INPUT = (message("user", "Hi"),)


class TwoProcesses:
    """Two processes on one database, and a session."""

    def __init__(self, database: Database) -> None:
        self.clock = ManualClock()
        self.process = SessionProcess(database, self.clock)
        self.sessions = SessionStore(database, self.clock, retention_s=60.0)
        self.first = TurnStore(database, self.clock, "first", LEASE_S, self.clock)
        self.second = TurnStore(database, self.clock, "second", LEASE_S, self.clock)

    async def begun(self) -> SessionLease:
        session = await self.process.session(ME)
        lease, _ = await self.first.begin(ME, session, TURN, INPUT)
        return lease

    async def now(self, lease: SessionLease) -> AgentSession:
        return await self.sessions.load(SCOPE, lease.session_id)


@pytest.fixture
async def stores(database: Database) -> TwoProcesses:
    return TwoProcesses(database)


def completed(lease: SessionLease, drafts: Sequence[EventDraft] = ()) -> TurnOutcome:
    checkpoint = Checkpoint(
        checkpoint_id=CheckpointId("ckp_1"),
        session_id=lease.session_id,
        parent_id=None,
        turn_id=lease.turn_id,
        depth=1,
        num_items=2,
        num_answer_items=1,
        num_tokens=3,
        token_ids=(1, 2, 3),
        closed=True,
        awaits_tools=False,
        created_at=0.0,
    )
    items = (*INPUT, message("assistant", "Hello"))
    terminal = EventDraft(EventType.TURN_COMPLETED, {"checkpoint_id": "ckp_1"})
    return TurnOutcome(TurnStatus.COMPLETED, [*drafts, terminal], checkpoint, items, finish_reason="stop")


def batch(lease: SessionLease, last_seq: int, *drafts: EventDraft) -> EventBatch:
    return EventBatch(lease, number_events(drafts, lease.session_id, lease.turn_id, last_seq))


async def test_lost_lease_writes_nothing(stores: TwoProcesses) -> None:
    """After another process has taken a turn over, no write of the first process reaches the session."""
    lease = await stores.begun()
    await stores.first.append([batch(lease, 2, turn_created(None), output_text_delta("He"))])
    stores.clock.advance(LEASE_S)
    ((scope, session_id, turn_id),) = await stores.second.find_interrupted(frozenset)
    await stores.second.fail_interrupted(scope, session_id, turn_id)
    before = await stores.now(lease)

    assert await stores.first.append([batch(lease, 3, output_text_delta("llo"))]) == [None]
    for write in (
        stores.first.renew(lease),
        stores.first.end(lease, completed(lease)),
    ):
        with pytest.raises(LeaseLost):
            await write

    assert await stores.now(lease) == before
    assert (before.status, before.head_id, before.last_seq) == (SessionStatus.IDLE, None, 3)


async def test_old_lease_is_no_lease_for_the_next_turn(stores: TwoProcesses) -> None:
    """A lease of an earlier turn does not allow writes to the next turn."""
    lease = await stores.begun()
    stores.clock.advance(LEASE_S)
    await stores.second.fail_interrupted(SCOPE, lease.session_id, TURN)
    await stores.second.begin(ME, await stores.now(lease), TurnId("turn_2"), INPUT)

    with pytest.raises(LeaseLost):
        await stores.first.end(lease, completed(lease))

    assert (await stores.now(lease)).running_turn_id == "turn_2"


async def test_renewed_lease_is_not_taken_over(stores: TwoProcesses) -> None:
    """A lease that was renewed in time is not taken over, even if it was found expired before."""
    lease = await stores.begun()
    stores.clock.advance(LEASE_S)
    ((scope, session_id, turn_id),) = await stores.second.find_interrupted(frozenset)
    await stores.first.renew(lease)

    await stores.second.fail_interrupted(scope, session_id, turn_id)

    assert (await stores.now(lease)).status is SessionStatus.RUNNING
    await stores.first.end(lease, completed(lease))
    assert (await stores.now(lease)).head_id == "ckp_1"


async def test_an_interrupted_turn_counts_in_the_limits_of_its_line_of_keys(
    stores: TwoProcesses, database: Database
) -> None:
    """The usage of a turn whose process has died counts for the first of the keys that rotations have replaced."""
    tenancy = Tenancy(database, b"a pepper for tests", stores.clock)
    tenant = await tenancy.create_tenant("acme")
    first, _ = await tenancy.create_key(tenant.id, "ci")
    _, plaintext = await tenancy.rotate_key(tenant.id, first.id, overlap_s=60)
    sender = await tenancy.authenticate(plaintext)
    session = await stores.process.session(sender)
    lease, _ = await stores.first.begin(sender, session, TURN, INPUT)
    stores.clock.advance(LEASE_S)

    await stores.second.fail_interrupted(sender.scope(), lease.session_id, TURN)

    month = month_of(stores.clock.now())
    async with database.read() as reading:
        assert set(await find_spent(reading, [first.id, sender.key_id], month)) == {first.id}


async def test_the_clocks_of_processes_do_not_matter(stores: TwoProcesses, database: Database) -> None:
    """A process whose clock is years ahead takes over no lease that the database says is valid, and one whose clock is
    years behind finds the lease that has expired there.
    """
    ahead, behind = ManualClock(9e9), ManualClock(1e9)
    for owner, lease_s, clock, expected in (("a", 3600.0, ahead, []), ("b", 0.0, behind, [TurnId("turn_b")])):
        turn_id, other = TurnId(f"turn_{owner}"), TurnStore(database, clock, "other", LEASE_S)
        store = TurnStore(database, ManualClock(), owner, lease_s)
        lease, _ = await store.begin(ME, await stores.process.session(ME), turn_id, INPUT)
        await store.renew(lease)

        found = [turn for _, _, turn in await other.find_interrupted(frozenset) if turn == turn_id]
        expired = await other.has_expired(SCOPE, lease.session_id)
        await other.fail_interrupted(SCOPE, lease.session_id, turn_id)

        assert (found, expired) == (expected, bool(expected))
        still = (await stores.now(lease)).status
        assert still is (SessionStatus.IDLE if expected else SessionStatus.RUNNING)


async def test_cancel_is_heard_with_the_next_renewal(stores: TwoProcesses) -> None:
    """A renewal tells the owner that another process has requested a cancel."""
    lease = await stores.begun()
    heard_before = await stores.first.renew(lease)

    await stores.sessions.request_cancel(SCOPE, lease.session_id)

    assert not heard_before
    assert await stores.first.renew(lease)


async def test_stale_plan_does_not_begin(stores: TwoProcesses) -> None:
    """A turn that was planned on an older state of the session is refused."""
    session = await stores.process.session(ME)
    await stores.sessions.close(SCOPE, session.session_id)

    with pytest.raises(Conflict) as caught:
        await stores.first.begin(ME, session, TURN, INPUT)

    assert caught.value.code == "session_changed"


async def test_turn_is_whole_in_the_log_even_if_it_never_spoke(stores: TwoProcesses) -> None:
    """A turn that ends before its first event is stored still has a turn.created event."""
    lease = await stores.begun()

    events = await stores.first.end(lease, TurnOutcome(TurnStatus.CANCELLED, [EventDraft(EventType.TURN_CANCELLED)]))

    assert [(event.seq, event.type) for event in events] == [
        (1, EventType.TURN_CREATED),
        (2, EventType.TURN_CANCELLED),
    ]
    assert await stores.first.list_events(SCOPE, lease.session_id, 0, 10) == events


async def begin_turns(stores: TwoProcesses, count: int) -> list[SessionLease]:
    """Begins a turn in each of so many new sessions, and returns their leases."""
    leases = []
    for number in range(count):
        session = await stores.process.session(ME)
        lease, _ = await stores.first.begin(ME, session, TurnId(f"turn_{number:02}"), INPUT)
        leases.append(lease)
    return leases


async def test_events_of_many_turns_are_one_transaction(stores: TwoProcesses) -> None:
    """Each session has its own numbers. A session whose lease is lost gets no events, and the others get all."""
    leases = await begin_turns(stores, 3)
    first, lost, other = leases
    lost = replace(lost, epoch=lost.epoch - 1)

    answers = await stores.first.append(
        [
            batch(first, 2, turn_created(None), output_text_delta("a")),
            batch(lost, 1, turn_created(None)),
            batch(other, 1, turn_created(None)),
        ]
    )

    assert answers == [False, None, False]
    assert [(await stores.now(lease)).last_seq for lease in leases] == [2, 0, 1]
    assert [len(await stores.first.list_events(SCOPE, lease.session_id, 0, 10)) for lease in leases] == [2, 0, 1]


async def test_more_turns_than_one_statement_renews(stores: TwoProcesses) -> None:
    """Of forty turns each gets its own number of events, but one whose lease is lost."""
    leases = await begin_turns(stores, 40)
    held = [replace(lease, epoch=lease.epoch - (number == 35)) for number, lease in enumerate(leases)]
    drafts = [[turn_created(None), *[output_text_delta("a")] * (number % 3)] for number in range(40)]

    answers = await stores.first.append(
        [batch(lease, len(mine), *mine) for lease, mine in zip(held, drafts, strict=True)]
    )

    assert answers == [None if number == 35 else False for number in range(40)]
    expected = [0 if number == 35 else 1 + number % 3 for number in range(40)]
    assert [(await stores.now(lease)).last_seq for lease in leases] == expected


async def test_a_batch_that_is_stored_again_changes_nothing(stores: TwoProcesses) -> None:
    """Events may be stored a second time, with more events after them or with the turn's outcome."""
    lease = await stores.begun()
    created, said = turn_created(None), output_text_delta("He")
    await stores.first.append([batch(lease, 1, created)])
    await stores.first.append([batch(lease, 2, created, said)])

    events = await stores.first.end(lease, replace(completed(lease, [created, said]), after_seq=0))

    assert [event.seq for event in events] == [1, 2, 3]
    assert await stores.first.list_events(SCOPE, lease.session_id, 0, 10) == events
    assert (await stores.now(lease)).last_seq == 3
