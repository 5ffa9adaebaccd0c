"""Tests of limits that several gateways share, with a Redis that stops: never open, never shut."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import LimitExceeded, Unavailable
from graftwork.platform.quotas.budget import Spent
from graftwork.platform.quotas.limits import Limits
from graftwork.platform.quotas.local_quotas import LocalQuotaKeeper
from graftwork.platform.quotas.quotas import Quota, QuotaKeeper, RedisQuotaKeeper, Reservation
from graftwork.platform.quotas.shared_quotas import SharedQuotaKeeper, part_of
from tests.platform.quotas.test_quotas import ACME, ListedLedger
from tests.redis_process import RedisProcess, running_redis


@pytest.fixture
def own_redis() -> Iterator[RedisProcess]:
    with running_redis() as started:
        yield started


async def count_three() -> int:
    return 3


@asynccontextmanager
async def three_gateways(redis: RedisProcess, clock: ManualClock) -> AsyncIterator[list[SharedQuotaKeeper]]:
    """The keepers of three gateways, which know of each other."""
    async with AsyncExitStack() as stack:
        keepers = []
        for _ in range(3):
            ledger = ListedLedger()
            shared = RedisQuotaKeeper(redis.url, "t:", clock, ledger, answer_within_s=0.2, window_clock=clock)
            keepers.append(SharedQuotaKeeper(shared, LocalQuotaKeeper(clock, ledger), count_three))
            stack.push_async_callback(keepers[-1].close)
            await keepers[-1].keep_alive()
        yield keepers


async def admitted_of(keepers: list[SharedQuotaKeeper], quota: Quota, requests: int) -> list[Reservation]:
    """Sends as many requests at once, in turn to each gateway. Returns the reservations of those that were admitted."""
    attempts = (keepers[number % len(keepers)].reserve(Limits.of_tenant(ACME, quota), 1) for number in range(requests))
    answers = await asyncio.gather(*attempts, return_exceptions=True)
    assert {type(answer) for answer in answers if isinstance(answer, BaseException)} <= {LimitExceeded}
    return [answer for answer in answers if not isinstance(answer, BaseException)]


@pytest.mark.parametrize("limit", ["max_concurrent_requests", "requests_per_minute"])
@pytest.mark.parametrize("gateways", [1, 3])
async def test_a_thousand_requests_against_a_limit_of_a_hundred(
    own_redis: RedisProcess, manual_clock: ManualClock, limit: str, gateways: int
) -> None:
    """Of 1,000 requests at once against a limit of 100, one gateway and three admit exactly 100."""
    async with three_gateways(own_redis, manual_clock) as keepers:
        admitted = await admitted_of(keepers[:gateways], Quota.from_mapping({limit: 100}), 1000)

        assert len(admitted) == 100
        for reservation in admitted:
            await reservation.settle(1)
        again = await admitted_of(keepers[:gateways], Quota.from_mapping({limit: 100}), 1000)
        assert len(again) == (100 if limit == "max_concurrent_requests" else 0)


@pytest.mark.parametrize("limit", ["max_concurrent_requests", "requests_per_minute", "tokens_per_minute"])
@pytest.mark.parametrize("fault", ["stopped", "stalled"])
async def test_without_redis_each_gateway_has_its_part(
    own_redis: RedisProcess, manual_clock: ManualClock, limit: str, fault: str
) -> None:
    """When Redis stops or stalls, three gateways admit 33 of 100 each: more than nothing, and no more than the limit."""
    quota = Quota.from_mapping({limit: 100})
    async with three_gateways(own_redis, manual_clock) as keepers:
        if fault == "stopped":
            own_redis.process.kill()
            own_redis.process.wait()
        else:
            own_redis.stall()

        admitted = [await admitted_of([keeper], quota, 100) for keeper in keepers]

        assert [len(part) for part in admitted] == [33, 33, 33]
        assert all(keeper.is_alone for keeper in keepers)


async def test_an_outage_does_not_begin_a_new_minute(own_redis: RedisProcess, manual_clock: ManualClock) -> None:
    """What a gateway has admitted before an outage counts in its part, and the next minute is free again."""
    quota = Quota(requests_per_minute=30)
    async with three_gateways(own_redis, manual_clock) as keepers:
        before = await admitted_of(keepers[:1], quota, 8)
        own_redis.process.kill()
        own_redis.process.wait()

        during = await admitted_of(keepers[:1], quota, 30)
        manual_clock.advance(60)
        later = await admitted_of(keepers[:1], quota, 30)

    assert [len(found) for found in (before, during, later)] == [8, 2, 10]


async def test_redis_learns_what_was_admitted_without_it(own_redis: RedisProcess, manual_clock: ManualClock) -> None:
    """After a stall, Redis counts the requests that run, also those of the outage, and not those that have ended."""
    quota = Quota(max_concurrent_requests=30)
    async with three_gateways(own_redis, manual_clock) as keepers:
        before = await admitted_of(keepers[:1], quota, 4)
        own_redis.stall()
        during = await admitted_of(keepers[1:2], quota, 6)
        assert len(during) == 6
        assert keepers[1].is_alone
        await before[0].settle(1)
        await during[0].settle(1)
        await during[1].refund()
        own_redis.go_on()
        await own_redis.answers()

        for keeper in keepers:
            await keeper.keep_alive()

        assert not any(keeper.is_alone for keeper in keepers)
        assert len(await admitted_of(keepers[2:], quota, 40)) == 30 - 3 - 4


async def test_a_ledger_that_fails_is_no_outage_of_redis(own_redis: RedisProcess, manual_clock: ManualClock) -> None:
    """A database that does not answer fails the request, and leaves the limits in Redis."""

    class SilentLedger(ListedLedger):
        async def spent(self, *_: object) -> dict[str, Spent]:
            raise Unavailable("The database does not answer.", code="database_unavailable")

    shared = RedisQuotaKeeper(own_redis.url, "t:", manual_clock, SilentLedger())
    keeper = SharedQuotaKeeper(shared, LocalQuotaKeeper(manual_clock, ListedLedger()), count_three)
    with pytest.raises(Unavailable) as refusal:
        await keeper.reserve(Limits.of_tenant(ACME, Quota(monthly_tokens=5)), 1)

    assert refusal.value.code == "database_unavailable"
    assert not keeper.is_alone
    await keeper.close()


@pytest.mark.parametrize(
    ("limit", "gateways", "part"), [(100, 3, 33), (2, 3, 1), (1, 8, 1), (0, 3, 0), (None, 3, None), (7, 1, 7)]
)
def test_parts(limit: int | None, gateways: int, part: int | None) -> None:
    """A part is the limit by the gateways, rounded down, and at least 1 of a limit above 0; other limits stay whole."""
    quota = Quota(requests_per_minute=limit, max_concurrent_requests=limit, max_adapters=9, monthly_tokens=9)

    parts = part_of(quota, gateways)

    assert (parts.requests_per_minute, parts.max_concurrent_requests, parts.tokens_per_minute) == (part, part, None)
    assert (parts.max_adapters, parts.monthly_tokens) == (9, 9)


async def test_keepers_are_of_one_kind(own_redis: RedisProcess, manual_clock: ManualClock) -> None:
    """A shared keeper has the interface that the gateway uses, and headers tell the limit that holds."""
    async with three_gateways(own_redis, manual_clock) as keepers:
        keeper: QuotaKeeper = keepers[0]
        whole = await keeper.reserve(Limits.of_tenant(ACME, Quota(requests_per_minute=90)), 1)
        own_redis.process.kill()
        part = await keeper.reserve(Limits.of_tenant(ACME, Quota(requests_per_minute=90)), 1)

    headers = [reservation.rate_limit_headers() for reservation in (whole, part)]
    assert [found["x-ratelimit-limit-requests"] for found in headers] == ["90", "30"]
    assert [found["x-ratelimit-remaining-requests"] for found in headers] == ["89", "28"]
