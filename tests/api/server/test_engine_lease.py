"""Tests of the lease of an engine's process."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from graftwork.api.server.engine_lease import advertised_address, leased
from graftwork.engine.build.engine import Engine, build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.load import EngineLoad
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.engine.rpc.server import EngineServer, with_epoch
from graftwork.platform.database import Database
from graftwork.platform.errors import InternalFailure
from graftwork.platform.replicas.lease import FENCED, MISMATCH, ReplicaLeases, ReplicaState, ServedVersion
from graftwork.platform.settings.settings import Settings
from tests.engine.random_models import FolderSource, make_base
from tests.engine.tagged_kv_cache import load_always

LEASE_S = 1.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def engine(base: Path) -> Engine:
    config = EngineConfig(model=base, dtype="float32", page_tokens=4, device_bytes=4 * 2**20)
    return build_engine(config, lambda _: FolderSource({}, {}), costs=load_always())


@pytest.fixture
async def server(engine: Engine, tmp_path: Path) -> AsyncIterator[EngineServer]:
    server = EngineServer(engine, f"unix:{tmp_path}/engine.sock")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    return Settings(database_url=database_url, lease_s=LEASE_S, replica_id="one", data_dir=tmp_path)


async def ready(leases: ReplicaLeases) -> None:
    """Waits until the engine is ready in the database."""
    for _ in range(100_000):
        if [one.state for one in await leases.present()] == [ReplicaState.READY]:
            return
    raise AssertionError("the engine never got ready")


async def test_an_engine_takes_a_lease_and_ends_when_it_has_drained(
    server: EngineServer, settings: Settings, database: Database, tmp_path: Path
) -> None:
    """The engine says its epoch, is ready in the database, ends once it drains and has no request, and is gone then."""
    leases, client = ReplicaLeases(database, 60.0), GrpcEngineClient(f"unix:{tmp_path}/engine.sock")

    async with asyncio.timeout(60), leased(settings, f"unix:{tmp_path}/engine.sock")(server):
        await ready(leases)
        (present,) = await leases.present()
        description, load = await client.describe(), await client.read_load(10.0)
        assert (present.epoch, description.epoch, load.epoch) == (1, 1, 1)
        assert present.served == ServedVersion(description.model_name, description.fingerprint, description.version)
        await leases.drain("one")
        await server.must_end.wait()

    assert server.death is None
    assert await leases.present() == []
    await client.close()


async def test_a_signal_drains_an_engine_before_it_ends(
    server: EngineServer, settings: Settings, database: Database, tmp_path: Path
) -> None:
    """After SIGTERM the engine drains by its lease and leaves the fleet when it has nothing to do."""
    leases, seen = ReplicaLeases(database, 60.0), list[ReplicaState]()

    async def watch() -> None:
        while not (seen and seen[-1] is ReplicaState.DRAINING):
            seen.extend(one.state for one in await leases.present())

    async with asyncio.timeout(60):
        async with leased(settings, f"unix:{tmp_path}/engine.sock")(server):
            await ready(leases)
            watching = asyncio.create_task(watch())
        await watching

    assert await leases.present() == []


@pytest.mark.parametrize("revision", ["base", "-1"])
async def test_an_engine_waits_for_the_tables(
    server: EngineServer, settings: Settings, database: Database, revision: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that starts before a gateway has made or changed the tables says so, and takes its lease afterwards."""
    await database.downgrade(revision)

    async with asyncio.timeout(60), leased(settings, "unix:/one")(server):
        while not (waits := [one for one in caplog.records if one.message == "engine_without_lease"]):
            await database.current_revision()
        await database.upgrade_to_head()
        await ready(ReplicaLeases(database, 60.0))

    assert "graftwork db upgrade" in vars(waits[0])["reason"]
    assert server.death is None


