"""Tests of how slow engines are found, against times that the test makes up."""

from graftwork.engine.core.load import EngineLoad
from graftwork.engine.fleet.speed import STALLED_AFTER_S, SpeedMonitor


def busy(steps: int) -> EngineLoad:
    return EngineLoad(running_requests=4, steps=steps)


def run(monitor: SpeedMonitor, step_s: dict[str, float], start: float, seconds: int) -> float:
    """Lets busy engines report once a second; returns the time afterwards."""
    for second in range(seconds + 1):
        for name, own_s in step_s.items():
            monitor.note(name, busy(int((start + second) / own_s)), start + second)
    return start + seconds


def test_an_engine_far_behind_its_peers_is_slow_and_recovers() -> None:
    """Ten times slower steps count as such, twice slower ones do not; after enough steps at full speed nothing counts."""
    monitor = SpeedMonitor()
    now = run(monitor, {"a": 0.02, "b": 0.02, "c": 0.04, "slow": 0.2}, 0.0, 20)

    assert [monitor.slowness(name) for name in ("a", "b", "c")] == [1.0, 1.0, 1.0]
    assert 8 < monitor.slowness("slow") < 12
    steps = int(now / 0.2)
    for second in range(1, 30):
        for name in ("a", "b", "c"):
            monitor.note(name, busy(int((now + second) / 0.02)), now + second)
        monitor.note("slow", busy(steps + 50 * second), now + second)
    assert monitor.slowness("slow") == 1.0


def test_one_of_two_engines_can_be_the_slow_one() -> None:
    """With two engines, the slower one is compared with the faster one, and never the other way round."""
    monitor = SpeedMonitor()
    run(monitor, {"fast": 0.02, "slow": 0.2}, 0.0, 20)

    assert monitor.slowness("fast") == 1.0
    assert monitor.slowness("slow") > 5


def test_a_slow_engine_without_requests_is_tried_again() -> None:
    """Without requests an engine is not measured; its slowness fades until it counts as its peers do."""
    monitor = SpeedMonitor()
    now = run(monitor, {"a": 0.02, "b": 0.02, "slow": 0.2}, 0.0, 20)
    steps = int(now / 0.2)

    for second in range(1, 60):
        for name in ("a", "b"):
            monitor.note(name, busy(int((now + second) / 0.02)), now + second)
        monitor.note("slow", EngineLoad(steps=steps), now + second)

    assert monitor.slowness("slow") == 1.0


def test_steps_that_do_not_advance_are_a_stall() -> None:
    """An engine with requests and without steps stalls; one step, or no requests, ends the stall."""
    monitor = SpeedMonitor()
    for second in range(4):
        monitor.note("a", busy(7), float(second))
    assert monitor.stalled_s("a") == 3.0 > STALLED_AFTER_S

    monitor.note("a", busy(8), 4.0)
    assert monitor.stalled_s("a") == 0.0
    monitor.note("a", EngineLoad(steps=8), 9.0)
    assert monitor.stalled_s("a") == 0.0


def test_an_engine_that_starts_again_has_no_past() -> None:
    """After a restart, which counts steps from 0, an engine is neither slow nor stalled."""
    monitor = SpeedMonitor()
    now = run(monitor, {"a": 0.02, "b": 0.02, "slow": 0.2}, 0.0, 20)

    monitor.note("slow", busy(0), now + 1)

    assert monitor.slowness("slow") == 1.0
    assert monitor.stalled_s("slow") == 0.0
