"""Tests of engines that send their load with their tokens."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from graftwork.engine.core.load import EngineLoad
from graftwork.engine.fleet.members import MemberAddress
from graftwork.platform.clock import ManualClock
from tests.engine.fleet.fake_members import FakeMember
from tests.engine.fleet.test_client import Fleet


@pytest.fixture
async def fleet(manual_clock: ManualClock) -> AsyncIterator[Fleet]:
    fleet = Fleet(manual_clock)
    yield fleet
    await fleet.client.close()


async def test_an_engine_that_sends_its_load_with_tokens_is_not_asked_for_it(fleet: Fleet) -> None:
    """A load that came with tokens counts at once, and stands for the answer to the next question; then it is old."""
    await fleet.client.describe()
    a, b = fleet.engines["a"], fleet.engines["b"]

    def asked(of: FakeMember, times: int) -> Callable[[], bool]:
        before = of.num_questions
        return lambda: of.num_questions >= before + times

    a.note_load(EngineLoad(epoch=a.description.epoch, queued_tokens=70, free_pages=9, prefill_token_s=0.002))
    assert fleet.client.membership.members["a"].load.queued_tokens == 70
    (shown,) = [one for one in fleet.client.replicas.figures() if one.replica_id == "a"]
    assert shown.first_token_s == pytest.approx(71 * 0.002)
    before = a.num_questions
    await fleet.until(asked(b, 20))
    assert a.num_questions - before <= 1  # one may have been under way
    fleet.clock.advance(1)
    await fleet.until(asked(a, 2))


async def test_a_load_of_another_epoch_is_refused(manual_clock: ManualClock) -> None:
    """A load that comes with tokens from an engine of another epoch than its lease says takes the engine's requests."""
    fleet = Fleet(manual_clock)
    fleet.source.places = [MemberAddress("a", "a", epoch=2)]
    fleet.engines["a"].description = replace(fleet.engines["a"].description, epoch=2)
    await fleet.client.describe()
    member = fleet.client.membership.members["a"]
    assert member.is_ready

    fleet.engines["a"].note_load(EngineLoad(epoch=1))

    assert not member.is_ready
    await fleet.client.close()
