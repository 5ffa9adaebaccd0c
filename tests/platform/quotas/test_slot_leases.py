"""Tests of slots as leases: a Redis that stalls or forgets, commands that come late, and requests that outlive a stall."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import LimitExceeded, Unavailable
from graftwork.platform.quotas.limits import Limits
from graftwork.platform.quotas.quotas import Quota, RedisQuotaKeeper
from graftwork.platform.quotas.redis_quotas import LEASE_S
from tests.platform.quotas.test_quotas import ACME, ListedLedger, refusal_of
from tests.platform.quotas.test_redis_quotas import redis_keeper
from tests.redis_process import RedisProcess, running_redis

SCRIPT = Path(__file__).parents[3] / "platform" / "quotas" / "quotas.lua"


@pytest.fixture
def own_redis() -> Iterator[RedisProcess]:
    with running_redis() as started:
        yield started


async def free_places(keeper: RedisQuotaKeeper, quota: Quota) -> int:
    """How many requests fit beside those that run."""
    most = quota.max_concurrent_requests
    assert most is not None
    for answers in range(most, 0, -1):
        try:
            reservation = await keeper.reserve(Limits.of_tenant(ACME, quota), 0, answers)
        except LimitExceeded:
            continue
        await reservation.refund()
        return answers
    return 0


async def test_a_stall_leaves_no_place_taken(own_redis: RedisProcess, manual_clock: ManualClock) -> None:
    """After a stall of Redis, exactly the requests that run have places: the first renewal after it repairs the rest."""
    quota = Quota(max_concurrent_requests=8, requests_per_minute=100)
    keeper = RedisQuotaKeeper(own_redis.url, "t:", manual_clock, ListedLedger(), answer_within_s=0.1)
    running, ending = (
        await keeper.reserve(Limits.of_tenant(ACME, quota), 1),
        await keeper.reserve(Limits.of_tenant(ACME, quota), 1),
    )
    own_redis.stall()
    for _ in range(2):
        with pytest.raises(Unavailable):
            await keeper.reserve(Limits.of_tenant(ACME, quota), 1, answers=2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(keeper.reserve(Limits.of_tenant(ACME, quota), 1), 0.05)  # a client that leaves
    await ending.settle(1)
    await keeper.keep_alive()
    own_redis.go_on()
    await own_redis.answers()

    await keeper.keep_alive()

    assert await free_places(keeper, quota) == 7
    assert running.standings[0].requests == 1
    assert (await keeper.reserve(Limits.of_tenant(ACME, quota), 1)).standings[
        0
    ].requests == 3  # `running`, `ending`, and itself
    await keeper.close()


@pytest.mark.redis
async def test_a_running_request_gets_its_place_back(
    redis_url: str, redis_prefix: str, manual_clock: ManualClock
) -> None:
    """A request whose lease ended while its gateway could not renew it counts again after the next renewal."""
    quota = Quota(max_concurrent_requests=1, monthly_tokens=1000)
    async with (
        redis_keeper(redis_url, redis_prefix, manual_clock, manual_clock) as stalled,
        redis_keeper(redis_url, redis_prefix, manual_clock, manual_clock) as other,
    ):
        running = await stalled.reserve(Limits.of_tenant(ACME, quota), 600)
        manual_clock.advance(LEASE_S + 1)
        between = await other.reserve(Limits.of_tenant(ACME, quota), 600)
        await stalled.keep_alive()
        await between.settle(10)

        await refusal_of(other.reserve(Limits.of_tenant(ACME, quota), 0))
        assert (
            await refusal_of(other.reserve(Limits.of_tenant(ACME, Quota(monthly_tokens=1000)), 401))
        ).code == "quota_exceeded"
        await running.settle(600)
        await other.reserve(Limits.of_tenant(ACME, quota), 1000)


@pytest.mark.redis
async def test_an_emptied_redis_learns_what_runs(redis_url: str, redis_prefix: str, manual_clock: ManualClock) -> None:
    """A Redis that lost everything counts the running requests again after the next renewal."""
    quota = Quota(max_concurrent_requests=5)
    async with redis_keeper(redis_url, redis_prefix, manual_clock) as keeper:
        running = await keeper.reserve(Limits.of_tenant(ACME, quota), 1, answers=3)
        async with Redis.from_url(redis_url) as redis:
            await redis.delete(*[key async for key in redis.scan_iter(match=f"{redis_prefix}*", count=1000)])

        await keeper.keep_alive()

        assert await free_places(keeper, quota) == 2
        await running.settle(1)
        assert await free_places(keeper, quota) == 5


@pytest.mark.redis
async def test_late_commands_change_nothing(redis_url: str, redis_prefix: str) -> None:
    """A command that arrives twice counts once, and after the reservation's end it counts no more."""
    async with Redis.from_url(redis_url, decode_responses=True) as redis:
        names = ("log", "tokens", "running", "held", "sums", "answers", "ended", "costs")
        keys = [f"{redis_prefix}quota:{{{ACME}}}:{name}" for name in names]
        script = redis.register_script(SCRIPT.read_text())

        async def run(verb: str, *arguments: str) -> object:
            return await script(keys=keys, args=[verb, "", "60000000", "30000000", *arguments])

        async def counted() -> list[Any]:
            return await redis.hmget(keys[4], ["window", "held", "answers", "cost"])

        for _ in range(2):
            await run("reserve", "rsv_1", "10", "2", "7", "1", "10", "")
        while_running = await counted()
        ended = [await run("settle", "rsv_1", "4") for _ in range(2)]
        await run("renew", "rsv_1", "10", "2", "7")
        await run("reserve", "rsv_1", "10", "2", "7", "5", "50", "")
        await run("refund", "rsv_2", "")
        await run("reserve", "rsv_2", "10", "1", "7", "5", "50", "")

        assert while_running == ["10", "10", "2", "7"]
        assert ended == [1, 0]
        assert await counted() == ["4", "0", "0", "0"]
