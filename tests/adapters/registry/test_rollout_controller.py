"""Tests of roll-outs on both databases, with gateways that count, a clock moved by hand, and a real registry."""

from dataclasses import dataclass
from typing import Any

import pytest

from graftwork.adapters.format.specs import AliasTarget
from graftwork.adapters.registry.rollout import RolloutLimits, RolloutState, RolloutStep
from graftwork.adapters.registry.rollout_controller import LEASE_S, TICK_S, RolloutController
from graftwork.adapters.registry.rollouts import NewRollout
from graftwork.platform.activity.meter import ActivityMeter, RequestOwner
from graftwork.platform.errors import Conflict, NotFound
from graftwork.platform.ids import TenantId
from graftwork.platform.pagination import PageRequest
from tests.adapters.registry.two_tenants import TwoTenants

STEPS = (RolloutStep(10, 60), RolloutStep(50, 60))


@dataclass
class CountingGateway:
    """A gateway as roll-outs see it: it counts how requests end, and has a controller."""

    meter: ActivityMeter
    controller: RolloutController

    @classmethod
    def over(cls, two_tenants: TwoTenants, gateway_id: str) -> "CountingGateway":
        meter = ActivityMeter(two_tenants.clock)
        keeper = two_tenants.registry.rollouts
        outcomes = meter.outcomes
        return cls(meter, RolloutController(two_tenants.database, keeper, outcomes, gateway_id, two_tenants.clock))

    def serve(
        self, version: int, count: int = 1, *, fails: bool = False, refuses: bool = False, first: float = 0.1
    ) -> None:
        for _ in range(count):
            watch = self.meter.begin(RequestOwner(TenantId("ten_a"), f"bot@{version}"), "default")
            if fails or refuses:
                watch.failed("broken", by_server=fails)
            else:
                watch.admitted({"recomputed": 5})
                watch.first_tokens(1, first)
                watch.ended_well(None)
            watch.end()


class Rollouts:
    """A tenant with three versions of `bot`, of which the alias `prod` leads to the first, and two gateways."""

    def __init__(self, two_tenants: TwoTenants) -> None:
        self.tenants = two_tenants
        self.registry, self.a = two_tenants.registry, two_tenants.a
        self.clock = two_tenants.clock
        self.one = CountingGateway.over(two_tenants, "gateway_one")
        self.two = CountingGateway.over(two_tenants, "gateway_two")
        self.id = ""

    async def start(self, version: int = 2, **limits: Any) -> None:
        new = NewRollout("prod", version, STEPS, RolloutLimits(**limits))
        self.id = (await self.registry.rollouts.start(self.a, "bot", new, actor="key_1")).id

    async def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.advance(TICK_S)
            await self.one.controller.tick()
            await self.two.controller.tick()

    async def now(self) -> tuple[RolloutState, int, tuple[tuple[int, float], ...]]:
        """The roll-out's state and step, and the target of the alias."""
        rollout, _ = await self.registry.rollouts.get(self.a, "bot", self.id)
        target = (await self.registry.get(self.a, "bot")).aliases["prod"]
        return rollout.state, rollout.step, target.weights


@pytest.fixture
async def rollouts(two_tenants: TwoTenants) -> Rollouts:
    for seed in range(3):
        await two_tenants.publish(seed=seed)
    await two_tenants.registry.aliases.set(two_tenants.a, "bot", "prod", AliasTarget.to_version(3))
    await two_tenants.registry.aliases.set(two_tenants.a, "bot", "prod", AliasTarget.to_version(1))
    return Rollouts(two_tenants)


async def test_a_good_version_takes_over_step_by_step(rollouts: Rollouts) -> None:
    """A good version goes through all steps, each for its time, and then has the alias alone."""
    await rollouts.start()
    seen = [await rollouts.now()]
    for _ in range(2):
        await rollouts.tick()
        rollouts.one.serve(1, 90)
        rollouts.one.serve(2, 10)
        await rollouts.tick(57)
        seen.append(await rollouts.now())
        await rollouts.tick(3)
        seen.append(await rollouts.now())

    assert seen == [
        (RolloutState.RUNNING, 0, ((1, 90), (2, 10))),
        (RolloutState.RUNNING, 0, ((1, 90), (2, 10))),
        (RolloutState.RUNNING, 1, ((1, 50), (2, 50))),
        (RolloutState.RUNNING, 1, ((1, 50), (2, 50))),
        (RolloutState.COMPLETED, 1, ((2, 1.0),)),
    ]


