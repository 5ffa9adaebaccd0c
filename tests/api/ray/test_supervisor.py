"""Tests of the supervisor of a Ray fleet with scripted actors and real leases."""

from dataclasses import dataclass, field, replace

import pytest

from graftwork.api.ray.engine_keeper import KeeperState
from graftwork.api.ray.engine_spec import EngineSpec
from graftwork.api.ray.supervisor import Supervisor, Wanted
from graftwork.api.server.fleets import LeasedMembers
from graftwork.engine.core.load import EngineLoad
from graftwork.engine.fleet.membership import Membership
from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.replicas.demand import EngineDemands
from graftwork.platform.replicas.lease import ReplicaLeases, ReplicaState, ServedVersion
from tests.adapters.adapter_files import DESCRIPTION
from tests.engine.fleet.fake_members import FakeMember

SPEC = EngineSpec({"model": "/m"})
RUNNING = KeeperState(7, 1, is_stopping=False, has_ended=False, last_words="")


@dataclass
class ScriptedActors:
    """Implements EngineActors with engines that take a lease when the test says so."""

    leases: ReplicaLeases
    specs: dict[str, EngineSpec] = field(default_factory=dict)
    states: dict[str, KeeperState] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)

    async def known(self) -> dict[str, int]:
        return {name: spec.generation for name, spec in self.specs.items()}

    async def start(self, replica_id: str, spec: EngineSpec) -> None:
        self.specs[replica_id], self.states[replica_id] = spec, RUNNING

    async def state(self, replica_id: str) -> KeeperState | None:
        return self.states.get(replica_id)

    async def stop(self, replica_id: str) -> None:
        self.stopped.append(replica_id)

    async def forget(self, replica_id: str) -> None:
        del self.specs[replica_id], self.states[replica_id]

    async def get_ready(self) -> None:
        """Lets all engines that start take their leases."""
        present = {one.replica_id for one in await self.leases.present()}
        for name, spec in self.specs.items():
            if name not in present:
                lease = await self.leases.claim(name, f"{name}:1", spec.generation)
                served = ServedVersion("m", f"sha256:{spec.generation}", "1")
                await self.leases.note_ready(lease, served)

    async def end_stopped(self) -> None:
        """Lets all engines that were stopped end."""
        for name in {*self.stopped} & {*self.specs}:
            self.states[name] = replace(RUNNING, process_id=None, is_stopping=True, has_ended=True)
            (lease,) = [one for one in await self.leases.present() if one.replica_id == name]
            await self.leases.end(lease)
        self.stopped.clear()


@pytest.fixture
def actors(sqlite_database: Database, manual_clock: ManualClock) -> ScriptedActors:
    return ScriptedActors(ReplicaLeases(sqlite_database, 30.0, manual_clock))


@pytest.fixture
def supervisor(actors: ScriptedActors, manual_clock: ManualClock) -> Supervisor:
    return Supervisor("f", Wanted(SPEC, 2), actors, actors.leases, manual_clock)


async def test_engines_start_and_surplus_ones_stop(actors: ScriptedActors, supervisor: Supervisor) -> None:
    """The fleet gets its engines; after a smaller number one drains, and its id is free when it has ended."""
    await supervisor.look()
    await supervisor.look()
    assert [(one.replica_id, one.state) for one in supervisor.status()] == [("f-0", "starting"), ("f-1", "starting")]
    await actors.get_ready()
    supervisor.set_replicas(1)
    await supervisor.look()
    assert actors.stopped == ["f-0"]
    await supervisor.look()
    assert {one.replica_id: one.state for one in supervisor.status()} == {"f-0": "draining", "f-1": "ready"}

    await actors.end_stopped()
    supervisor.set_replicas(2)
    await supervisor.look()

    assert sorted(actors.specs) == ["f-0", "f-1"]
    assert actors.stopped == []


