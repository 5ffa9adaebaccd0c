"""Tests of objectives: burn rates and budgets against a plain list of all requests."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.clock import ManualClock
from graftwork.platform.objectives import (
    BUDGET_S,
    WINDOWS_S,
    Objective,
    ObjectiveMeter,
    parse_deadlines,
    parse_objectives,
)
from graftwork.platform.telemetry import Telemetry

SLICE_S = 10.0

gaps = st.sampled_from([0.0, 0.4, 3.0, 9.9, 10.0, 61.0, 299.0, 300.0, 3600.0, 40_000.0])
events = st.lists(st.tuples(gaps, st.floats(0.0, 1.0)), max_size=60)


def expected_burn(ended: list[tuple[float, bool]], now: float, window_s: float, target: float) -> float:
    """Returns the burn rate over the window by its definition. The window begins with a slice of 10 s."""
    first = math.floor(now / SLICE_S) * SLICE_S - window_s + SLICE_S
    bad = [is_bad for at, is_bad in ended if at >= first]
    return (sum(bad) / len(bad) if bad else 0.0) / (1 - target)


@given(events=events)
def test_burn_rates_equal_those_of_a_list_of_all_requests(events: list[tuple[float, float]]) -> None:
    """In both windows and over the day, the burn rate is the bad share divided by the share that may be bad."""
    clock = ManualClock(1_000_000.0)
    meter = ObjectiveMeter({"default": Objective(ttft_s=0.5, target=0.9)}, clock)
    ended: list[tuple[float, bool]] = []
    for gap, seconds in events:
        clock.advance(gap)
        meter.note_first_token("default", seconds)
        ended.append((clock.monotonic(), seconds > 0.5))

    for window_s in (*WINDOWS_S.values(), BUDGET_S):
        expected = expected_burn(ended, clock.monotonic(), window_s, 0.9)
        assert meter.burn_rate("default", "ttft", window_s) == pytest.approx(expected)
    assert meter.budget_left("default", "ttft") == pytest.approx(
        1 - expected_burn(ended, clock.monotonic(), BUDGET_S, 0.9)
    )


def test_each_objective_of_a_tier_is_counted_apart() -> None:
    """First tokens, times between tokens and failures have their own burn rates; other tiers are not counted."""
    meter = ObjectiveMeter({"priority": Objective(ttft_s=1.0, itl_s=0.05, target=0.5)}, ManualClock())
    meter.note_first_token("priority", 2.0)
    meter.note_between_tokens("priority", 0.01)
    meter.note_end("priority", failed=True)
    meter.note_end("priority", failed=False)
    meter.note_first_token("flex", 100.0)

    rates = {kind: meter.burn_rate("priority", kind, 300.0) for kind in ("ttft", "itl", "success")}

    assert rates == {"ttft": 2.0, "itl": 0.0, "success": 1.0}


def test_metrics_show_each_burn_rate_and_budget() -> None:
    """`/metrics` has one burn rate for each tier, objective and window, and one budget for each tier and objective."""
    telemetry = Telemetry(ObjectiveMeter({"default": Objective(ttft_s=0.5, target=0.75)}, ManualClock()))
    telemetry.objectives.note_first_token("default", 0.1)
    telemetry.objectives.note_first_token("default", 0.9)
    lines = telemetry.render()[0].decode().splitlines()

    for window in ("5m", "1h"):
        labels = f'{{objective="ttft",tier="default",window="{window}"}}'
        assert f"graftwork_objective_burn_rate{labels} 2.0" in lines
    assert 'graftwork_objective_budget_left{objective="ttft",tier="default"} -1.0' in lines
    assert 'graftwork_objective_budget_left{objective="success",tier="default"} 1.0' in lines


def test_objectives_and_deadlines_are_read_from_text() -> None:
    """Times are in milliseconds in the text and in seconds in the result; what is left out promises nothing."""
    assert parse_objectives("priority.ttft_ms=500, priority.target=0.999,flex.itl_ms=200") == {
        "priority": Objective(ttft_s=0.5, target=0.999),
        "flex": Objective(itl_s=0.2),
    }
    assert parse_deadlines("priority=1000,default=10000") == {"priority": 1.0, "default": 10.0}
    assert parse_objectives("") == {}
    assert parse_deadlines("") == {}


@pytest.mark.parametrize(
    "text", ["gold.ttft_ms=5", "priority=5", "flex.ttft_ms=0", "flex.target=1", "flex.itl_ms=.", "flex.itl_ms=1.2.3"]
)
def test_wrong_objectives_are_refused(text: str) -> None:
    """A wrong tier, name or number is refused with what to give instead."""
    with pytest.raises(ValueError, match="give "):
        parse_objectives(text)


@pytest.mark.parametrize("text", ["gold=5", "default", "default=0", "default=-1", "default=1.5"])
def test_wrong_deadlines_are_refused(text: str) -> None:
    """A deadline is a tier and whole milliseconds above 0."""
    with pytest.raises(ValueError, match="give parts such as default=10000"):
        parse_deadlines(text)
