"""Tests of both quota keepers against a reference that keeps every request in a list."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import LimitExceeded
from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.budget import Spent
from graftwork.platform.quotas.limits import Limits
from graftwork.platform.quotas.quotas import LocalQuotaKeeper, Quota, QuotaKeeper, RedisQuotaKeeper, Reservation
from tests.hypothesis_profiles import examples

TENANT = TenantId("ten_acme")


class EmptyLedger:
    async def spent(self, owner_ids: Sequence[str], month: str) -> dict[str, Spent]:
        return {}


@dataclass(frozen=True)
class Step:
    """One event of a history: time passes, then a request arrives or an earlier one ends."""

    quarter_seconds: int
    verb: str
    tokens: int
    which: int


@dataclass(eq=False)
class ListedRequest:
    at: float
    tokens: int
    running: bool = True


class ListQuotaKeeper:
    """The limits by their definition: it counts the list, and finds a wait by trying each later time."""

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self.requests: list[ListedRequest] = []

    def window(self, now: float) -> list[ListedRequest]:
        return [request for request in self.requests if request.at <= now < request.at + 60]

    def refusals(self, tokens: int, now: float, later: float) -> list[str]:
        """The limits that would refuse at `later`, if nothing else happened since `now`."""
        window = [request for request in self.window(now) if later < request.at + 60]
        limits = []
        if self.quota.requests_per_minute is not None and len(window) + 1 > self.quota.requests_per_minute:
            limits.append("requests_per_minute")
        used = sum(request.tokens for request in window)
        if self.quota.tokens_per_minute is not None and used + tokens > self.quota.tokens_per_minute:
            limits.append("tokens_per_minute")
        return limits

    def wait(self, tokens: int, now: float) -> float | None:
        """Seconds until the per-minute limits admit it; 0 is now, None is never."""
        moments = sorted({now} | {request.at + 60 for request in self.window(now)})
        return next((moment - now for moment in moments if not self.refusals(tokens, now, moment)), None)

    def has_slot(self) -> bool:
        running = sum(request.running for request in self.requests)
        return self.quota.max_concurrent_requests is None or running < self.quota.max_concurrent_requests


steps = st.builds(
    Step,
    quarter_seconds=st.sampled_from([0, 0, 0, 1, 4, 40, 100, 239, 240, 300]),
    verb=st.sampled_from(["reserve", "reserve", "reserve", "settle", "refund"]),
    tokens=st.integers(0, 60),
    which=st.integers(0, 20),
)
limit = st.one_of(st.none(), st.integers(1, 6))
quotas = st.builds(
    Quota,
    requests_per_minute=limit,
    tokens_per_minute=st.one_of(st.none(), st.integers(40, 150)),
    max_concurrent_requests=limit,
)


async def follow(keeper: QuotaKeeper, clock: ManualClock, quota: Quota, history: list[Step]) -> None:
    """Runs a history on the keeper and on the reference, and compares every answer."""
    reference = ListQuotaKeeper(quota)
    reservations: list[tuple[Reservation, ListedRequest]] = []
    for step in history:
        clock.advance(step.quarter_seconds / 4)
        if step.verb == "reserve":
            await reserve_in_both(keeper, reference, clock.now(), step.tokens, reservations)
        elif reservations:
            reservation, listed = reservations[step.which % len(reservations)]
            await end_in_both(reservation, reference, listed, step)


async def reserve_in_both(
    keeper: QuotaKeeper,
    reference: ListQuotaKeeper,
    now: float,
    tokens: int,
    reservations: list[tuple[Reservation, ListedRequest]],
) -> None:
    wait, has_slot = reference.wait(tokens, now), reference.has_slot()
    if wait != 0 or not has_slot:
        with pytest.raises(LimitExceeded) as refusal:
            await keeper.reserve(Limits.of_tenant(TENANT, reference.quota), tokens)
        expected = wait if has_slot or wait is None else max(wait, 1.0)
        assert refusal.value.retry_after_s == (None if expected is None else pytest.approx(expected))
        return
    reservation = await keeper.reserve(Limits.of_tenant(TENANT, reference.quota), tokens)
    listed = ListedRequest(now, tokens)
    reference.requests.append(listed)
    reservations.append((reservation, listed))
    headers = reservation.rate_limit_headers()
    window = reference.window(now)
    if reference.quota.tokens_per_minute is not None:
        left = reference.quota.tokens_per_minute - sum(request.tokens for request in window)
        assert headers["x-ratelimit-remaining-tokens"] == str(left)
    if reference.quota.requests_per_minute is not None:
        left = reference.quota.requests_per_minute - len(window)
        assert headers["x-ratelimit-remaining-requests"] == str(left)


async def end_in_both(reservation: Reservation, reference: ListQuotaKeeper, listed: ListedRequest, step: Step) -> None:
    if step.verb == "settle":
        await reservation.settle(step.tokens)
    else:
        await reservation.refund()
    if listed.running:
        listed.running = False
        listed.tokens = step.tokens
        if step.verb == "refund":
            reference.requests.remove(listed)


@settings(max_examples=examples(300))
@given(quota=quotas, history=st.lists(steps, max_size=40))
def test_the_local_keeper_answers_as_the_list_does(quota: Quota, history: list[Step]) -> None:
    """The local keeper's admissions, remainders and waits equal those of the list for random histories."""
    clock = ManualClock()
    keeper = LocalQuotaKeeper(clock, EmptyLedger())

    asyncio.run(follow(keeper, clock, quota, history))

    keeper.check_integrity()


@pytest.mark.redis
def test_the_redis_keeper_answers_as_the_list_does(redis_url: str, redis_prefix: str) -> None:
    """The Redis keeper's admissions, remainders and waits equal those of the list for random histories."""

    @settings(max_examples=examples(40))
    @given(quota=quotas, history=st.lists(steps, max_size=40))
    def lives_through(quota: Quota, history: list[Step]) -> None:
        async def live() -> None:
            clock = ManualClock()
            prefix = f"{redis_prefix}{secrets.token_hex(4)}:"
            keeper = RedisQuotaKeeper(redis_url, prefix, clock, EmptyLedger(), lease_s=1e6, window_clock=clock)
            try:
                await follow(keeper, clock, quota, history)
            finally:
                await keeper.close()

        asyncio.run(live())

    lives_through()
