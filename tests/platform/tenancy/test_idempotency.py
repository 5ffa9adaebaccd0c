"""Tests of idempotency keys on both databases."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import Conflict, InvalidRequest, Unavailable
from graftwork.platform.gateways.lease import LEASE_S, GatewayLease
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.tenancy.idempotency import (
    ANSWER_LIFE_S,
    Attempt,
    ClaimLost,
    IdempotencyStore,
    StoredReply,
    TurnClaim,
)

DIGEST, OTHER_DIGEST = "a" * 64, "b" * 64


SESSION, TURN = SessionId("ses_1"), TurnId("turn_1")


async def store_of_gateway(database: Database, clock: ManualClock) -> IdempotencyStore:
    """The store of a gateway that has just started."""
    store = IdempotencyStore(database, clock, GatewayLease(clock=clock))
    await store.keep_alive()
    return store


@pytest.fixture
async def store(database: Database, manual_clock: ManualClock) -> IdempotencyStore:
    return await store_of_gateway(database, manual_clock)


class FailingDatabase(Database):
    """A database whose connection breaks in the next writes, before their commit or after it."""

    cuts_before_commit = 0
    cuts_after_commit = 0

    @asynccontextmanager
    async def write(self) -> AsyncGenerator[WriteSession]:
        async with super().write() as session:
            yield session
            if self.cuts_before_commit:
                self.cuts_before_commit -= 1
                raise Unavailable("The connection was cut.")
        if self.cuts_after_commit:
            self.cuts_after_commit -= 1
            raise Unavailable("The connection was cut.")


@pytest.fixture
async def failing_database(database_url: str) -> AsyncGenerator[FailingDatabase, None]:
    database = FailingDatabase(database_url)
    yield database
    await database.close()


def claim_of(attempt: Attempt) -> TurnClaim:
    return TurnClaim(attempt, lambda session_id, turn_id: f"{session_id} {turn_id}".encode())


async def begin(store: IdempotencyStore, key: str = "k", owner: str = "ten_1") -> Attempt:
    attempt = await store.begin(owner, key, DIGEST)
    assert isinstance(attempt, Attempt)
    return attempt


async def test_the_first_answer_is_given_again(store: IdempotencyStore) -> None:
    """The same key and body get the stored answer, byte for byte."""
    attempt = await begin(store)
    await store.complete(attempt, 201, b'{"id":"x"}')

    assert await store.begin("ten_1", "k", DIGEST) == StoredReply(201, b'{"id":"x"}', attempt)


async def test_another_body_is_a_conflict(store: IdempotencyStore) -> None:
    """A key that is sent with another request is refused, during the first request and after it."""
    attempt = await begin(store)
    with pytest.raises(Conflict) as during:
        await store.begin("ten_1", "k", OTHER_DIGEST)
    await store.complete(attempt, 200, b"")

    with pytest.raises(Conflict) as after:
        await store.begin("ten_1", "k", OTHER_DIGEST)

    assert (during.value.code, after.value.code) == ("idempotency_key_reused",) * 2


async def test_one_of_many_at_once_does_the_work(store: IdempotencyStore) -> None:
    """Of requests with one key at the same time one proceeds, and the others are told to retry."""
    results = await asyncio.gather(*(store.begin("ten_1", "k", DIGEST) for _ in range(10)), return_exceptions=True)

    assert sum(isinstance(result, Attempt) for result in results) == 1
    refusals = [result for result in results if isinstance(result, Conflict)]
    assert len(refusals) == 9
    assert all(refusal.should_retry for refusal in refusals)


async def test_a_failed_attempt_frees_the_key(store: IdempotencyStore) -> None:
    """An abandoned attempt frees its key, and an answered one cannot be abandoned."""
    await store.abandon(await begin(store))
    attempt = await begin(store)
    await store.complete(attempt, 200, b"done")

    await store.abandon(attempt)

    assert await store.begin("ten_1", "k", DIGEST) == StoredReply(200, b"done", attempt)


async def test_owners_do_not_meet_each_others_keys(store: IdempotencyStore) -> None:
    """The same key of two tenants is two keys."""
    await store.complete(await begin(store, owner="ten_1"), 200, b"private")

    await begin(store, owner="ten_2")


async def test_a_dead_gateways_attempt_is_taken_over(
    database: Database, store: IdempotencyStore, manual_clock: ManualClock
) -> None:
    """An attempt whose gateway is silent for a lease loses its key, and its late answer is dropped."""
    dead = await begin(store)
    other = await store_of_gateway(database, manual_clock)
    manual_clock.advance(LEASE_S - 1)
    with pytest.raises(Conflict):
        await other.begin("ten_1", "k", DIGEST)
    manual_clock.advance(1)
    await other.keep_alive()

    alive = await begin(other)
    await store.complete(dead, 200, b"late")
    await store.abandon(dead)

    with pytest.raises(Conflict):
        await store.begin("ten_1", "k", DIGEST)
    await other.complete(alive, 200, b"right")
    assert await store.begin("ten_1", "k", DIGEST) == StoredReply(200, b"right", alive)


async def test_a_living_gateway_keeps_its_attempts(store: IdempotencyStore, manual_clock: ManualClock) -> None:
    """An attempt keeps its key for as long as its gateway renews its lease, even for hours."""
    await begin(store)

    for _ in range(1000):
        manual_clock.advance(LEASE_S / 3)
        await store.keep_alive()

    with pytest.raises(Conflict):
        await store.begin("ten_1", "k", DIGEST)


async def test_a_gateway_that_stops_frees_its_keys(database: Database, store: IdempotencyStore) -> None:
    """A gateway that ends as planned leaves no key taken."""
    await begin(store)

    await store.close()

    await begin(IdempotencyStore(database, ManualClock(), GatewayLease()))


async def test_a_restart_frees_the_keys_of_the_killed_process(database: Database, manual_clock: ManualClock) -> None:
    """A gateway that is killed and starts again frees its former keys at once, but not those of other gateways."""
    killed, other = [
        IdempotencyStore(database, manual_clock, GatewayLease.of_gateway(owner, clock=manual_clock))
        for owner in ("a" * 32, "b" * 32)
    ]
    await killed.open()
    await other.open()
    await begin(killed, "of the killed one")
    await begin(other, "of the other")

    again = IdempotencyStore(database, manual_clock, GatewayLease.of_gateway("a" * 32, clock=manual_clock))
    await again.open()

    await begin(other, "of the killed one")
    with pytest.raises(Conflict):
        await again.begin("ten_1", "of the other", DIGEST)


async def test_a_former_process_that_still_runs_starts_no_turn(database: Database, manual_clock: ManualClock) -> None:
    """A process whose gateway has started again cannot start the turn of a key that was taken over from it."""
    former = IdempotencyStore(database, manual_clock, GatewayLease.of_gateway("a" * 32, clock=manual_clock))
    await former.open()
    late = await begin(former)
    again = IdempotencyStore(database, manual_clock, GatewayLease.of_gateway("a" * 32, clock=manual_clock))
    await again.open()
    await begin(again)

    with pytest.raises(ClaimLost):
        async with database.write() as session:
            await claim_of(late).record_turn(session, SESSION, TURN)


async def test_clocks_of_gateways_do_not_matter(database: Database) -> None:
    """Attempts of gateways with clocks that differ by years are judged by the time of the database."""
    early = IdempotencyStore(database, ManualClock(start=3e7), GatewayLease())
    late = IdempotencyStore(database, ManualClock(start=2e9), GatewayLease())
    await early.keep_alive()
    await late.keep_alive()
    await begin(early, "a")
    await begin(late, "b")

    for store, key in ((late, "a"), (early, "b")):
        with pytest.raises(Conflict):
            await store.begin("ten_1", key, DIGEST)


async def test_a_turn_is_the_answer(database: Database, store: IdempotencyStore) -> None:
    """A turn that a request has started is its answer, until the request fails."""
    attempt = await begin(store)
    async with database.write() as session:
        await claim_of(attempt).record_turn(session, SESSION, TURN)

    during = await store.begin("ten_1", "k", DIGEST)
    await store.abandon(attempt)

    assert during == StoredReply(200, b"ses_1 turn_1", attempt)
    await begin(store)


async def test_one_gateway_starts_the_turn(
    database: Database, store: IdempotencyStore, manual_clock: ManualClock
) -> None:
    """A gateway that comes back after its lease cannot start a turn under a key that another one has taken."""
    late = await begin(store)
    other = await store_of_gateway(database, manual_clock)
    manual_clock.advance(LEASE_S)
    await other.keep_alive()
    attempt = await begin(other)
    await store.keep_alive()

    with pytest.raises(ClaimLost):
        async with database.write() as session:
            await claim_of(late).record_turn(session, SESSION, TURN)

    async with database.write() as session:
        await claim_of(attempt).record_turn(session, SESSION, TURN)


async def test_a_turn_outlives_its_gateways_lease(
    database: Database, store: IdempotencyStore, manual_clock: ManualClock
) -> None:
    """A key whose turn was stored is not taken over when its gateway dies: the turn itself shows how it ended."""
    attempt = await begin(store)
    async with database.write() as session:
        await claim_of(attempt).record_turn(session, SESSION, TURN)
    manual_clock.advance(10 * LEASE_S)
    other = await store_of_gateway(database, manual_clock)

    reply = await other.begin("ten_1", "k", DIGEST)

    assert reply == StoredReply(200, b"ses_1 turn_1", attempt)
    assert isinstance(reply, StoredReply)
    await other.forget(reply)
    await begin(other)


@pytest.mark.parametrize("cut", ["cuts_before_commit", "cuts_after_commit"])
async def test_a_cut_connection_frees_the_key(
    failing_database: FailingDatabase, manual_clock: ManualClock, cut: str
) -> None:
    """If the connection is cut while a key is taken or freed, the key is free after the next renewal."""
    store = await store_of_gateway(failing_database, manual_clock)
    setattr(failing_database, cut, 1)
    with pytest.raises(Unavailable):
        await store.begin("ten_1", "k", DIGEST)
    await store.keep_alive()

    attempt = await begin(store)
    setattr(failing_database, cut, 1)
    await store.abandon(attempt)
    await store.keep_alive()

    await begin(store)


async def test_a_cut_connection_loses_no_answer(failing_database: FailingDatabase, manual_clock: ManualClock) -> None:
    """An answer that could not be stored is stored at the next renewal."""
    store = await store_of_gateway(failing_database, manual_clock)
    attempt = await begin(store)
    failing_database.cuts_before_commit = 1
    await store.complete(attempt, 201, b"made")

    await store.keep_alive()

    assert await store.begin("ten_1", "k", DIGEST) == StoredReply(201, b"made", attempt)


async def test_answers_are_kept_for_a_day(store: IdempotencyStore, manual_clock: ManualClock) -> None:
    """After a day the answer is deleted, and the key may be used for any body."""
    await store.complete(await begin(store), 200, b"")
    manual_clock.advance(ANSWER_LIFE_S + 1)

    assert isinstance(await store.begin("ten_1", "k", OTHER_DIGEST), Attempt)


async def test_a_sweep_forgets_what_nobody_asks_for(
    database: Database, store: IdempotencyStore, manual_clock: ManualClock
) -> None:
    """The sweep deletes old answers and the attempts of dead gateways, of every owner, and nothing else."""
    for owner in ("ten_1", "ten_2"):
        await store.complete(await begin(store, "old", owner), 200, b"old")
    await begin(store, "dead")
    manual_clock.advance(ANSWER_LIFE_S - 1)
    other = await store_of_gateway(database, manual_clock)
    young = await begin(other, "young")
    await other.complete(young, 200, b"young")
    await begin(other, "running")
    only_the_dead = await other.sweep()
    manual_clock.advance(2)

    swept = await other.sweep()

    assert (only_the_dead, swept) == (1, 2)
    assert await other.begin("ten_1", "young", DIGEST) == StoredReply(200, b"young", young)
    with pytest.raises(Conflict):
        await begin(other, "running")
    await begin(other, "dead")


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_keys_have_a_length(store: IdempotencyStore, key: str) -> None:
    """An empty or too long key is a 400 that names the header."""
    with pytest.raises(InvalidRequest) as caught:
        await store.begin("ten_1", key, DIGEST)

    assert caught.value.param == "Idempotency-Key"
