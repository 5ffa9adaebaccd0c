"""Tests of the phases of an engine's start."""

import logging
from contextlib import suppress

import pytest

from graftwork.engine.build.phases import StartPhases
from graftwork.engine.core.stats import EngineStats
from graftwork.platform.clock import ManualClock, process_age_s


def test_a_phase_within_another_counts_once(manual_clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """The seconds of all phases add up to the time that passed, and reach the log and the figures of the engine."""
    phases = StartPhases(manual_clock, process_s=2.0)
    with phases.phase("memory"):
        manual_clock.advance(1.0)
        with phases.phase("disk_scan"):
            manual_clock.advance(4.0)
        with phases.phase("disk_scan"):
            manual_clock.advance(0.5)
        manual_clock.advance(2.0)
    with phases.phase("weights"):
        manual_clock.advance(8.0)

    with caplog.at_level(logging.INFO):
        phases.report()

    assert phases.seconds == {"imports": 2.0, "memory": 3.0, "disk_scan": 4.5, "weights": 8.0}
    found = phases.complete(EngineStats(steps=3))
    assert (found.steps, found.start_memory_s, found.start_disk_scan_s, found.start_imports_s) == (3, 3.0, 4.5, 2.0)
    (record,) = caplog.records
    assert record.__dict__["total_s"] == 17.5


def test_a_phase_that_fails_counts(manual_clock: ManualClock) -> None:
    """A phase that ends by an error keeps its time."""
    phases = StartPhases(manual_clock)
    with suppress(OSError), phases.phase("weights"):
        manual_clock.advance(3.0)
        raise OSError("gone")

    assert phases.seconds["weights"] == 3.0


def test_the_process_has_an_age() -> None:
    """The age of this process grows and is not negative."""
    first = process_age_s()

    assert 0.0 <= first <= process_age_s()
