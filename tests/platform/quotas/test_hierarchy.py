"""Tests of limits of several owners, and of budgets of money, for the local keeper and the one in Redis."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import BudgetSpent, LimitExceeded, ValidationFailed
from graftwork.platform.ids import OrganisationId, TenantId
from graftwork.platform.prices.rates import Rates
from graftwork.platform.quotas.budget import ReservedCost, Spent
from graftwork.platform.quotas.limits import LIMIT_HEADER, Level, Limits, OwnerLimits, check_level, end_user_id
from graftwork.platform.quotas.quotas import LocalQuotaKeeper, Quota, QuotaKeeper, RedisQuotaKeeper, Reservation
from tests.hypothesis_profiles import examples
from tests.platform.quotas.test_quotas import ACME, ListedLedger, admitted, keeper, ledger, refusal_of

__all__ = ["keeper", "ledger"]

CENT = ReservedCost(10_000_000, "USD")
LEVELS = (Level.ORGANISATION, Level.TENANT, Level.KEY, Level.USER)


def limits(organisation: Quota, tenant: Quota, key: Quota, user: Quota, *, who: str = "1", of: str = "acme") -> Limits:
    """Limits of all four levels; `who` is the key and the end user of the tenant `of`."""
    ids = ("org_1", f"ten_{of}", f"key_{of}{who}", f"usr_{of}{who}")
    quotas = (organisation, tenant, key, user)
    owners = tuple(OwnerLimits(level, *pair) for level, pair in zip(LEVELS, zip(ids, quotas, strict=True), strict=True))
    return Limits(TenantId(f"ten_{of}"), owners, OrganisationId("org_1"))


FREE = Quota()


@pytest.mark.parametrize("level", range(4), ids=LEVELS)
@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute", "max_concurrent_requests"])
async def test_each_level_refuses_by_its_own_limit(keeper: QuotaKeeper, level: int, limit: str) -> None:
    """Of 60 requests at once, a limit of 10 at any level admits 10; the refusal names the level and the limit."""
    quotas = [FREE] * 4
    quotas[level] = Quota.from_mapping({limit: 10})

    kept = await admitted([keeper.reserve(limits(*quotas), 1) for _ in range(60)])
    refusal = await refusal_of(keeper.reserve(limits(*quotas), 1))

    assert len(kept) == 10
    assert refusal.details == {"limit": limit, "level": LEVELS[level]}
    assert refusal.headers()[LIMIT_HEADER] == f"{LEVELS[level]}.{limit}"
    assert f"{limit} = 10 of this {LEVELS[level]}" in refusal.message
    assert "retry-after" in refusal.headers()


async def test_owners_share_what_is_above_them(keeper: QuotaKeeper) -> None:
    """Two keys of two tenants share their organisation's limit, and what one level refuses counts at no other level."""
    organisation, key = Quota(requests_per_minute=5), Quota(requests_per_minute=3)

    acme = await admitted([keeper.reserve(limits(organisation, FREE, key, FREE), 1) for _ in range(8)])
    other = await admitted([keeper.reserve(limits(organisation, FREE, key, FREE, of="other"), 1) for _ in range(8)])

    assert (len(acme), len(other)) == (3, 2)
    refusal = await refusal_of(keeper.reserve(limits(organisation, FREE, key, FREE, of="other"), 1))
    assert refusal.details["level"] == Level.ORGANISATION


async def test_headers_are_of_the_owner_with_least_left(keeper: QuotaKeeper) -> None:
    """The headers of requests and of tokens are each those of the level that has least left."""
    tenant = Quota(requests_per_minute=100, tokens_per_minute=50)
    key = Quota(requests_per_minute=3, tokens_per_minute=5000)

    headers = (await keeper.reserve(limits(FREE, tenant, key, FREE), 20)).rate_limit_headers()

    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-remaining-requests"] == "2"
    assert headers["x-ratelimit-limit-tokens"] == "50"
    assert headers["x-ratelimit-remaining-tokens"] == "30"


