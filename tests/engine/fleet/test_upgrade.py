"""Tests of a fleet in a rolling upgrade: engines of two generations with different weights. Its engines are scripted."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from graftwork.engine.core.load import EngineLoad
from graftwork.engine.fleet.members import MemberAddress
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import IsolationDomain
from tests.engine.fleet.fake_members import FakeMember
from tests.engine.fleet.test_client import NAMES, Fleet, request, the_answer, tokens


@pytest.fixture
async def fleet(manual_clock: ManualClock) -> AsyncIterator[Fleet]:
    fleet = Fleet(manual_clock)
    yield fleet
    await fleet.client.close()


def of_next_generation(engine: FakeMember) -> FakeMember:
    """A scripted engine with other weights and another version, in the next generation."""
    other = replace(engine.description, fingerprint="sha256:" + "9" * 64, version="99", generation=2)
    return FakeMember(other)


async def upgraded(fleet: Fleet, name: str) -> None:
    """Puts an engine of the next generation into the fleet, and waits until it is ready."""
    await fleet.client.describe()
    fleet.engines[name] = of_next_generation(fleet.engines["a"])
    fleet.source.places.append(MemberAddress(name, name))
    await fleet.until(lambda: name in [one.replica_id for one in fleet.client.membership.ready])


async def test_the_next_generation_may_have_other_weights(fleet: Fleet) -> None:
    """In a rolling upgrade, engines of two generations take new requests, and the newer one is what the fleet says."""
    await upgraded(fleet, "d")

    for number in range(40):
        await fleet.answer(request(domain=IsolationDomain(b"%d" % number)))

    assert min(fleet.served().values()) > 0
    assert (await fleet.client.describe()).fingerprint == fleet.engines["d"].description.fingerprint


async def test_no_session_goes_back_in_an_upgrade(fleet: Fleet) -> None:
    """A session that an engine of the newer generation had stays with that generation, however long its queue is."""
    await upgraded(fleet, "d")
    for name in NAMES:
        await fleet.client.replicas.drain(name)
    await fleet.answer(request(session="s"))
    for name in NAMES:
        fleet.client.membership.members[name].is_draining = False
    fleet.engines["d"].load = EngineLoad(queued_tokens=50_000)
    await fleet.until(lambda: fleet.client.membership.members["d"].load.queued_tokens == 50_000)

    await fleet.answer(request(session="s"))
    await fleet.answer(request(session="other", domain=IsolationDomain(b"other")))

    assert fleet.served()["d"] == 2


@pytest.mark.parametrize("emitted", range(1, 6))
async def test_no_answer_goes_on_with_other_weights(fleet: Fleet, emitted: int) -> None:
    """A stream whose engine is lost goes on at an engine with the same weights, or ends with an error that says why."""
    await upgraded(fleet, "d")
    for name in NAMES:
        fleet.engines[name].dies_after = emitted
    fleet.client.membership.members["d"].is_draining = True
    stream = fleet.client.generate(asked := request())
    events = [await anext(stream)]
    fleet.client.membership.members["d"].is_draining = False
    (home,) = [name for name, engine in fleet.engines.items() if engine.requests]
    (heir, other) = [name for name in NAMES if name != home]
    fleet.engines[heir].dies_after = None
    fleet.engines[other].dies_after = None
    events += [event async for event in stream]
    assert tokens(events) == the_answer(asked)
    assert fleet.served()["d"] == 0


async def test_an_answer_whose_weights_are_gone_ends_with_an_error(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no engine with the same weights comes back in time, the stream fails; a request without a token moves on."""
    monkeypatch.setattr("graftwork.engine.fleet.client._MOVE_WITHIN_S", 0.0)
    fleet.source.places = [MemberAddress("a", "a")]
    await upgraded(fleet, "d")
    fleet.client.membership.members["d"].is_draining = True
    fleet.engines["a"].dies_after = 2
    stream = fleet.client.generate(request())
    events = [await anext(stream), await anext(stream), await anext(stream)]
    fleet.client.membership.members["d"].is_draining = False

    with pytest.raises(Unavailable, match=r"begun with sha256:.* no engine with that is left"):
        await anext(stream)

    assert len(tokens(events)) == 2
    fleet.engines["a"].is_absent, fleet.engines["a"].dies_after = False, 0
    await fleet.until(lambda: len(fleet.client.membership.ready) == 2)
    fleet.client.membership.members["d"].is_draining = True
    stream = fleet.client.generate(asked := request())
    first = await anext(stream)
    fleet.client.membership.members["d"].is_draining = False
    assert tokens([first, *[event async for event in stream]]) == the_answer(asked)
    assert fleet.served()["d"] == 1


async def test_the_last_engine_of_its_weights_ends_what_it_began(fleet: Fleet) -> None:
    """A drain hands no answer over to other weights: it waits until the engine has ended it."""
    fleet.source.places = [MemberAddress("a", "a")]
    await upgraded(fleet, "d")
    fleet.client.membership.members["d"].is_draining = True
    fleet.engines["a"].holds_after = 2
    fleet.client.replicas.grace_s = 0.0
    drained = asyncio.Event()

    async def note(replica_id: str) -> None:
        drained.set()

    fleet.client.replicas.on_drained = note
    running = asyncio.create_task(fleet.answer(asked := request()))
    await fleet.engines["a"].held.wait()
    fleet.client.membership.members["d"].is_draining = False

    await fleet.client.replicas.drain("a")
    for _ in range(100):
        await asyncio.sleep(0)
    assert not fleet.engines["a"].closed.is_set()
    fleet.engines["a"].release.set()
    await drained.wait()

    assert tokens(await running) == the_answer(asked)
    assert fleet.served() == {"a": 1, "b": 0, "c": 0, "d": 0}
