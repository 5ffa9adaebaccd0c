"""Tests of what gateways and supervisors tell each other about engines, on both databases."""

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.replicas.demand import ASKED_WITHIN_S, EngineDemands


async def test_an_offer_and_a_question_hold_for_their_time(database: Database, manual_clock: ManualClock) -> None:
    """An offer holds for a lease and a question for some seconds; neither changes the other, nor another model's."""
    demands = EngineDemands(database, "m", 30.0, manual_clock)
    other = EngineDemands(database, "another", 30.0, manual_clock)
    assert not await demands.is_offered()
    assert not await demands.was_asked()

    await demands.offer()
    await demands.ask()
    manual_clock.advance(ASKED_WITHIN_S - 1)
    assert await demands.is_offered()
    assert await demands.was_asked()
    manual_clock.advance(2)
    assert await demands.is_offered()
    assert not await demands.was_asked()
    manual_clock.advance(30)
    assert not await demands.is_offered()
    await demands.ask()
    assert await demands.was_asked()
    assert not await demands.is_offered()

    assert not await other.is_offered()
    assert not await other.was_asked()