async def test_a_quota_below_the_use_stops_growth_only(keeper: QuotaKeeper) -> None:
    """A limit below what runs ends nothing: it refuses until enough has ended."""
    running = [await keeper.reserve(limits(FREE, FREE, FREE, FREE), 1) for _ in range(4)]
    lower = limits(FREE, Quota(max_concurrent_requests=2), FREE, FREE)

    await refusal_of(keeper.reserve(lower, 1))
    for reservation in running[:2]:
        await reservation.settle(1)
    await refusal_of(keeper.reserve(lower, 1))
    await running[2].settle(1)

    await keeper.reserve(lower, 1)


@pytest.mark.parametrize("level", range(4), ids=LEVELS)
async def test_money_is_refused_to_the_cent(keeper: QuotaKeeper, ledger: ListedLedger, level: int) -> None:
    """Of 300 requests of a cent at once, a budget of a dollar at any level admits 100, and then not one more."""
    quotas = [FREE] * 4
    quotas[level] = Quota(monthly_budget="1", currency="USD")

    kept = await admitted([keeper.reserve(limits(*quotas), 1, cost=CENT) for _ in range(300)])
    refusal = await refusal_of(keeper.reserve(limits(*quotas), 1, cost=CENT))

    assert len(kept) == 100
    assert isinstance(refusal, BudgetSpent)
    assert refusal.headers()["x-should-retry"] == "false"
    assert refusal.details == {"limit": "monthly_budget", "level": LEVELS[level]}
    assert "1.01 USD are spent or in flight" in refusal.message
    await kept[0].refund()
    await keeper.reserve(limits(*quotas), 1, cost=CENT)


async def test_a_budget_counts_what_the_ledger_says(keeper: QuotaKeeper, ledger: ListedLedger) -> None:
    """A request fits exactly if its highest cost, what is spent in the budget's currency and what runs are within it."""
    quota = limits(FREE, Quota(monthly_budget="0.300001", currency="USD"), FREE, FREE)
    ledger.costs = {ACME: {"USD": 299_991_000_000, "EUR": 10**15}}

    await refusal_of(keeper.reserve(quota, 1, cost=ReservedCost(10_001, "USD")))
    await keeper.reserve(quota, 1, cost=ReservedCost(10_000, "USD"))

    await refusal_of(keeper.reserve(quota, 1, cost=ReservedCost(1, "USD")))
    await keeper.reserve(quota, 1)  # a request without a price costs nothing


async def test_a_price_in_another_currency_is_refused(keeper: QuotaKeeper) -> None:
    """A budget cannot be kept in another currency, so the request is refused, and the message says why."""
    quota = limits(FREE, Quota(monthly_budget="1", currency="EUR"), FREE, FREE)

    refusal = await refusal_of(keeper.reserve(quota, 1, cost=CENT))

    assert isinstance(refusal, BudgetSpent)
    assert "in EUR, and this request has a price in USD" in refusal.message


def test_the_reserved_cost_is_the_highest() -> None:
    """A request reserves the cost of its prompt at the dearest rate and of all its output, rounded up to nanos."""
    rates = Rates.read({"input": "0.5", "input_disk": "0.7", "input_device": "0.1", "output": "1.5"})

    cost = ReservedCost.of(rates, "USD", prompt_tokens=11, output_tokens=7)

    exact = (11 * Decimal("0.7") + 7 * Decimal("1.5")) / 10**6
    assert cost == ReservedCost(int(exact * 10**9), "USD")
    assert ReservedCost.of(Rates.read({"input": "0.000001", "output": "0"}), "USD", 1, 0).nanos == 1


async def test_the_local_keeper_forgets_owners_without_a_count(manual_clock: ManualClock) -> None:
    """A minute after the last request of an end user, nothing of it is in memory."""
    local = LocalQuotaKeeper(manual_clock, ListedLedger())
    for number in range(50):
        await (await local.reserve(limits(FREE, FREE, FREE, FREE, who=str(number)), 1)).settle(1)
    before = local.num_owners

    manual_clock.advance(60)
    await local.keep_alive()

    assert (before, local.num_owners) == (2 + 2 * 50, 0)


