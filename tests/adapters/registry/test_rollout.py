"""Tests of the verdict over a roll-out's figures."""

from dataclasses import replace
from typing import Any

import pytest

from graftwork.adapters.registry.rollout import Rollout, RolloutLimits, RolloutState, RolloutStep, at_least
from graftwork.platform.activity.outcomes import Outcomes
from graftwork.platform.activity.windows import bucket_of
from graftwork.platform.ids import AdapterId, TenantId

ROLLOUT = Rollout(
    id="rol_1",
    tenant_id=TenantId("ten_a"),
    adapter_id=AdapterId("adp_1"),
    adapter="bot",
    alias="prod",
    version=2,
    stable=1,
    steps=(RolloutStep(10, 60), RolloutStep(50, 60)),
    limits=RolloutLimits(),
    state=RolloutState.RUNNING,
    step=0,
    step_began_at=1000.0,
    change=2,
    created_at=1000.0,
)


def outcomes(requests: int, errors: int = 0, refusals: int = 0, first_token_s: float | None = None) -> Outcomes:
    first = {} if first_token_s is None else {bucket_of(first_token_s): requests}
    return Outcomes(requests, errors, refusals, first)


def limited(**limits: Any) -> Rollout:
    return replace(ROLLOUT, limits=RolloutLimits(**limits))


@pytest.mark.parametrize(
    ("count", "total", "bound"),
    [(0, 10, 0.0), (10, 10, 0.7225), (5, 10, 0.2366), (1, 20, 0.0089), (2, 100, 0.0055), (50, 100, 0.4038)],
)
def test_the_lower_bound_is_wilsons(count: int, total: int, bound: float) -> None:
    """The lower bounds of the Wilson interval at 95 % are those of published tables, within 0.0001."""
    assert at_least(count, total) == pytest.approx(bound, abs=1e-4)


@pytest.mark.parametrize(
    ("canary", "stable", "word"),
    [
        (outcomes(10, errors=10), outcomes(90), "error"),
        (outcomes(100, errors=12), outcomes(900, errors=9), "error"),
        (outcomes(10, refusals=10), outcomes(90), "refusal"),
        (outcomes(20, first_token_s=0.5), outcomes(90, first_token_s=0.2), "first token"),
    ],
)
def test_a_worse_version_breaks_a_limit(canary: Outcomes, stable: Outcomes, word: str) -> None:
    """A version with more errors, more refusals or later first tokens than allowed is rolled back, and told why."""
    broken = ROLLOUT.broken_limit(canary, stable)

    assert broken is not None
    assert word in broken


@pytest.mark.parametrize(
    ("canary", "stable"),
    [
        (outcomes(9, errors=9), outcomes(90)),  # too few requests for a verdict
        (outcomes(20, errors=1), outcomes(180)),  # may be chance
        (outcomes(100, errors=30), outcomes(900, errors=300)),  # the stable version fails as often
        (outcomes(100, refusals=50), outcomes(900, refusals=450)),
        (outcomes(20, first_token_s=0.3), outcomes(90, first_token_s=0.2)),
        (outcomes(20, first_token_s=0.9), outcomes(9, first_token_s=0.2)),  # too few to compare with
        (outcomes(20, first_token_s=0.9), outcomes(0)),
        (outcomes(0), outcomes(0)),
    ],
)
def test_a_version_that_is_as_good_stays(canary: Outcomes, stable: Outcomes) -> None:
    """A version is not rolled back by chance, by too few requests, or for what the stable version does as well."""
    assert ROLLOUT.broken_limit(canary, stable) is None


@pytest.mark.parametrize(
    ("limit", "canary"),
    [
        ("error_rate", outcomes(50, errors=50)),
        ("refusal_rate", outcomes(50, refusals=50)),
        ("first_token_ratio", outcomes(50, first_token_s=9.0)),
    ],
)
def test_no_limit_is_no_verdict(limit: str, canary: Outcomes) -> None:
    """A limit of None is never broken."""
    stable = outcomes(450, first_token_s=0.1)

    assert ROLLOUT.broken_limit(canary, stable) is not None
    assert limited(**{limit: None}).broken_limit(canary, stable) is None


def test_a_step_lasts_its_time_and_its_requests() -> None:
    """A step is over after its seconds, and not before enough requests have come."""
    assert not ROLLOUT.is_step_over(outcomes(1000), 1059.9)
    assert not ROLLOUT.is_step_over(outcomes(9), 1e9)
    assert ROLLOUT.is_step_over(outcomes(10), 1060.0)


def test_a_step_gives_the_new_version_its_share() -> None:
    """In a step the alias leads to both versions, by the step's percentage."""
    assert ROLLOUT.target.weights == ((1, 90), (2, 10))
    assert replace(ROLLOUT, version=1, stable=2, step=1).target.weights == ((1, 50), (2, 50))
