"""Tests of the contract of quota keepers, for the local one and the one in Redis."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from datetime import UTC, datetime

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import BudgetSpent, LimitExceeded, Unavailable
from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.budget import Spent
from graftwork.platform.quotas.limits import Limits
from graftwork.platform.quotas.quota import month_of
from graftwork.platform.quotas.quotas import LocalQuotaKeeper, Quota, QuotaKeeper, RedisQuotaKeeper, Reservation

ACME, UMBRELLA = TenantId("ten_acme"), TenantId("ten_umbrella")


class ListedLedger:
    """A `SpendLedger` over a list, which can be made to fail."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, float, int]] = []
        self.costs: dict[str, dict[str, int]] = {}
        """The cost of the month by owner and currency, in atoms."""
        self.failure: Exception | None = None

    async def spent(self, owner_ids: Sequence[str], month: str) -> dict[str, Spent]:
        await asyncio.sleep(0)
        if self.failure:
            raise self.failure
        now = [(owner, tokens) for owner, at, tokens in self.entries if month_of(at) == month]
        return {
            owner_id: Spent(sum(tokens for owner, tokens in now if owner == owner_id), self.costs.get(owner_id, {}))
            for owner_id in owner_ids
        }


@pytest.fixture
def ledger() -> ListedLedger:
    return ListedLedger()


@pytest.fixture(params=["local", pytest.param("redis", marks=pytest.mark.redis)])
async def keeper(
    request: pytest.FixtureRequest, manual_clock: ManualClock, ledger: ListedLedger
) -> AsyncIterator[QuotaKeeper]:
    """Each keeper in turn, with time moved by hand."""
    if request.param == "local":
        local = LocalQuotaKeeper(manual_clock, ledger)
        yield local
        local.check_integrity()
        return
    redis_url, prefix = request.getfixturevalue("redis_url"), request.getfixturevalue("redis_prefix")
    shared = RedisQuotaKeeper(redis_url, prefix, manual_clock, ledger, lease_s=900.0, window_clock=manual_clock)
    yield shared
    await shared.close()


async def admitted(attempts: list[Awaitable[Reservation]]) -> list[Reservation]:
    """Make all attempts at once; those that were not refused."""
    results = await asyncio.gather(*attempts, return_exceptions=True)
    refusals = [result for result in results if isinstance(result, BaseException)]
    assert all(isinstance(refusal, LimitExceeded) for refusal in refusals), refusals
    return [result for result in results if not isinstance(result, BaseException)]


async def refusal_of(attempt: Awaitable[Reservation]) -> LimitExceeded:
    with pytest.raises(LimitExceeded) as caught:
        await attempt
    return caught.value


@pytest.mark.parametrize(
    "quota",
    [
        Quota(requests_per_minute=100),
        Quota(tokens_per_minute=1009),
        Quota(max_concurrent_requests=100),
        Quota(monthly_tokens=1009),
    ],
    ids=["requests", "tokens", "concurrency", "budget"],
)
async def test_a_burst_never_overshoots(keeper: QuotaKeeper, quota: Quota) -> None:
    """Of 1000 requests at once, exactly as many are admitted as the cap allows, whichever cap it is."""
    reservations = await admitted([keeper.reserve(Limits.of_tenant(ACME, quota), 10) for _ in range(1000)])

    assert len(reservations) == 100


async def test_a_minute_is_every_span_of_sixty_seconds(keeper: QuotaKeeper, manual_clock: ManualClock) -> None:
    """A minute is any span of 60 seconds, so late requests of one calendar minute count early in the next."""
    quota = Quota(requests_per_minute=3)
    for pause in (0.0, 30.0, 15.0):
        manual_clock.advance(pause)
        await (await keeper.reserve(Limits.of_tenant(ACME, quota), 1)).settle(1)

    manual_clock.advance(14.0)  # 59 s after the first
    refusal = await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 1))

    assert refusal.retry_after_s == pytest.approx(1.0)
    assert refusal.headers()["retry-after-ms"] == "1000"
    assert refusal.details == {"limit": "requests_per_minute", "level": "tenant"}
    manual_clock.advance(1.0)
    await keeper.reserve(Limits.of_tenant(ACME, quota), 1)
    assert (await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 1))).retry_after_s == pytest.approx(30.0)


