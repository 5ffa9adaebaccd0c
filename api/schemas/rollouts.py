"""Defines the body of the route that starts a roll-out, and converts roll-outs to bodies of answers."""

from typing import Annotated

from pydantic import Field

from graftwork.adapters.registry.rollout import Rollout, RolloutLimits, RolloutStep
from graftwork.adapters.registry.rollouts import NewRollout
from graftwork.api.schemas.adapters import VersionNumber
from graftwork.api.schemas.base import NativeBody
from graftwork.platform.activity.outcomes import Outcomes
from graftwork.platform.answers import adapters as answers

MAX_STEPS = 20
_LONGEST_STEP_S = 30 * 86_400
_Rate = Annotated[float | None, Field(ge=0, le=1)]


class RolloutStepBody(NativeBody):
    """One step of a roll-out."""

    weight: Annotated[float, Field(gt=0, lt=100)]
    """The share of the new version in percent."""
    seconds: Annotated[float, Field(ge=0, le=_LONGEST_STEP_S)]
    """How long the step lasts at least."""


class RolloutLimitsBody(NativeBody):
    """By how much the new version may be worse than the stable one before it is rolled back. Null sets no limit."""

    min_requests: Annotated[int, Field(ge=1, le=10**6)] = 10
    """Requests to the new version in a step before it is judged, and before the next step."""
    error_rate: _Rate = 0.02
    """The most errors above the stable version's, as a fraction of the requests."""
    refusal_rate: _Rate = 0.05
    """The most requests that the engine refuses above the stable version's, as a fraction of the requests."""
    first_token_ratio: Annotated[float | None, Field(ge=1, le=1000)] = 2.0
    """The most that the median time to the first token may be, as a multiple of the stable version's."""


class RolloutBody(NativeBody):
    """A roll-out of a version to an alias."""

    alias: str = "prod"
    """The alias that the version takes over. It must lead to one other version."""
    version: VersionNumber
    """The new version. After the last step the alias leads to it alone."""
    steps: Annotated[list[RolloutStepBody], Field(min_length=1, max_length=MAX_STEPS)]
    """The shares of the new version, one after another."""
    limits: RolloutLimitsBody | None = None
    """When the new version is rolled back. By default all limits have their default values."""

    def new(self) -> NewRollout:
        limits = RolloutLimits(**(self.limits or RolloutLimitsBody()).model_dump())
        steps = tuple(RolloutStep(step.weight, step.seconds) for step in self.steps)
        return NewRollout(self.alias, self.version, steps, limits)


def rollout_answer(rollout: Rollout, figures: dict[int, Outcomes]) -> answers.Rollout:
    """Converts a roll-out, and the figures of its present step, to the body of an answer."""
    return answers.Rollout(
        id=rollout.id,
        adapter=rollout.adapter,
        alias=rollout.alias,
        version=rollout.version,
        stable=rollout.stable,
        steps=tuple({"weight": step.weight, "seconds": step.seconds} for step in rollout.steps),
        limits={
            "min_requests": rollout.limits.min_requests,
            "error_rate": rollout.limits.error_rate,
            "refusal_rate": rollout.limits.refusal_rate,
            "first_token_ratio": rollout.limits.first_token_ratio,
        },
        state=rollout.state,
        step=rollout.step,
        step_began_at=int(rollout.step_began_at),
        created_at=int(rollout.created_at),
        ended_at=None if rollout.ended_at is None else int(rollout.ended_at),
        reason=rollout.reason,
        figures={str(version): _figures(outcomes) for version, outcomes in sorted(figures.items())},
    )


def _figures(outcomes: Outcomes) -> answers.VersionFigures:
    return {
        "requests": outcomes.requests,
        "errors": outcomes.errors,
        "refusals": outcomes.refusals,
        "first_token_s": outcomes.first_token_s,
    }