@pytest.mark.parametrize(
    "broken", [{"fails": True}, {"refuses": True}, {"first": 1.0}], ids=["errors", "refusals", "latency"]
)
async def test_a_broken_version_is_rolled_back_within_ten_seconds(rollouts: Rollouts, broken: dict[str, Any]) -> None:
    """A version that breaks a limit gives the alias back within 10 s, by the counts of both gateways together."""
    await rollouts.start()
    await rollouts.tick()
    broke_at = rollouts.clock.now()
    for gateway in (rollouts.one, rollouts.two):  # neither has enough requests for a verdict by itself
        gateway.serve(1, 50)
        gateway.serve(2, 6, **broken)
    while (await rollouts.now())[0] is RolloutState.RUNNING:
        await rollouts.tick()
        assert rollouts.clock.now() - broke_at < 10

    assert await rollouts.now() == (RolloutState.ROLLED_BACK, 0, ((1, 1.0),))
    rollout, figures = await rollouts.registry.rollouts.get(rollouts.a, "bot", rollouts.id)
    assert rollout.reason is not None
    assert {version: each.requests for version, each in figures.items()} == {1: 100, 2: 12}


async def test_a_version_that_breaks_in_a_later_step_is_rolled_back(rollouts: Rollouts) -> None:
    """Each step is judged by its own figures, so good ones of an earlier step do not hide bad ones."""
    await rollouts.start()
    await rollouts.tick()
    rollouts.one.serve(1, 9000)
    rollouts.one.serve(2, 1000)
    await rollouts.tick(60)
    assert (await rollouts.now())[1] == 1

    rollouts.one.serve(2, 12, fails=True)
    await rollouts.tick(2)

    assert (await rollouts.now())[0] is RolloutState.ROLLED_BACK


async def test_another_gateway_goes_on_when_one_stops(rollouts: Rollouts) -> None:
    """If the gateway with the lease stops, another rolls back within 10 s, with what the first one had counted."""
    await rollouts.start()
    await rollouts.one.controller.tick()
    await rollouts.two.controller.tick()
    rollouts.one.serve(1, 90)
    rollouts.one.serve(2, 5, fails=True)
    await rollouts.one.controller.tick()  # its last
    rollouts.two.serve(2, 5, fails=True)
    stopped_at = rollouts.clock.now()
    while (await rollouts.now())[0] is RolloutState.RUNNING:
        rollouts.clock.advance(TICK_S)
        await rollouts.two.controller.tick()
        assert rollouts.clock.now() - stopped_at < 10

    assert rollouts.clock.now() - stopped_at > LEASE_S
    assert (await rollouts.now())[0] is RolloutState.ROLLED_BACK


async def test_a_gateway_that_starts_goes_on_with_the_step(rollouts: Rollouts) -> None:
    """After a restart of all gateways, the roll-out goes on with the step and the figures that it had."""
    await rollouts.start()
    await rollouts.tick()
    rollouts.one.serve(1, 90)
    rollouts.one.serve(2, 10)
    await rollouts.tick(30)
    started = CountingGateway.over(rollouts.tenants, "gateway_new")
    for _ in range(28):
        rollouts.clock.advance(TICK_S)
        await started.controller.tick()
    before = await rollouts.now()
    rollouts.clock.advance(TICK_S)
    await started.controller.tick()

    assert (before[1], (await rollouts.now())[1]) == (0, 1)


async def test_whoever_moves_the_alias_ends_the_roll_out(rollouts: Rollouts) -> None:
    """A promotion by hand cancels the roll-out at its next change, and the alias stays where the hand put it."""
    await rollouts.start()
    await rollouts.tick()
    await rollouts.registry.aliases.set(rollouts.a, "bot", "prod", AliasTarget.to_version(3), actor="key_9")
    rollouts.one.serve(2, 20, fails=True)
    await rollouts.tick()

    assert await rollouts.now() == (RolloutState.CANCELLED, 0, ((3, 1.0),))
    rollout, _ = await rollouts.registry.rollouts.get(rollouts.a, "bot", rollouts.id)
    assert rollout.reason == "the alias was moved by key_9"