async def test_an_upgrade_replaces_engines_one_by_one(actors: ScriptedActors, supervisor: Supervisor) -> None:
    """At each look of a roll-out two engines are ready, and at the end both are of the next generation."""
    await supervisor.look()
    await actors.get_ready()
    assert supervisor.upgrade(EngineSpec({"model": "/m2"})) == 2

    for _ in range(20):
        await supervisor.look()
        ready = [one for one in await actors.leases.present() if one.state is ReplicaState.READY]
        assert len([one for one in ready if one.replica_id not in actors.stopped]) >= 2
        assert len(actors.specs) <= 3
        await actors.get_ready()
        await actors.end_stopped()

    assert {one.generation for one in actors.specs.values()} == {2}
    assert {one.values["model"] for one in actors.specs.values()} == {"/m2"}
    assert len(actors.specs) == 2


async def test_an_upgrade_that_does_not_start_leaves_the_former_engines(
    actors: ScriptedActors, supervisor: Supervisor
) -> None:
    """If no new engine gets ready, no former one stops, and the status says what the new one said."""
    await supervisor.look()
    await actors.get_ready()
    supervisor.upgrade(EngineSpec({"model": "/broken"}))
    for _ in range(5):
        await supervisor.look()
        actors.states["f-2"] = replace(RUNNING, last_words="no such model")

    assert actors.stopped == []
    assert [(one.replica_id, one.problem) for one in supervisor.status() if one.problem] == [("f-2", "no such model")]


async def test_engines_that_outlived_ray_are_adopted(actors: ScriptedActors, supervisor: Supervisor) -> None:
    """Engines of a former Ray keep their ids and their generation, and no other is started beside them."""
    for name in ("f-0", "f-1"):
        lease = await actors.leases.claim(name, f"{name}:1", 5)
        await actors.leases.note_ready(lease, ServedVersion("m", "sha256:5", "1"))

    await supervisor.look()
    await supervisor.look()

    assert {name: spec.generation for name, spec in actors.specs.items()} == {"f-0": 5, "f-1": 5}
    assert actors.stopped == []
    assert supervisor.wanted.spec.generation == 5


async def test_a_fleet_ends_when_its_last_engine_has_drained(actors: ScriptedActors, supervisor: Supervisor) -> None:
    """A fleet of no engines is empty only after all have ended."""
    await supervisor.look()
    await actors.get_ready()
    supervisor.set_replicas(0)
    await supervisor.look()
    assert sorted(actors.stopped) == ["f-0", "f-1"]
    assert not supervisor.is_empty

    await actors.end_stopped()
    await supervisor.look()

    assert supervisor.is_empty
    assert actors.specs == {}


async def test_a_fleet_of_none_starts_an_engine_that_is_asked_for(
    actors: ScriptedActors, sqlite_database: Database, manual_clock: ManualClock
) -> None:
    """A fleet from 0 engines offers to start one, starts it when a gateway asks, and ends it when nothing needs it."""
    demands = EngineDemands(sqlite_database, "m", 30.0, manual_clock)
    engine = FakeMember(replace(DESCRIPTION, epoch=1), EngineLoad(free_pages=DESCRIPTION.device_pages))
    membership = Membership(LeasedMembers(actors.leases), lambda address: engine, manual_clock, 1000.0)
    spec = EngineSpec({"model": "/m", "scale_down_after_s": "60"})
    wanted = Wanted(spec, 0, most=2)
    supervisor = Supervisor("f", wanted, actors, actors.leases, manual_clock, membership, demands)
    assert not await demands.is_offered()
    await supervisor.look()
    assert await demands.is_offered()
    assert not actors.specs

    await demands.ask()
    await supervisor.look()
    assert [*actors.specs] == ["f-0"]
    await actors.get_ready()
    await membership.start()
    for _ in range(70):
        manual_clock.advance(1.0)
        for replica in await actors.leases.present():
            await actors.leases.renew(replica)
        await supervisor.look()

    assert actors.stopped[0] == "f-0"
    await membership.close()