async def test_the_wait_for_tokens_is_exact(keeper: QuotaKeeper, manual_clock: ManualClock) -> None:
    """A refusal for tokens tells the second from which the same request fits, and not a millisecond later."""
    quota = Quota(tokens_per_minute=100)
    for tokens in (40, 30, 20):
        await keeper.reserve(Limits.of_tenant(ACME, quota), tokens)
        manual_clock.advance(10)

    refusal = await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 75))

    assert refusal.retry_after_s == pytest.approx(40.0)  # 30 s until the first leaves, 10 more for the second
    manual_clock.advance(39.999)
    await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 75))
    manual_clock.advance(0.001)
    await keeper.reserve(Limits.of_tenant(ACME, quota), 75)


async def test_the_longest_wait_is_told(keeper: QuotaKeeper, manual_clock: ManualClock) -> None:
    """When several limits refuse, the answer names the one that takes longest."""
    quota = Quota(requests_per_minute=1, max_concurrent_requests=1)
    await keeper.reserve(Limits.of_tenant(ACME, quota), 1)
    manual_clock.advance(20)

    refusal = await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 1))

    assert refusal.details == {"limit": "requests_per_minute", "level": "tenant"}
    assert refusal.retry_after_s == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("quota", "tokens"),
    [
        (Quota(requests_per_minute=0), 1),
        (Quota(max_concurrent_requests=0), 1),
        (Quota(tokens_per_minute=100), 101),
        (Quota(monthly_tokens=100), 101),
    ],
)
async def test_what_never_fits_is_not_to_be_retried(keeper: QuotaKeeper, quota: Quota, tokens: int) -> None:
    """A request that is larger than the whole limit is refused without retry."""
    refusal = await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), tokens))

    assert not refusal.should_retry
    assert refusal.headers()["x-should-retry"] == "false"


async def test_each_answer_of_a_request_counts_as_running(keeper: QuotaKeeper, manual_clock: ManualClock) -> None:
    """Of five places, a request with three answers leaves two, until it ends; more than five never fit."""
    quota = Quota(max_concurrent_requests=5)
    first = await keeper.reserve(Limits.of_tenant(ACME, quota), 1, answers=3)

    refusal = await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 1, answers=3))
    second = await keeper.reserve(Limits.of_tenant(ACME, quota), 1, answers=2)
    never = await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 1, answers=6))
    await first.settle(1)
    await second.refund()
    await keeper.reserve(Limits.of_tenant(ACME, quota), 1, answers=5)

    assert refusal.details == {"limit": "max_concurrent_requests", "level": "tenant"}
    assert refusal.should_retry
    assert not never.should_retry
    assert "ask for fewer" in never.message
    manual_clock.advance(1)
    await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 1))


async def test_a_refused_request_takes_nothing(keeper: QuotaKeeper) -> None:
    """A refusal by one limit leaves the others as they were."""
    quota = Quota(requests_per_minute=2, tokens_per_minute=100, max_concurrent_requests=2, monthly_tokens=50)
    for _ in range(5):
        await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 60))  # by the budget, the last to be asked
        await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 101))  # by the minute

    reservation = await keeper.reserve(Limits.of_tenant(ACME, quota), 50)

    assert reservation.rate_limit_headers()["x-ratelimit-remaining-requests"] == "1"
    assert reservation.rate_limit_headers()["x-ratelimit-remaining-tokens"] == "50"


