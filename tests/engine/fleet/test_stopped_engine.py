"""Tests of a fleet one of whose engines is a stopped process. Its engines are scripted."""

import asyncio

import pytest

from graftwork.engine.fleet.silence import TICK_S
from graftwork.platform.clock import ManualClock
from tests.engine.fleet.test_client import NAMES, Fleet, request, the_answer, tokens


async def _pass_time(fleet: Fleet, seconds: float) -> None:
    """Lets the gateway's ticks pass on the manual clock, with time for the watches between them."""
    for _ in range(round(seconds / TICK_S)):
        fleet.clock.advance(TICK_S)
        fleet.client.membership.check_silences()
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.mark.parametrize("stopped", [("home",), ("home", "others")])
async def test_the_requests_of_a_stopped_engine_go_on_within_a_second(
    manual_clock: ManualClock, stopped: tuple[str, ...]
) -> None:
    """Without an answer for 0.9 s they go on elsewhere, once; if no engine answers, the gateway moves nothing."""
    fleet = Fleet(manual_clock)
    for engine in fleet.engines.values():
        engine.holds_after = 2
    running = asyncio.create_task(fleet.answer(asked := request()))
    await fleet.until(lambda: any(engine.held.is_set() for engine in fleet.engines.values()))
    (home,) = [name for name, engine in fleet.engines.items() if engine.requests]
    for name, engine in fleet.engines.items():
        engine.holds_after = 2 if name == home else None
        engine.is_stopped = ("home" if name == home else "others") in stopped
    await _pass_time(fleet, 0.7)
    assert sum(fleet.served().values()) == 1

    await _pass_time(fleet, 0.6)

    if "others" in stopped:
        assert sum(fleet.served().values()) == 1
        fleet.engines[home].release.set()
    assert tokens(await running) == the_answer(asked)
    hand_overs = {one.replica_id: one.hand_overs for one in fleet.client.replicas.figures()}
    assert hand_overs == {name: int(name == home and "others" not in stopped) for name in NAMES}
    assert len(fleet.client.membership.ready) == (3 if "others" in stopped else 2)
    await fleet.client.close()
