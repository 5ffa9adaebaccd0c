"""Tests of the number of engines that a fleet wants, against traces of what its engines report."""

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.load import EngineLoad
from graftwork.engine.fleet.autoscaler import Autoscaler, EngineSignals, FleetSignals, ScalingLimits
from graftwork.engine.fleet.members import Member, MemberAddress
from graftwork.engine.fleet.scaling_signals import SignalReader
from tests.adapters.adapter_files import DESCRIPTION
from tests.engine.fleet.fake_members import FakeMember

LIMITS = ScalingLimits(least=1, most=8)


def fleet(engines: int, **signals: float) -> FleetSignals:
    """Equal engines."""
    return FleetSignals(tuple(EngineSignals(**signals) for _ in range(engines)))  # type: ignore[arg-type]


def run(scaler: Autoscaler, signals: FleetSignals, start: float, seconds: int) -> list[int]:
    return [scaler.note(start + second, signals) for second in range(seconds)]


def test_a_queue_starts_engines_within_seconds() -> None:
    """A queue of four seconds on one engine wants four engines after `up_after_s`, not more and not before."""
    targets = run(Autoscaler(LIMITS, 1, 0.0), fleet(1, queued_s=4.0, requests=9), 0.0, 30)

    assert targets[:3] == [1, 1, 1]
    assert set(targets[3:]) == {4}


def test_each_signal_alone_starts_engines() -> None:
    """Full KV, adapters that are missed again and again, and late first tokens each want more engines."""
    cases = {"kv_use": 0.95, "adapter_load_share": 0.5, "first_token_s": 3.0}
    for name, value in cases.items():
        assert run(Autoscaler(LIMITS, 2, 0.0), fleet(2, requests=1, **{name: value}), 0.0, 10)[-1] > 2, name
        assert run(Autoscaler(LIMITS, 2, 0.0), fleet(2, requests=1, **{name: value / 4}), 0.0, 10)[-1] == 2, name


def test_one_late_look_starts_nothing() -> None:
    """A burst that is over before `up_after_s` starts no engine."""
    scaler = Autoscaler(LIMITS, 1, 0.0)

    assert run(scaler, fleet(1, queued_s=9.0), 0.0, 2)[-1] == 1
    assert set(run(scaler, fleet(1), 2.0, 60)) == {1}


def test_engines_end_slowly_and_one_by_one() -> None:
    """After the load is gone all engines stay for `down_after_s`; then one ends every `down_every_s`."""
    scaler = Autoscaler(LIMITS, 1, 0.0)
    run(scaler, fleet(1, queued_s=4.0, requests=9), 0.0, 10)

    targets = run(scaler, fleet(4, requests=1), 10.0, 600)

    assert set(targets[:299]) == {4}
    assert sorted(targets, reverse=True) == targets
    assert targets[-1] == 1
    assert all(former - later <= 1 for former, later in pairwise(targets))
    assert targets.count(3) == targets.count(2) == 30


def test_a_rare_model_has_no_engine_until_it_is_asked() -> None:
    """With `least` 0, the last engine ends after `down_after_s` without a request; the first waiting one starts it at once."""
    scaler = Autoscaler(ScalingLimits(least=0, most=2, down_after_s=600.0), 1, 0.0)

    targets = run(scaler, fleet(1), 0.0, 1300)
    assert targets[599] == 1
    assert set(targets[602:]) == {0}
    assert scaler.note(1300.0, FleetSignals(waiting_requests=1)) == 1
    assert set(run(scaler, FleetSignals(waiting_requests=1), 1301.0, 20)) == {1}


def test_a_request_that_came_and_went_between_two_looks_keeps_the_last_engine() -> None:
    """An engine whose steps have advanced since the last look counts as busy, also if it has no requests any more."""
    member = Member(MemberAddress("a", "a"), lambda address: FakeMember())
    member.description, member.problem = DESCRIPTION, None
    reader = SignalReader()
    scaler = Autoscaler(ScalingLimits(least=0, most=2, down_after_s=10.0), 1, 0.0)

    def look(second: int, steps: int) -> int:
        member.note_load(EngineLoad(free_pages=DESCRIPTION.device_pages, steps=steps))
        return scaler.note(float(second), reader.read(float(second), [member]))

    busy = [look(second, steps=second // 8) for second in range(100)]
    idle = [look(second, steps=99) for second in range(100, 150)]

    assert set(busy) == {1}
    assert idle[-1] == 0


def test_a_busy_fleet_never_goes_to_zero() -> None:
    """One running request keeps the last engine."""
    scaler = Autoscaler(ScalingLimits(least=0, most=2, down_after_s=10.0), 1, 0.0)

    assert set(run(scaler, fleet(1, requests=1), 0.0, 300)) == {1}


@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.floats(0, 40), st.floats(0, 1), st.floats(0, 20)), min_size=1, max_size=300
    ),
    st.integers(0, 3),
    st.integers(3, 8),
)
def test_nothing_flaps(trace: list[tuple[int, float, float, float]], least: int, most: int) -> None:
    """On any trace the target stays in its bounds, and never falls in `down_after_s` after it has risen."""
    limits = ScalingLimits(least=least, most=most, down_after_s=60.0, down_every_s=5.0)
    scaler = Autoscaler(limits, 3, 0.0)
    former, risen_at = scaler.target, -math.inf
    for second, (engines, queued_s, kv_use, late_s) in enumerate(trace):
        target = scaler.note(float(second), fleet(engines, queued_s=queued_s, kv_use=kv_use, first_token_s=late_s))
        assert least <= target <= most
        if target < former:
            assert second - risen_at >= limits.down_after_s
            assert former - target == 1
        if target > former:
            risen_at = second
        former = target


@given(st.floats(0.2, 6.0), st.lists(st.floats(-0.04, 0.04), min_size=400, max_size=400))
def test_a_steady_load_settles(work_s: float, noise: list[float]) -> None:
    """Under a load that only trembles, the number of engines changes at most twice, and is then enough for it."""
    scaler, targets = Autoscaler(LIMITS, 1, 0.0), [1]
    for second, part in enumerate(noise):
        each = work_s * (1 + part) / targets[-1]
        targets.append(scaler.note(float(second), fleet(targets[-1], queued_s=each, requests=1)))

    changes = [1 for one, other in pairwise(targets) if one != other]
    assert len(changes) <= 2
    assert work_s <= targets[-1] * (1 + LIMITS.margin) * 1.05
    assert targets[-1] <= math.ceil(work_s * 1.05)
