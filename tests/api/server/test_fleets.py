"""Tests of a gateway with several engines: its routes, its leases, and what each engine is given."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from graftwork.api.server.fleets import LeasedMembers, OfferedEngines
from graftwork.api.server.local_fleet import engine_settings
from graftwork.engine.core.events import PromptAdmitted
from graftwork.engine.core.load import EngineLoad, LoadReport
from graftwork.engine.core.stats import EngineDescription
from graftwork.engine.fleet.client import FleetClient
from graftwork.engine.fleet.members import MemberAddress, StaticMembers
from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.replicas.demand import EngineDemands
from graftwork.platform.replicas.lease import ReplicaLeases, ServedVersion
from graftwork.platform.settings.settings import Settings
from tests.adapters.adapter_files import DESCRIPTION
from tests.api.fake_engine import FakeEngine
from tests.api.in_process_gateway import Gateway, chat, gateway_settings, open_gateway
from tests.engine.fleet.fake_members import FakeMember
from tests.engine.fleet.test_client import request


@dataclass
class FleetEngine(FakeEngine):
    """A scripted engine that reports a load."""

    is_absent: bool = False

    async def describe(self) -> EngineDescription:
        if self.is_absent:
            raise Unavailable("gone", code="engine_unavailable", retry_after_s=1.0)
        return await super().describe()

    async def read_load(self, within_s: float) -> EngineLoad:
        await self.describe()
        return EngineLoad()

    def follow_load(self, note: Callable[[LoadReport], None]) -> None:
        """Sends none."""

    def lose_requests(self) -> None:
        """Has none."""


@dataclass
class FleetGateway:
    """A gateway over two scripted engines."""

    gateway: Gateway
    engines: dict[str, FleetEngine]
    fleet: FleetClient

    async def lose_all(self) -> None:
        """Lets both engines vanish, and the gateway notice it."""
        for name, engine in self.engines.items():
            engine.is_absent = True
            self.fleet.membership.note_lost(self.fleet.membership.members[name], "gone")


@pytest.fixture
async def served(tmp_path: Path, tiny_model: Path) -> AsyncIterator[FleetGateway]:
    engines = {"engine-0": FleetEngine(), "engine-1": FleetEngine()}
    fleet = FleetClient(StaticMembers([*engines]), lambda address: engines[address], ManualClock(), look_every_s=0.0)
    async with open_gateway(gateway_settings(tmp_path, tiny_model), engine=fleet) as gateway:  # type: ignore[arg-type]
        yield FleetGateway(gateway, engines, fleet)


async def test_all_engines_are_listed_and_one_drains(served: FleetGateway) -> None:
    """The list has each engine with its figures; one drains, the last one cannot, and an unknown id is a 404."""
    admin = served.gateway.admin
    listed = (await admin.get("/v1/admin/replicas")).json()["data"]
    assert [(one["id"], one["status"], one["running_requests"]) for one in listed] == [
        ("engine-0", "ready", 1),
        ("engine-1", "ready", 1),
    ]

    drained = await admin.post("/v1/admin/replicas/engine-0/drain")
    last = await admin.post("/v1/admin/replicas/engine-1/drain")
    unknown = await admin.post("/v1/admin/replicas/engine-7/drain")

    assert (drained.status_code, drained.json()["status"]) == (200, "draining")
    assert (last.status_code, last.json()["error"]["code"]) == (409, "only_replica")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "replica_not_found")
    tenant = await served.gateway.tenant()
    for number in range(8):
        assert (await tenant.client.post("/v1/chat/completions", json=chat(f"{number}"))).status_code == 200
    assert [len(engine.requests) for engine in served.engines.values()] == [0, 8]


async def test_without_an_engine_requests_are_a_503_and_sessions_are_readable(served: FleetGateway) -> None:
    """A fleet without a living engine answers 503 with retry-after, shows sessions, and heals by itself."""
    tenant = await served.gateway.tenant()
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    assert (await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "One"})).status_code == 200
    await served.lose_all()

    refused = await tenant.client.post("/v1/chat/completions", json=chat())
    items = await tenant.client.get(f"/v1/sessions/{session}/items")

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_engine")
    assert refused.headers["retry-after"]
    assert [item["role"] for item in items.json()["data"]] == ["user", "assistant"]
    served.engines["engine-1"].is_absent = False
    await served.fleet.membership.wait_for_ready()
    assert (await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "Two"})).status_code == 200


async def test_the_gateways_limits_count_all_engines(served: FleetGateway) -> None:
    """The gateway admits as many requests as both engines together can hold."""
    one = await FleetEngine().describe()

    description = served.gateway.resources.inference.description

    assert one.max_requests is not None
    assert description.max_requests == 2 * one.max_requests


async def test_leases_are_the_list_of_engines(sqlite_database: Database, manual_clock: ManualClock) -> None:
    """Every engine with a lease is a member, with its epoch, and with whether it drains; a silent one is none."""
    leases = ReplicaLeases(sqlite_database, 10.0, manual_clock)
    one, two = await leases.claim("one", "10.0.0.1:9"), await leases.claim("two", "10.0.0.2:9")
    await leases.note_ready(one, ServedVersion("tiny", "sha256:a", "1"))
    await leases.drain("two")

    assert await LeasedMembers(leases).addresses() == [
        MemberAddress("one", "10.0.0.1:9", 1),
        MemberAddress("two", "10.0.0.2:9", 1, is_draining=True),
    ]
    manual_clock.advance(8)
    await leases.renew(two)
    manual_clock.advance(8)
    assert [place.replica_id for place in await LeasedMembers(leases).addresses()] == ["two"]


@pytest.mark.parametrize("replicas", [2, 3])
def test_engines_divide_what_the_settings_give(replicas: int) -> None:
    """All engines together take no more memory and disk than one, and none shares its KV folder."""
    given = Settings(replicas=replicas, device_bytes=900, host_kv_bytes=600, data_dir=Path("/data"))

    own = [engine_settings(given, number) for number in range(replicas)]

    assert sum(one.device_bytes or 0 for one in own) == 900
    assert sum(one.host_kv_bytes or 0 for one in own) == 600
    assert sum(one.memory_share for one in own) == pytest.approx(given.memory_share)
    assert sum(one.disk_kv_bytes or 0 for one in own) <= 2 * 2**30
    folders = [one.kv_dir for one in own]
    assert folders[0] == Path("/data/kv")
    assert len(set(folders)) == replicas
    default = engine_settings(replace(given, device_bytes=None), 0)
    assert default.device_bytes is None


async def test_a_request_waits_while_an_engine_is_offered(sqlite_database: Database, manual_clock: ManualClock) -> None:
    """A gateway without engines refuses a request, unless somebody offers to start one: then the request asks for it in
    the database, and is answered when it has its lease."""
    leases = ReplicaLeases(sqlite_database, 10.0, manual_clock)
    demands = EngineDemands(sqlite_database, "tiny", 10.0, manual_clock)
    source = OfferedEngines(LeasedMembers(leases), demands, manual_clock)
    engine = FakeMember(replace(DESCRIPTION, epoch=1))
    source.fleet = fleet = FleetClient(source, lambda address: engine, manual_clock, look_every_s=0.0)
    with pytest.raises(Unavailable):
        await anext(fleet.generate(request()))

    async def until(condition: Callable[[], Awaitable[bool]]) -> None:
        for _ in range(100_000):
            if await condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("never happened")

    async def waits() -> bool:
        return fleet.demand is not None

    await demands.offer()
    await until(waits)
    answer = asyncio.create_task(anext(fleet.generate(request())))
    await until(demands.was_asked)
    assert not answer.done()
    await leases.note_ready(await leases.claim("one", "one"), ServedVersion("tiny", "sha256:a", "1"))

    assert isinstance(await answer, PromptAdmitted)
    await fleet.close()
