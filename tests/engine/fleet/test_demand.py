"""Tests of requests that wait for the first engine of a fleet. The engines are scripted."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from graftwork.engine.fleet.demand import WAIT_AT_MOST_S, EngineDemand
from graftwork.engine.fleet.members import MemberAddress
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import Unavailable
from tests.engine.fleet.test_client import Fleet, request, the_answer, tokens


@pytest.fixture
async def fleet(manual_clock: ManualClock) -> AsyncIterator[Fleet]:
    """A fleet without engines, whose starts take 20 s."""
    fleet = Fleet(manual_clock)
    fleet.source.places.clear()
    fleet.client.demand = EngineDemand(manual_clock, start_s=20.0)
    yield fleet
    await fleet.client.close()


async def test_a_request_waits_for_the_engine_that_it_has_asked_for(fleet: Fleet) -> None:
    """The first request asks for an engine, and all that come until it is ready are answered by it."""
    demand, asked = fleet.client.demand, list[bool]()
    assert demand is not None
    demand.on_demand = lambda: asked.append(True)
    requests = [request(10 + number) for number in range(3)]
    answers = [asyncio.create_task(fleet.answer(one)) for one in requests]
    await fleet.until(lambda: demand.take() == 3)
    assert asked
    fleet.clock.advance(8.0)

    fleet.source.places.append(MemberAddress("a", "a"))
    found = await asyncio.gather(*answers)

    assert [tokens(events) for events in found] == [the_answer(one) for one in requests]
    assert demand.take() == 0
    assert demand.left_s == pytest.approx(8.0)  # how long the next start will probably take


async def test_the_wait_counts_in_the_requests_time(fleet: Fleet) -> None:
    """An engine gets a request that has waited with the rest of its deadline and of its time."""
    demand = fleet.client.demand
    assert demand is not None
    answer = asyncio.create_task(fleet.answer(request(deadline_s=30.0, timeout_s=100.0)))
    await fleet.until(lambda: demand.take() == 1)
    fleet.clock.advance(12.0)

    fleet.source.places.append(MemberAddress("a", "a"))
    await answer

    (sent,) = fleet.engines["a"].requests
    assert sent.deadline_s == pytest.approx(18.0)
    assert sent.timeout_s == pytest.approx(88.0)


async def test_a_request_whose_time_is_too_short_is_refused_at_once(fleet: Fleet) -> None:
    """A deadline before the engine is ready is a 503 with the seconds that are left, and asks for the engine as well."""
    demand, asked = fleet.client.demand, list[bool]()
    assert demand is not None
    demand.on_demand = lambda: asked.append(True)

    with pytest.raises(Unavailable) as first:
        await fleet.answer(request(deadline_s=5.0))
    fleet.clock.advance(14.0)
    with pytest.raises(Unavailable) as second:
        await fleet.answer(request(deadline_s=5.0))

    assert first.value.code == second.value.code == "no_engine"
    assert [first.value.retry_after_s, second.value.retry_after_s] == [20.0, 6.0]
    assert len(asked) == 2
    assert demand.take() == 2


async def test_a_start_that_takes_too_long_refuses(fleet: Fleet) -> None:
    """If an engine takes longer to start than requests wait at most, they are refused with that time."""
    demand = fleet.client.demand
    assert demand is not None
    demand.note_start(WAIT_AT_MOST_S + 30)

    with pytest.raises(Unavailable) as refusal:
        await fleet.answer(request())

    assert refusal.value.retry_after_s == WAIT_AT_MOST_S + 30


async def test_who_asks_what_is_served_asks_for_an_engine(fleet: Fleet) -> None:
    """A gateway that starts while the fleet has no engine lets one start."""
    demand = fleet.client.demand
    assert demand is not None

    with pytest.raises(Unavailable):
        await fleet.client.describe()

    assert demand.take() == 1


async def test_without_demand_nothing_waits(fleet: Fleet) -> None:
    """A fleet that does not scale to zero refuses a request at once if no engine is ready."""
    fleet.client.demand = None

    with pytest.raises(Unavailable):
        await asyncio.wait_for(fleet.answer(request()), 5)
