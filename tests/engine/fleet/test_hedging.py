"""Tests of hedged first tokens: who answers, what is cancelled, and that they cannot storm. The engines are scripted."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.events import PromptAdmitted, RequestFinished
from graftwork.engine.core.load import EngineLoad
from graftwork.engine.core.requests import EngineRequest, ServiceTier
from graftwork.engine.fleet.hedging import FirstTokenTimes, HedgeBudget
from graftwork.platform.clock import ManualClock
from tests.engine.fleet.test_client import NAMES, Fleet, request, the_answer, tokens


@given(st.lists(st.booleans(), max_size=400), st.floats(0.01, 0.5), st.integers(1, 8))
def test_hedges_are_bounded_by_requests(asks: list[bool], share: float, burst: int) -> None:
    """However often first tokens are late, hedges are at most the burst and the share of the requests that have begun;
    in every stretch of requests, too, so that a slow fleet cannot be made slower.
    """
    budget = HedgeBudget(share, burst)
    hedged: list[bool] = []
    for is_late in asks:
        budget.begin()
        hedged.append(is_late and budget.take())

    for start in range(len(hedged)):
        for end in (start + 1, (start + len(hedged) + 1) // 2, len(hedged)):
            assert sum(hedged[start:end]) <= burst + share * max(end - start, 0) + 1e-6


def test_a_request_hedges_again_after_a_quiet_time() -> None:
    """After the burst is used, twenty requests earn one hedge at a share of 5 %."""
    budget = HedgeBudget(0.05, 2)
    assert [budget.take() for _ in range(3)] == [True, True, False]

    for _ in range(21):
        budget.begin()

    assert [budget.take(), budget.take()] == [True, False]


def test_late_is_later_than_nineteen_of_twenty() -> None:
    """The limit is the 95th percentile of the last factors, times the estimate; too few samples know none."""
    times = FirstTokenTimes()
    for number in range(1, 101):
        assert times.late_after_s(1.0) is None or number > 32
        times.note(0.1, 0.1 * number)

    assert times.late_after_s(1.0) == pytest.approx(96.0)
    assert times.late_after_s(0.01) == pytest.approx(0.96)


@pytest.fixture
async def fleet(manual_clock: ManualClock) -> AsyncIterator[Fleet]:
    """A fleet that knows how long first tokens take: no longer than a thousandth of the estimate."""
    fleet = Fleet(manual_clock)
    for engine in fleet.engines.values():
        engine.load = EngineLoad(prefill_token_s=1e-6)
    for _ in range(40):
        await fleet.answer(request(tier=ServiceTier.PRIORITY))
    await fleet.until(lambda: all(one.load.prefill_token_s for one in fleet.client.membership.members.values()))
    for engine in fleet.engines.values():
        engine.requests.clear()
    yield fleet
    await fleet.client.close()


def priority(**fields: object) -> EngineRequest:
    return request(400, tier=ServiceTier.PRIORITY, **fields)  # type: ignore[arg-type]


def hedges(fleet: Fleet) -> int:
    return sum(one.hedges for one in fleet.client.replicas.figures())


async def hedged(fleet: Fleet, home: str) -> str:
    """Returns the engine that is asked beside `home`, once it is: after 50 ms at least."""
    others = [name for name in NAMES if name != home]
    waits = [asyncio.create_task(fleet.engines[name].held.wait()) for name in others]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    (second,) = [name for name in others if fleet.engines[name].held.is_set()]
    return second


async def hold_the_first(fleet: Fleet, asked: EngineRequest) -> tuple[str, "asyncio.Task[list[object]]"]:
    """Sends a request to an engine that holds it before its first token; the others do not. Returns the engine."""
    for engine in fleet.engines.values():
        engine.holds_after = 0
    running: asyncio.Task[list[object]] = asyncio.create_task(fleet.answer(asked))  # type: ignore[arg-type]
    await fleet.until(lambda: any(engine.held.is_set() for engine in fleet.engines.values()))
    (home,) = [name for name, engine in fleet.engines.items() if engine.requests]
    for name, engine in fleet.engines.items():
        engine.holds_after = 0 if name == home else None
    return home, running


async def test_a_late_first_token_comes_from_a_second_engine(fleet: Fleet) -> None:
    """The caller gets one admission, the tokens of one engine and one end; the late engine's request is cancelled."""
    home, running = await hold_the_first(fleet, asked := priority())

    events = await running

    assert tokens(events) == the_answer(asked)  # type: ignore[arg-type]
    assert sum(isinstance(event, PromptAdmitted) for event in events) == 1
    assert sum(isinstance(event, RequestFinished) for event in events) == 1
    assert fleet.engines[home].cancelled == [asked.request_id]
    assert sum(len(engine.cancelled) for engine in fleet.engines.values()) == 1
    assert hedges(fleet) == 1
    assert [one.num_requests for one in fleet.client.membership.members.values()] == [0, 0, 0]


async def test_the_first_engine_may_still_win(fleet: Fleet) -> None:
    """If both are late and the first engine has its token before, the second request is cancelled."""
    for engine in fleet.engines.values():
        engine.holds_after = 0
    running = asyncio.create_task(fleet.answer(asked := priority()))
    await fleet.until(lambda: any(engine.held.is_set() for engine in fleet.engines.values()))
    (home,) = [name for name, engine in fleet.engines.items() if engine.requests]
    second = await hedged(fleet, home)

    fleet.engines[home].release.set()

    assert tokens(await running) == the_answer(asked)
    assert fleet.engines[second].cancelled == [asked.request_id]
    assert fleet.engines[home].cancelled == []
    assert [one.num_requests for one in fleet.client.membership.members.values()] == [0, 0, 0]


@pytest.mark.parametrize("reason", ["tier", "busy"])
async def test_others_are_not_hedged(fleet: Fleet, reason: str) -> None:
    """A request of another tier is not asked for twice, and neither is any while no other engine is idle."""
    if reason == "busy":
        for engine in fleet.engines.values():
            engine.load = EngineLoad(prefill_token_s=1e-6, waiting_requests=1)
        await fleet.until(lambda: all(one.load.waiting_requests for one in fleet.client.membership.members.values()))
    asked = priority() if reason == "busy" else replace(priority(), tier=ServiceTier.DEFAULT)
    home, running = await hold_the_first(fleet, asked)

    await asyncio.wait([running], timeout=0.2)

    assert not running.done()
    assert hedges(fleet) == 0
    fleet.engines[home].release.set()
    assert tokens(await running) == the_answer(asked)  # type: ignore[arg-type]


async def test_an_engine_that_dies_loses_the_race(fleet: Fleet) -> None:
    """If the first engine is lost while the second is asked, the second goes on, and nothing moves."""
    for engine in fleet.engines.values():
        engine.holds_after = 0
    running = asyncio.create_task(fleet.answer(asked := priority()))
    await fleet.until(lambda: any(engine.held.is_set() for engine in fleet.engines.values()))
    (home,) = [name for name, engine in fleet.engines.items() if engine.requests]
    second = await hedged(fleet, home)

    fleet.engines[home].is_absent = True
    fleet.engines[home].lose_requests()
    await fleet.until(lambda: not any(one.replica_id == home for one in fleet.client.membership.ready))
    for engine in fleet.engines.values():
        engine.release.set()

    assert tokens(await running) == the_answer(asked)
    assert fleet.served() == {name: int(name in (home, second)) for name in NAMES}
    assert sum(one.hand_overs for one in fleet.client.replicas.figures()) == 0
