"""Tests of what an engine's loop tells of itself."""

from graftwork.engine.core.load import EngineLoad
from graftwork.engine.core.progress import LoopProgress
from graftwork.platform.clock import ManualClock


def test_a_load_has_the_age_of_its_publication() -> None:
    """The age counts from the latest publication, and is 0 before the first."""
    clock = ManualClock(500.0)
    progress = LoopProgress(clock)
    assert progress.load_age_s == 0.0

    progress.advance()
    progress.publish(EngineLoad(steps=1))
    clock.advance(0.25)
    assert progress.load_age_s == 0.25
    progress.advance()
    progress.publish(EngineLoad(steps=2))

    assert progress.load_age_s == 0.0
