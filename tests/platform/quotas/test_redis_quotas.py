"""Tests of the quota keeper in Redis alone: several gateways, lost slots, repeated commands and an absent Redis."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import Unavailable
from graftwork.platform.quotas.limits import Limits
from graftwork.platform.quotas.quotas import Quota, RedisQuotaKeeper, Reservation
from graftwork.platform.quotas.redis_quotas import LEASE_S
from tests.platform.quotas.test_quotas import ACME, ListedLedger, admitted, refusal_of


@asynccontextmanager
async def redis_keeper(
    url: str, prefix: str, clock: ManualClock, window_clock: ManualClock | None = None
) -> AsyncIterator[RedisQuotaKeeper]:
    """A keeper that is closed whatever happens."""
    keeper = RedisQuotaKeeper(url, prefix, clock, ListedLedger(), window_clock=window_clock)
    try:
        yield keeper
    finally:
        await keeper.close()


@pytest.mark.redis
async def test_gateways_share_one_limit(redis_url: str, redis_prefix: str) -> None:
    """Keepers of several gateways together admit what one would, even with clocks that differ by years."""
    quota = Quota(requests_per_minute=40)
    early, late = ManualClock(start=3e7), ManualClock(start=1.5e9)
    async with (
        redis_keeper(redis_url, redis_prefix, early) as first,
        redis_keeper(redis_url, redis_prefix, late) as second,
    ):
        attempts: list[Awaitable[Reservation]] = []
        for _ in range(100):
            attempts += [
                first.reserve(Limits.of_tenant(ACME, quota), 1),
                second.reserve(Limits.of_tenant(ACME, quota), 1),
            ]
        reservations = await admitted(attempts)
        refusal = await refusal_of(first.reserve(Limits.of_tenant(ACME, quota), 1))

    assert len(reservations) == 40
    assert refusal.retry_after_s is not None
    assert 0 < refusal.retry_after_s <= 60


@pytest.mark.redis
async def test_a_dead_gateways_slots_lapse(redis_url: str, redis_prefix: str, manual_clock: ManualClock) -> None:
    """A slot that is never settled is free after its lifetime, and a later settle changes nothing."""
    quota = Quota(max_concurrent_requests=1, monthly_tokens=100)
    async with redis_keeper(redis_url, redis_prefix, manual_clock, manual_clock) as keeper:
        lost = await keeper.reserve(Limits.of_tenant(ACME, quota), 100)
        manual_clock.advance(LEASE_S - 1)
        await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 100))
        manual_clock.advance(1)

        running = await keeper.reserve(Limits.of_tenant(ACME, quota), 100)
        await lost.settle(100)

        await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 0))
        await running.settle(0)


@pytest.mark.redis
async def test_every_key_in_redis_expires(redis_url: str, redis_prefix: str, manual_clock: ManualClock) -> None:
    """Every key in Redis has an expiry time."""
    async with redis_keeper(redis_url, redis_prefix, manual_clock) as keeper:
        await keeper.reserve(Limits.of_tenant(ACME, Quota(requests_per_minute=5)), 10)

    async with Redis.from_url(redis_url) as redis:
        lives = [await redis.ttl(key) async for key in redis.scan_iter(match=f"{redis_prefix}*", count=1000)]

    assert len(lives) == 6  # all but `ended`, which the first end makes, and `costs`, for requests without a price
    assert all(60 < life <= 60 + LEASE_S + 1 for life in lives)


async def test_without_redis_requests_are_told_to_come_back(manual_clock: ManualClock) -> None:
    """Without Redis a reservation is a 503 with a retry-after."""
    async with redis_keeper("redis://127.0.0.1:1/0", "x:", manual_clock) as keeper:
        with pytest.raises(Unavailable) as caught:
            await keeper.reserve(Limits.of_tenant(ACME, Quota()), 1)

    assert caught.value.should_retry
