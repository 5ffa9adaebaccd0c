"""Tests of the leases of engines on both databases."""

from dataclasses import replace

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, NotFound
from graftwork.platform.replicas.lease import FENCED, MISMATCH, Replica, ReplicaLeases, ReplicaState, ServedVersion

SERVED = ServedVersion("llama", "sha256:aa", "1.0")
LEASE_S = 10.0


@pytest.fixture
def leases(database: Database, manual_clock: ManualClock) -> ReplicaLeases:
    return ReplicaLeases(database, LEASE_S, manual_clock)


async def states(leases: ReplicaLeases) -> dict[str, tuple[int, str]]:
    return {one.replica_id: (one.epoch, one.state.value) for one in await leases.present()}


async def test_an_engine_starts_gets_ready_drains_and_goes(leases: ReplicaLeases) -> None:
    """The states of an engine follow each other, and a drained engine stays so when it reports that it is ready."""
    engine = await leases.claim("one", "unix:/one")
    assert engine == Replica("one", 1, "unix:/one", None, ReplicaState.STARTING)
    assert await leases.present() == [engine]

    await leases.note_ready(engine, SERVED)
    assert await leases.renew(engine) is ReplicaState.READY
    assert await leases.present() == [replace(engine, served=SERVED, state=ReplicaState.READY)]
    drained = await leases.drain("one")
    await leases.note_ready(engine, SERVED)

    assert drained.state is await leases.renew(engine) is ReplicaState.DRAINING
    await leases.end(engine)
    assert await leases.present() == []


async def test_a_second_engine_under_an_id_fences_the_first(leases: ReplicaLeases) -> None:
    """A new claim has the next epoch; the former engine can neither renew, nor end, nor change the new one's lease."""
    first = await leases.claim("one", "unix:/one")

    second = await leases.claim("one", "unix:/two")

    assert (first.epoch, second.epoch) == (1, 2)
    with pytest.raises(Conflict, match="epoch 1 of the replica one, which has epoch 2") as fenced:
        await leases.renew(first)
    assert fenced.value.code == FENCED
    with pytest.raises(Conflict):
        await leases.note_ready(first, SERVED)
    await leases.end(first)
    assert await states(leases) == {"one": (2, "starting")}


async def test_a_silent_engine_is_gone_and_its_epoch_is_not_given_again(
    leases: ReplicaLeases, manual_clock: ManualClock
) -> None:
    """After a lease without renewal an engine is not present and cannot be drained; its id keeps counting epochs."""
    one = await leases.claim("one", "unix:/one")
    two = await leases.claim("two", "unix:/two")
    manual_clock.advance(0.6 * LEASE_S)
    await leases.renew(two)
    manual_clock.advance(0.6 * LEASE_S)

    assert await states(leases) == {"two": (1, "starting")}
    with pytest.raises(NotFound):
        await leases.drain("one")
    assert (await leases.claim("one", "unix:/one")).epoch == one.epoch + 1


async def test_a_renewal_brings_a_silent_engine_back(leases: ReplicaLeases, manual_clock: ManualClock) -> None:
    """An engine that could not renew for a while keeps its epoch, as long as nobody has claimed its id."""
    engine = await leases.claim("one", "unix:/one")
    manual_clock.advance(3 * LEASE_S)
    assert await leases.present() == []

    await leases.renew(engine)

    assert await states(leases) == {"one": (1, "starting")}


@pytest.mark.parametrize(
    "other", [ServedVersion("llama", "sha256:bb", "1.0"), ServedVersion("llama", "sha256:aa", "2")]
)
async def test_other_weights_or_another_version_under_one_name_are_refused(
    leases: ReplicaLeases, other: ServedVersion
) -> None:
    """The refusal names both fingerprints and versions. Under another name, or beside a draining engine, it may start."""
    one = await leases.claim("one", "unix:/one")
    two = await leases.claim("two", "unix:/two")
    await leases.note_ready(one, SERVED)

    with pytest.raises(Conflict) as refused:
        await leases.note_ready(two, other)
    assert refused.value.code == MISMATCH
    for part in (SERVED.fingerprint, other.fingerprint, SERVED.version, other.version):
        assert part in refused.value.message
    await leases.note_ready(two, ServedVersion("mistral", other.fingerprint, other.version))
    await leases.drain("one")
    await leases.note_ready(await leases.claim("three", "unix:/three"), other)

    assert await states(leases) == {"one": (1, "draining"), "two": (1, "ready"), "three": (1, "ready")}


async def test_an_engine_may_come_back_with_other_weights(leases: ReplicaLeases) -> None:
    """An engine that is alone under its name is not held to what it served before."""
    await leases.note_ready(await leases.claim("one", "unix:/one"), SERVED)

    await leases.note_ready(await leases.claim("one", "unix:/one"), ServedVersion("llama", "sha256:bb", "2"))

    assert await states(leases) == {"one": (2, "ready")}


async def test_the_next_generation_replaces_engines_one_by_one(leases: ReplicaLeases) -> None:
    """Another version may start in the next generation beside the present one; a generation that is over is refused."""
    newer = ServedVersion("llama", "sha256:bb", "2")
    one, two, three = [await leases.claim(name, f"unix:/{name}", 1) for name in ("one", "two", "three")]
    await leases.note_ready(one, SERVED)

    await leases.note_ready(await leases.claim("four", "unix:/four", 2), newer)
    await leases.note_ready(two, SERVED)  # one of the old ones starts again while others of its kind serve
    await leases.drain("one")
    await leases.drain("two")
    with pytest.raises(Conflict, match=r"generation 2 with sha256:bb.*generation 1 with sha256:aa") as over:
        await leases.note_ready(three, SERVED)
    with pytest.raises(Conflict, match="--generation 3"):
        await leases.note_ready(await leases.claim("three", "unix:/three", 2), SERVED)
    await leases.note_ready(await leases.claim("three", "unix:/three", 3), SERVED)

    assert over.value.code == MISMATCH
    assert [(one.replica_id, one.generation) for one in await leases.present() if one.state is ReplicaState.READY] == [
        ("four", 2),
        ("three", 3),
    ]


async def test_only_the_present_epoch_drains_itself(leases: ReplicaLeases) -> None:
    """An engine whose id was taken cannot let the engine that took it drain."""
    former = await leases.claim("one", "unix:/one")
    await leases.claim("one", "unix:/other")

    with pytest.raises(NotFound):
        await leases.drain("one", former.epoch)

    assert await states(leases) == {"one": (2, "starting")}


async def test_an_engine_that_started_without_the_database_gets_its_lease_later(leases: ReplicaLeases) -> None:
    """An engine whose supervisor counted its epoch on replaces the row of its former epoch when it renews."""
    first = await leases.claim("one", "unix:/one")
    second = replace(first, epoch=2, state=ReplicaState.READY, served=SERVED)

    await leases.renew(second)

    assert await leases.present() == [second]
    with pytest.raises(Conflict):
        await leases.renew(first)


async def test_unknown_replicas_cannot_drain(leases: ReplicaLeases) -> None:
    """There is no replica that never started."""
    with pytest.raises(NotFound, match="nowhere"):
        await leases.drain("nowhere")