async def test_an_engine_whose_lease_cannot_be_kept_ends(
    server: EngineServer, settings: Settings, database: Database
) -> None:
    """If the table of leases is gone, no gateway would find the engine again: its process ends with an error."""
    async with asyncio.timeout(60), leased(settings, "unix:/one")(server):
        await ready(ReplicaLeases(database, 60.0))
        await database.downgrade("base")
        await server.has_died.wait()
        await database.upgrade_to_head()

    assert isinstance(server.death, InternalFailure)


async def test_a_second_signal_does_not_wait_for_requests(
    server: EngineServer, engine: Engine, settings: Settings, database: Database
) -> None:
    """A drain that has begun by a signal ends at once by the next one, also if requests run."""
    engine.loop.progress.publish(EngineLoad(running_requests=1))
    settings = replace(settings, lease_s=3600.0)

    async with asyncio.timeout(60):
        async with leased(settings, "unix:/one")(server):
            await ready(ReplicaLeases(database, 60.0))
            server.note_signal()
            asyncio.get_running_loop().call_later(0.1, server.note_signal)

    assert server.must_end_now.is_set()


async def test_an_engine_of_the_next_generation_takes_its_place_beside_others(
    server: EngineServer, settings: Settings, database: Database, tmp_path: Path
) -> None:
    """An engine with other weights and the next generation is ready, and says its generation to gateways."""
    leases, own = ReplicaLeases(database, 60.0), server.description
    client = GrpcEngineClient(f"unix:{tmp_path}/engine.sock")
    other = ServedVersion(own.model_name, "sha256:other", own.version)
    await leases.note_ready(await leases.claim("two", "unix:/two"), other)

    async with asyncio.timeout(60), leased(replace(settings, generation=2), "unix:/one")(server):
        while len([one for one in await leases.present() if one.state is ReplicaState.READY]) < 2:
            continue
        assert (await client.describe()).generation == 2

    await client.close()


async def test_an_engine_whose_id_was_taken_ends(server: EngineServer, settings: Settings, database: Database) -> None:
    """When another engine claims the id, the former one's process ends with an error that says so."""
    leases = ReplicaLeases(database, 60.0)

    async with asyncio.timeout(60), leased(settings, "unix:/one")(server):
        await ready(leases)
        await leases.claim("one", "unix:/other")
        await server.has_died.wait()

    assert server.death is not None
    assert server.death.code == FENCED
    assert [one.epoch for one in await leases.present()] == [2]


async def test_an_engine_with_other_weights_ends(server: EngineServer, settings: Settings, database: Database) -> None:
    """An engine that differs from those under its name is refused with both fingerprints, and its process ends."""
    leases, own = ReplicaLeases(database, 60.0), server.description
    other = ServedVersion(own.model_name, "sha256:other", own.version)
    await leases.note_ready(await leases.claim("two", "unix:/two"), other)

    async with asyncio.timeout(60), leased(settings, "unix:/one")(server):
        await server.has_died.wait()

    assert server.death is not None
    assert server.death.code == MISMATCH
    assert own.fingerprint in server.death.message
    assert "sha256:other" in server.death.message


async def test_a_supervisor_gives_the_epoch(server: EngineServer, tmp_path: Path) -> None:
    """An engine says the epoch that its supervisor has given it."""
    client = GrpcEngineClient(f"unix:{tmp_path}/engine.sock")

    async with with_epoch(7)(server):
        assert (await client.describe()).epoch == 7
    await client.close()


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        ("unix:/a/b.sock", None, "unix:/a/b.sock"),
        ("10.0.0.5:9000", None, "10.0.0.5:9000"),
        ("0.0.0.0:9000", "engine-1:9000", "engine-1:9000"),
    ],
)
def test_gateways_are_told_an_address_that_they_can_reach(listen: str, advertise: str | None, expected: str) -> None:
    """An engine advertises where it listens, unless a setting names another address."""
    assert advertised_address(Settings(advertise=advertise), listen) == expected


def test_a_wildcard_is_no_address() -> None:
    """An engine that listens at all addresses advertises its machine's name."""
    found = advertised_address(Settings(), "0.0.0.0:9000")

    assert found.endswith(":9000")
    assert not found.startswith("0.0.0.0")