@pytest.mark.parametrize("level", [Level.ORGANISATION, Level.KEY, Level.USER])
def test_a_level_has_only_limits_that_it_can_keep(level: Level) -> None:
    """Files are counted by tenant alone, so no other level may have a limit of them."""
    check_level(level, Quota(requests_per_minute=1, monthly_budget="1", soft_budget="0.5", currency="USD"))
    with pytest.raises(ValidationFailed) as caught:
        check_level(level, Quota(max_file_bytes=1))

    assert caught.value.param == "max_file_bytes"


@pytest.mark.parametrize("limit", ["max_device_kv_bytes", "max_host_kv_bytes"])
@pytest.mark.parametrize("level", [Level.KEY, Level.USER])
def test_tenants_share_kv_and_their_keys_do_not(level: Level, limit: str) -> None:
    """All keys of a tenant share its cache, so a key and an end user have no limit of it."""
    check_level(Level.ORGANISATION, Quota.model_validate({limit: 1}))
    with pytest.raises(ValidationFailed) as caught:
        check_level(level, Quota.model_validate({limit: 1}))

    assert caught.value.param == limit


def test_end_users_are_digests_of_their_tenant() -> None:
    """The same name is the same end user of one tenant, another one of another tenant, and nobody can read it."""
    mine = end_user_id(ACME, "alice")

    assert mine == end_user_id(ACME, "alice") != end_user_id(TenantId("ten_umbrella"), "alice")
    assert mine is not None
    assert "alice" not in mine
    assert end_user_id(ACME, "") is end_user_id(ACME, None) is None
    assert end_user_id(ACME, "\ud800") is not None


# Random histories against lists


@dataclass(frozen=True)
class Step:
    """Time passes, then a request of one of the keys arrives, or an earlier one ends, possibly again."""

    seconds: int
    verb: str
    tokens: int
    nanos: int
    which: int
    key: int


@dataclass(eq=False)
class Listed:
    owners: tuple[str, ...]
    at: float
    tokens: int
    nanos: int
    is_running: bool = True


