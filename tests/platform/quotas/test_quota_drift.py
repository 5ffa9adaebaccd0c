"""A property test of the counts in Redis: over any order of ends, duplicates and crashes of three gateways they stay exact."""

import asyncio
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import LimitExceeded
from graftwork.platform.ids import OrganisationId, TenantId
from graftwork.platform.quotas.budget import ReservedCost
from graftwork.platform.quotas.limits import Level, Limits, OwnerLimits
from graftwork.platform.quotas.quotas import Quota, RedisQuotaKeeper
from graftwork.platform.quotas.redis_quotas import LEASE_S, RedisReservation
from tests.hypothesis_profiles import examples
from tests.platform.quotas.test_quotas_against_a_list import EmptyLedger

TENANT = TenantId("ten_acme")
SCRIPT = Path(__file__).parents[3] / "platform" / "quotas" / "quotas.lua"
NAMES = ("log", "tokens", "running", "held", "sums", "answers", "ended", "costs")
LIMIT, MINUTE_S = 6, 60.0
GROUP = OrganisationId("org_1")
LIMITS = Limits(
    TENANT,
    (
        OwnerLimits(Level.ORGANISATION, GROUP, Quota(max_concurrent_requests=LIMIT)),
        OwnerLimits(Level.TENANT, TENANT, Quota()),
    ),
    GROUP,
)
NANOS = 2**60
"""The cost of each answer: six of them have more digits than a double, and fit 64 bits."""


def keys_of(prefix: str, owner: str) -> list[str]:
    return [f"{prefix}quota:{{{GROUP}}}:{'' if owner == GROUP else owner + ':'}{name}" for name in NAMES]


@dataclass(eq=False)
class Known:
    """A request that was admitted, as it really was."""

    gateway: int
    reservation: RedisReservation | None
    """None after the crash of its gateway."""
    entry_id: str
    made_at: float
    tokens: int
    answers: int
    nanos: int
    free_at: float | None = None
    """When its places are free; None while it runs."""
    is_refunded: bool = False
    ended_by: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Event:
    """Time passes, in which living gateways renew, and then something happens."""

    verb: str
    seconds: int
    which: int
    tokens: int


events = st.builds(
    Event,
    verb=st.sampled_from(["reserve", "reserve", "reserve", "settle", "refund", "again", "crash", "wait"]),
    seconds=st.sampled_from([0, 0, 1, 7, 20]),
    which=st.integers(0, 40),
    tokens=st.integers(0, 90),
)