async def test_settling_gives_back_what_was_not_used(keeper: QuotaKeeper) -> None:
    """After a settlement the minute has the tokens that were really used, more or fewer than estimated."""
    quota = Quota(tokens_per_minute=1000)
    first, second = (
        await keeper.reserve(Limits.of_tenant(ACME, quota), 400),
        await keeper.reserve(Limits.of_tenant(ACME, quota), 100),
    )

    await first.settle(50)
    await second.settle(250)

    headers = (await keeper.reserve(Limits.of_tenant(ACME, quota), 7)).rate_limit_headers()
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - 50 - 250 - 7)


@pytest.mark.parametrize("first_end", ["settle", "refund"])
async def test_a_reservation_ends_once(keeper: QuotaKeeper, first_end: str) -> None:
    """After the first settle or refund, further calls change nothing."""
    quota = Quota(requests_per_minute=10, tokens_per_minute=1000, max_concurrent_requests=2)
    reservation, other = (
        await keeper.reserve(Limits.of_tenant(ACME, quota), 100),
        await keeper.reserve(Limits.of_tenant(ACME, quota), 100),
    )

    await (reservation.settle(60) if first_end == "settle" else reservation.refund())
    for _ in range(3):
        await reservation.settle(999)
        await reservation.refund()

    headers = (await keeper.reserve(Limits.of_tenant(ACME, quota), 0)).rate_limit_headers()
    used_requests, used_tokens = (3, 160) if first_end == "settle" else (2, 100)
    assert headers["x-ratelimit-remaining-requests"] == str(10 - used_requests)
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - used_tokens)
    await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 0))  # `other` still runs, and so does the last
    await other.settle(1)
    await keeper.reserve(Limits.of_tenant(ACME, quota), 0)


async def test_settling_after_the_minute_frees_only_the_slot(keeper: QuotaKeeper, manual_clock: ManualClock) -> None:
    """A request that lasts longer than its minute gives back its slot but no tokens."""
    quota = Quota(tokens_per_minute=100, max_concurrent_requests=1)
    long_one = await keeper.reserve(Limits.of_tenant(ACME, quota), 80)
    manual_clock.advance(61)

    await long_one.settle(10)

    headers = (await keeper.reserve(Limits.of_tenant(ACME, quota), 30)).rate_limit_headers()
    assert headers["x-ratelimit-remaining-tokens"] == "70"


async def test_a_request_without_tokens_ends_like_any_other(keeper: QuotaKeeper) -> None:
    """A request with zero tokens reserved or used frees its slot."""
    quota = Quota(tokens_per_minute=10, max_concurrent_requests=1)

    for estimated, actual in ((0, 0), (0, 3), (7, 0)):
        await (await keeper.reserve(Limits.of_tenant(ACME, quota), estimated)).settle(actual)

    headers = (await keeper.reserve(Limits.of_tenant(ACME, quota), 0)).rate_limit_headers()
    assert headers["x-ratelimit-remaining-tokens"] == "7"


async def test_tenants_do_not_share_limits(keeper: QuotaKeeper) -> None:
    """One tenant at its limit leaves another untouched."""
    quota = Quota(requests_per_minute=1, monthly_tokens=10)
    await keeper.reserve(Limits.of_tenant(ACME, quota), 10)
    await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 10))

    await keeper.reserve(Limits.of_tenant(UMBRELLA, quota), 10)


async def test_headers_tell_how_far_the_minute_is_used(keeper: QuotaKeeper, manual_clock: ManualClock) -> None:
    """Answers and refusals carry limit, remaining and reset, for the limits that exist."""
    quota = Quota(requests_per_minute=2, tokens_per_minute=100)
    await keeper.reserve(Limits.of_tenant(ACME, quota), 10)
    manual_clock.advance(15.5)

    headers = (await keeper.reserve(Limits.of_tenant(ACME, quota), 20)).rate_limit_headers()
    manual_clock.advance(0.25)
    refusal = await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 20))

    assert headers == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "70",
        "x-ratelimit-reset-tokens": "1m0s",
    }
    assert refusal.headers()["x-ratelimit-reset-requests"] == "59.75s"
    assert refusal.headers()["x-ratelimit-remaining-tokens"] == "70"
    assert (await keeper.reserve(Limits.of_tenant(UMBRELLA, Quota()), 20)).rate_limit_headers() == {}