async def test_a_rollback_by_hand_goes_to_before_the_roll_out(rollouts: Rollouts) -> None:
    """After a roll-out was completed, a rollback leads to the stable version, and not to one of the steps."""
    await rollouts.start()
    for _ in range(2):
        await rollouts.tick()
        rollouts.one.serve(2, 10)
        await rollouts.tick(60)
    assert (await rollouts.now())[0] is RolloutState.COMPLETED

    change = await rollouts.registry.aliases.roll_back(rollouts.a, "bot", "prod")

    assert change.target == AliasTarget.to_version(1)


async def test_a_rollback_after_a_rolled_back_roll_out_goes_further_back(rollouts: Rollouts) -> None:
    """A roll-out that was cancelled leaves the alias's past as it was: a rollback leads to what was before version 1."""
    await rollouts.start()
    cancelled = await rollouts.registry.rollouts.cancel(rollouts.a, "bot", rollouts.id, actor="key_1")

    change = await rollouts.registry.aliases.roll_back(rollouts.a, "bot", "prod")

    assert cancelled.state is RolloutState.CANCELLED
    assert (change.previous, change.target) == (AliasTarget.to_version(1), AliasTarget.to_version(3))
    with pytest.raises(Conflict):
        await rollouts.registry.rollouts.cancel(rollouts.a, "bot", rollouts.id)


async def test_what_cannot_be_rolled_out_is_refused(rollouts: Rollouts) -> None:
    """A second roll-out, an alias without one stable version, the same version, and an unknown one are refused."""
    keeper, a, b = rollouts.registry.rollouts, rollouts.a, rollouts.tenants.b
    refused = [
        (a, "bot", NewRollout("prod", 1, STEPS), "no_stable_version"),
        (a, "bot", NewRollout("beta", 2, STEPS), "no_stable_version"),
        (a, "bot", NewRollout("prod", 9, STEPS), "version_not_found"),
        (b, "bot", NewRollout("prod", 2, STEPS), "adapter_not_found"),
    ]
    for scope, name, new, code in refused:
        with pytest.raises((Conflict, NotFound)) as caught:
            await keeper.start(scope, name, new)
        assert caught.value.code == code
    await rollouts.start()
    with pytest.raises(Conflict) as caught:
        await keeper.start(a, "bot", NewRollout("prod", 3, STEPS))
    assert caught.value.code == "rollout_running"
    for act in (
        keeper.get(b, "bot", rollouts.id),
        keeper.cancel(b, "bot", rollouts.id),
        keeper.get(a, "no", rollouts.id),
    ):
        with pytest.raises(NotFound):
            await act


async def test_roll_outs_are_listed_and_audited(rollouts: Rollouts) -> None:
    """Each change of a roll-out is in the audit log with who made it, and roll-outs are listed in pages."""
    keeper, a = rollouts.registry.rollouts, rollouts.a
    await rollouts.start()
    first = rollouts.id
    await keeper.cancel(a, "bot", first, actor="key_2")
    await rollouts.start()
    await rollouts.tick()
    rollouts.one.serve(2, 10)
    await rollouts.tick(60)
    rollouts.one.serve(2, 10, fails=True)
    await rollouts.tick(2)

    newest = await keeper.list(a, "bot", PageRequest(limit=1))
    rest = await keeper.list(a, "bot", PageRequest(limit=1, after=newest.items[0][0].id))
    acts = [(who, what) for who, what, _, _ in await rollouts.tenants.audited() if "rollout." in what]

    assert [each.id for each, _ in (*newest.items, *rest.items)] == [rollouts.id, first]
    assert (newest.has_more, rest.has_more) == (True, False)
    assert acts == [
        ("key_1", "adapter.rollout.started"),
        ("key_2", "adapter.rollout.cancelled"),
        ("key_1", "adapter.rollout.started"),
        ("rollout", "adapter.rollout.advanced"),
        ("rollout", "adapter.rollout.rolled_back"),
    ]
    with pytest.raises(NotFound):
        await keeper.list(rollouts.tenants.b, "bot", PageRequest())
    with pytest.raises(NotFound):
        await keeper.list(a, "bot", PageRequest(after="rol_unknown"))