class ThreeGateways:
    """Three keepers on one Redis, and a list of what they have admitted."""

    def __init__(self, url: str, prefix: str) -> None:
        self.url, self.prefix, self.clock = url, prefix, ManualClock()
        self.keepers = [self.start() for _ in range(3)]
        self.old: list[RedisQuotaKeeper] = []
        self.known: list[Known] = []
        self.redis = Redis.from_url(url, decode_responses=True)
        self.script = self.redis.register_script(SCRIPT.read_text())

    def start(self) -> RedisQuotaKeeper:
        return RedisQuotaKeeper(self.url, self.prefix, self.clock, EmptyLedger(), window_clock=self.clock)

    def holding(self) -> list[Known]:
        now = self.clock.monotonic()
        return [one for one in self.known if one.free_at is None or one.free_at > now]

    async def reserve(self, event: Event) -> None:
        gateway, answers = event.which % 3, 1 + event.which % 2
        fits = sum(one.answers for one in self.holding()) + answers <= LIMIT
        try:
            cost = ReservedCost(answers * NANOS + event.tokens, "USD")
            reservation = await self.keepers[gateway].reserve(LIMITS, event.tokens, answers, cost)
        except LimitExceeded:
            assert not fits
            return
        assert fits
        now = self.clock.monotonic()
        nanos = answers * NANOS + event.tokens
        self.known.append(Known(gateway, reservation, reservation.entry_id, now, event.tokens, answers, nanos))

    async def end(self, event: Event) -> None:
        """Ends a request by its own gateway. The first end counts."""
        living = [one for one in self.known if one.reservation is not None]
        if not living:
            return
        one = living[event.which % len(living)]
        assert one.reservation is not None
        if event.verb == "settle":
            await one.reservation.settle(event.tokens)
        else:
            await one.reservation.refund()
        if one.free_at is None:
            one.free_at = self.clock.monotonic()
            one.tokens, one.is_refunded = event.tokens, event.verb == "refund"
            one.ended_by.append(event.verb)

    async def send_again(self, event: Event) -> None:
        """Sends the end of a request a second time, as a network does. It must change nothing while it is remembered."""
        now = self.clock.monotonic()
        ended = [one for one in self.known if one.ended_by and one.free_at is not None and now < one.free_at + LEASE_S]
        if ended:
            one = ended[event.which % len(ended)]
            keys = keys_of(self.prefix, GROUP) + keys_of(self.prefix, TENANT)
            times = [round(seconds * 1e6) for seconds in (now, MINUTE_S, LEASE_S)]
            await self.script(keys=keys, args=[one.ended_by[0], *times, one.entry_id, event.tokens])

    def crash(self, event: Event) -> None:
        """A gateway dies without a word, and another starts. Its places are free when their leases end."""
        gateway = event.which % 3
        self.old.append(self.keepers[gateway])
        self.keepers[gateway] = self.start()
        for one in self.known:
            if one.gateway == gateway and one.reservation is not None:
                one.reservation = None
                if one.free_at is None:
                    one.free_at = self.clock.monotonic() + LEASE_S

    async def check(self) -> None:
        """Compares the sums of both owners in Redis with those of the list."""
        await self.script(
            keys=keys_of(self.prefix, GROUP) + keys_of(self.prefix, TENANT),
            args=["renew", *(round(seconds * 1e6) for seconds in (self.clock.monotonic(), MINUTE_S, LEASE_S))],
        )
        now = self.clock.monotonic()
        window = [one for one in self.known if one.made_at + MINUTE_S > now and not one.is_refunded]
        expected = {
            "answers": sum(one.answers for one in self.holding()),
            "window": sum(one.tokens for one in window),
            "cost": sum(one.nanos for one in self.holding()),
        }
        for owner in (GROUP, TENANT):
            sums = await self.redis.hgetall(keys_of(self.prefix, owner)[NAMES.index("sums")])
            assert {name: int(sums.get(name, 0)) for name in expected} == expected

    async def meet(self, event: Event) -> None:
        """Lets time pass, renews, and does what the event says."""
        self.clock.advance(event.seconds)
        for keeper in self.keepers:
            await keeper.keep_alive()
        match event.verb:
            case "reserve":
                await self.reserve(event)
            case "settle" | "refund":
                await self.end(event)
            case "again":
                await self.send_again(event)
            case "crash":
                self.crash(event)

    async def rest(self) -> None:
        """Lets two minutes pass, after which only what still runs may count."""
        self.clock.advance(2 * MINUTE_S)
        self.known = [one for one in self.known if one.reservation is not None and one.free_at is None]
        for keeper in self.keepers:
            await keeper.keep_alive()

    async def close(self) -> None:
        for keeper in (*self.keepers, *self.old):
            await keeper.close()
        await self.redis.aclose()


async def follow(url: str, prefix: str, history: list[Event]) -> None:
    gateways = ThreeGateways(url, prefix)
    try:
        for event in history:
            await gateways.meet(event)
            await gateways.check()
        await gateways.rest()
        await gateways.check()
    finally:
        await gateways.close()


@pytest.mark.redis
def test_settle_and_refund_never_drift(redis_url: str, redis_prefix: str) -> None:
    """Three gateways admit exactly what fits, and the sums in Redis are those of the requests, after any history."""

    @settings(max_examples=examples(60))
    @given(history=st.lists(events, max_size=30))
    def lives_through(history: list[Event]) -> None:
        asyncio.run(follow(redis_url, f"{redis_prefix}{secrets.token_hex(8)}:", history))

    lives_through()