class ListedHierarchy(ListedLedger):
    """The limits by their definition: each request is in a list, with its owners. It is the ledger too."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.requests: list[Listed] = []
        self.spent_nanos: list[tuple[tuple[str, ...], int, int]] = []

    async def spent(self, owner_ids: Sequence[str], month: str) -> dict[str, Spent]:
        return {
            owner_id: Spent(
                sum(tokens for owners, tokens, _ in self.spent_nanos if owner_id in owners),
                {"USD": 1000 * sum(nanos for owners, _, nanos in self.spent_nanos if owner_id in owners)},
            )
            for owner_id in owner_ids
        }

    def refusals(self, asked: Limits, tokens: int, nanos: int) -> set[tuple[str, str]]:
        """The levels and limits that refuse a request now; limits of a month only if no other one does."""
        now, soon, late = self.clock.now(), set(), set()
        for owner in asked.owners:
            quota, mine = owner.quota, [one for one in self.requests if owner.owner_id in one.owners]
            window = [one for one in mine if now < one.at + 60]
            running = [one for one in mine if one.is_running]
            ended = [entry for entry in self.spent_nanos if owner.owner_id in entry[0]]
            checks = {
                "requests_per_minute": (len(window) + 1, quota.requests_per_minute),
                "tokens_per_minute": (sum(one.tokens for one in window) + tokens, quota.tokens_per_minute),
                "max_concurrent_requests": (len(running) + 1, quota.max_concurrent_requests),
            }
            soon |= {
                (str(owner.level), name) for name, (used, most) in checks.items() if most is not None and used > most
            }
            month_tokens = sum(one.tokens for one in running) + sum(entry[1] for entry in ended) + tokens
            month_nanos = sum(one.nanos for one in running) + sum(entry[2] for entry in ended) + nanos
            if quota.monthly_tokens is not None and month_tokens > quota.monthly_tokens:
                late.add((str(owner.level), "monthly_tokens"))
            if quota.monthly_budget is not None and month_nanos > Decimal(quota.monthly_budget) * 10**9:
                late.add((str(owner.level), "monthly_budget"))
        return soon or late


def quotas_with(most: int) -> st.SearchStrategy[Quota]:
    few = st.one_of(st.none(), st.none(), st.integers(1, most))
    money = st.one_of(st.none(), st.integers(1, 400).map(lambda nanos: f"0.{nanos:06}"))
    return st.builds(
        lambda requests, tokens, running, month, budget: Quota(
            requests_per_minute=requests,
            tokens_per_minute=None if tokens is None else 40 * tokens,
            max_concurrent_requests=running,
            monthly_tokens=None if month is None else 60 * month,
            monthly_budget=budget,
            currency="USD",
        ),
        few,
        few,
        few,
        few,
        money,
    )


steps = st.builds(
    Step,
    seconds=st.sampled_from([0, 0, 0, 1, 20, 61]),
    verb=st.sampled_from(["reserve", "reserve", "reserve", "settle", "refund"]),
    tokens=st.integers(0, 50),
    nanos=st.integers(0, 60_000),
    which=st.integers(0, 20),
    key=st.integers(0, 3),
)
four = st.tuples(quotas_with(9), quotas_with(7), quotas_with(5), quotas_with(4))


async def follow(
    keeper: QuotaKeeper, ledger: ListedHierarchy, quotas: tuple[Quota, Quota, Quota, Quota], history: list[Step]
) -> None:
    """Runs a history on the keeper and on the list. Both decide alike, and an end counts once."""
    known: list[tuple[Reservation, Listed]] = []
    for step in history:
        ledger.clock.advance(step.seconds)
        if step.verb == "reserve":
            asked = limits(*quotas, who=str(step.key % 2), of=str(step.key // 2))
            expected = ledger.refusals(asked, step.tokens, step.nanos)
            attempt = keeper.reserve(asked, step.tokens, cost=ReservedCost(step.nanos, "USD"))
            if expected:
                with pytest.raises(LimitExceeded) as refusal:
                    await attempt
                assert (refusal.value.details["level"], refusal.value.details["limit"]) in expected
                continue
            reservation = await attempt
            owners = tuple(owner.owner_id for owner in asked.owners)
            known.append((reservation, Listed(owners, ledger.clock.now(), step.tokens, step.nanos)))
            ledger.requests.append(known[-1][1])
        elif known:
            reservation, listed = known[step.which % len(known)]
            if step.verb == "settle":
                if listed.is_running:
                    listed.is_running, listed.tokens = False, step.tokens
                    ledger.spent_nanos.append((listed.owners, step.tokens, step.nanos))
                await reservation.settle(step.tokens)
            else:
                if listed.is_running:
                    listed.is_running = False
                    ledger.requests.remove(listed)
                await reservation.refund()


@settings(max_examples=examples(200))
@given(quotas=four, history=st.lists(steps, max_size=50))
def test_the_local_keeper_decides_as_the_list_does(
    quotas: tuple[Quota, Quota, Quota, Quota], history: list[Step]
) -> None:
    """With limits at four levels, the local keeper admits exactly what the list admits, in any order of events."""
    clock = ManualClock()
    ledger = ListedHierarchy(clock)
    keeper = LocalQuotaKeeper(clock, ledger)

    asyncio.run(follow(keeper, ledger, quotas, history))

    keeper.check_integrity()


@pytest.mark.redis
def test_the_redis_keeper_decides_as_the_list_does(redis_url: str, redis_prefix: str) -> None:
    """With limits at four levels, the keeper in Redis admits exactly what the list admits, in any order of events."""

    @settings(max_examples=examples(30))
    @given(quotas=four, history=st.lists(steps, max_size=50))
    def lives_through(quotas: tuple[Quota, Quota, Quota, Quota], history: list[Step]) -> None:
        async def live() -> None:
            clock = ManualClock()
            ledger = ListedHierarchy(clock)
            prefix = f"{redis_prefix}{secrets.token_hex(8)}:"
            keeper = RedisQuotaKeeper(redis_url, prefix, clock, ledger, lease_s=1e6, window_clock=clock)
            try:
                await follow(keeper, ledger, quotas, history)
            finally:
                await keeper.close()

        asyncio.run(live())

    lives_through()