async def test_the_budget_counts_what_is_spent_and_in_flight(
    keeper: QuotaKeeper, ledger: ListedLedger, manual_clock: ManualClock
) -> None:
    """A month's tokens are those of the ledger since the month began, and those still running."""
    quota = Quota(monthly_tokens=1000)
    now = datetime.fromtimestamp(manual_clock.now(), UTC)
    start = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
    ledger.entries = [(ACME, start - 1, 5000), (ACME, start, 600), (UMBRELLA, start, 5000)]
    running = await keeper.reserve(Limits.of_tenant(ACME, quota), 300)

    refusal = await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 101))

    assert isinstance(refusal, BudgetSpent)
    assert refusal.headers()["x-should-retry"] == "false"
    fitting = await keeper.reserve(Limits.of_tenant(ACME, quota), 100)
    await fitting.refund()
    ledger.entries.append((ACME, manual_clock.now(), 50))
    await running.settle(50)
    await keeper.reserve(Limits.of_tenant(ACME, quota), 350)
    await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 1))


async def test_concurrent_spending_never_passes_the_budget(
    keeper: QuotaKeeper, ledger: ListedLedger, manual_clock: ManualClock
) -> None:
    """With requests and ledger entries in any order, the month's total stays within the limit."""
    quota = Quota(monthly_tokens=1000)

    async def client(number: int) -> None:
        """Ask until refused."""
        while True:
            try:
                reservation = await keeper.reserve(Limits.of_tenant(ACME, quota), 37)
            except BudgetSpent:
                return
            await asyncio.sleep(0)
            ledger.entries.append((ACME, manual_clock.now(), 20 + number))
            await asyncio.sleep(0)
            await reservation.settle(20 + number)

    for _ in range(2):  # the second time with nothing in flight
        await asyncio.gather(*(client(number) for number in range(10)))

    spent = sum(tokens for _, _, tokens in ledger.entries)
    assert 1000 - 10 * 37 < spent <= 1000


async def test_a_ledger_that_fails_leaves_no_reservation(keeper: QuotaKeeper, ledger: ListedLedger) -> None:
    """If the ledger cannot be read, the request fails and leaves no reservation."""
    quota = Quota(max_concurrent_requests=1, monthly_tokens=1000)
    ledger.failure = Unavailable("the ledger is away")
    with pytest.raises(Unavailable):
        await keeper.reserve(Limits.of_tenant(ACME, quota), 10)
    ledger.failure = None

    await keeper.reserve(Limits.of_tenant(ACME, quota), 10)


async def test_a_lost_reservation_frees_its_place(keeper: QuotaKeeper, manual_clock: ManualClock) -> None:
    """The place of a reservation that nobody refers to is free after a lease; that of any other one stays taken."""
    quota = Quota(max_concurrent_requests=2)
    kept = await keeper.reserve(Limits.of_tenant(ACME, quota), 10)
    await keeper.reserve(Limits.of_tenant(ACME, quota), 10)
    for _ in range(3):
        manual_clock.advance(400)
        await keeper.keep_alive()

    await keeper.reserve(Limits.of_tenant(ACME, quota), 10)

    await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 10))
    await kept.settle(10)
    await keeper.reserve(Limits.of_tenant(ACME, quota), 10)


async def test_a_renewal_keeps_the_tokens_of_the_month(keeper: QuotaKeeper, manual_clock: ManualClock) -> None:
    """A request that runs for hours counts in the month with its reserved tokens until its end."""
    quota = Quota(monthly_tokens=100)
    long_one = await keeper.reserve(Limits.of_tenant(ACME, quota), 80)
    for _ in range(10):
        manual_clock.advance(800)
        await keeper.keep_alive()

    await refusal_of(keeper.reserve(Limits.of_tenant(ACME, quota), 21))

    await long_one.settle(80)
    await keeper.reserve(Limits.of_tenant(ACME, quota), 21)
