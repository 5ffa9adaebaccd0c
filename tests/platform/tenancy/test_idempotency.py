"""Tests of idempotency keys on both databases."""

import asyncio

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, InvalidRequest
from graftwork.platform.tenancy.idempotency import (
    ANSWER_LIFE_S,
    ATTEMPT_LIFE_S,
    Attempt,
    IdempotencyStore,
    StoredReply,
)

DIGEST, OTHER_DIGEST = "a" * 64, "b" * 64


@pytest.fixture
def store(database: Database, manual_clock: ManualClock) -> IdempotencyStore:
    return IdempotencyStore(database, manual_clock)


async def begin(store: IdempotencyStore, key: str = "k", owner: str = "ten_1") -> Attempt:
    attempt = await store.begin(owner, key, DIGEST)
    assert isinstance(attempt, Attempt)
    return attempt


async def test_the_first_answer_is_given_again(store: IdempotencyStore) -> None:
    """The same key and body get the stored answer, byte for byte."""
    await store.complete(await begin(store), 201, b'{"id":"x"}')

    assert await store.begin("ten_1", "k", DIGEST) == StoredReply(201, b'{"id":"x"}')


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

    assert await store.begin("ten_1", "k", DIGEST) == StoredReply(200, b"done")


async def test_owners_do_not_meet_each_others_keys(store: IdempotencyStore) -> None:
    """The same key of two tenants is two keys."""
    await store.complete(await begin(store, owner="ten_1"), 200, b"private")

    await begin(store, owner="ten_2")


async def test_a_dead_attempt_is_taken_over(store: IdempotencyStore, manual_clock: ManualClock) -> None:
    """An attempt without an answer loses its key after a while, and its late answer is dropped."""
    dead = await begin(store)
    manual_clock.advance(ATTEMPT_LIFE_S)
    with pytest.raises(Conflict):
        await store.begin("ten_1", "k", DIGEST)
    manual_clock.advance(0.001)

    alive = await begin(store)
    await store.complete(dead, 200, b"late")
    await store.abandon(dead)

    with pytest.raises(Conflict):
        await store.begin("ten_1", "k", DIGEST)
    await store.complete(alive, 200, b"right")
    assert await store.begin("ten_1", "k", DIGEST) == StoredReply(200, b"right")


async def test_answers_are_kept_for_a_day(store: IdempotencyStore, manual_clock: ManualClock) -> None:
    """After a day the answer is deleted, and the key may be used for any body."""
    await store.complete(await begin(store), 200, b"")
    manual_clock.advance(ANSWER_LIFE_S + 1)

    assert isinstance(await store.begin("ten_1", "k", OTHER_DIGEST), Attempt)


async def test_a_sweep_forgets_what_nobody_asks_for(store: IdempotencyStore, manual_clock: ManualClock) -> None:
    """The sweep deletes expired answers and dead attempts of every owner, and nothing else."""
    for owner in ("ten_1", "ten_2"):
        await store.complete(await begin(store, "old", owner), 200, b"old")
    await begin(store, "dead")
    manual_clock.advance(ANSWER_LIFE_S - ATTEMPT_LIFE_S + 1)
    await store.complete(await begin(store, "young"), 200, b"young")
    none_yet = await store.sweep()
    await begin(store, "dead")
    manual_clock.advance(ATTEMPT_LIFE_S)

    swept = await store.sweep()

    assert (none_yet, swept) == (1, 2)
    assert await store.begin("ten_1", "young", DIGEST) == StoredReply(200, b"young")
    with pytest.raises(Conflict):
        await begin(store, "dead")


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_keys_have_a_length(store: IdempotencyStore, key: str) -> None:
    """An empty or too long key is a 400 that names the header."""
    with pytest.raises(InvalidRequest) as caught:
        await store.begin("ten_1", key, DIGEST)

    assert caught.value.param == "Idempotency-Key"
