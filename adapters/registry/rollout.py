"""Defines roll-outs as values: the steps by which a new version takes over an alias, their limits, and the verdict.

    running ──► completed      the alias leads to the new version alone
       │ └────► rolled_back    the figures broke a limit: the alias leads to the stable version again
       └──────► cancelled      somebody cancelled it, or moved the alias by hand

Never reads or writes the database.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from graftwork.adapters.format.specs import AliasTarget
from graftwork.platform.activity.outcomes import Outcomes
from graftwork.platform.ids import AdapterId, TenantId

_Z = 1.96
"""Standard deviations of the bound below which a measured rate is taken for chance: 97.5 % on one side."""


class RolloutState(StrEnum):
    """The states of a roll-out."""

    RUNNING = "running"
    COMPLETED = "completed"
    ROLLED_BACK = "rolled_back"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """A share of the callers, and how long it is tried at least."""

    weight: float
    """The share of the new version in percent, above 0 and below 100. After the last step it gets everything."""
    seconds: float


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """By how much the new version may be worse than the stable one. None sets no limit."""

    min_requests: int = 10
    """Requests to the new version in a step before it is judged, and before the next step."""
    error_rate: float | None = 0.02
    """The most errors above the stable version's, as a fraction of the requests."""
    refusal_rate: float | None = 0.05
    """The most refusals above the stable version's, as a fraction of the requests."""
    first_token_ratio: float | None = 2.0
    """The most that the median time to the first token may be, as a multiple of the stable version's."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One roll-out of a version to an alias."""

    id: str
    tenant_id: TenantId
    adapter_id: AdapterId
    adapter: str
    alias: str
    version: int
    stable: int
    """The version that the alias led to before."""
    steps: tuple[RolloutStep, ...]
    limits: RolloutLimits
    state: RolloutState
    step: int
    """The index of the step that runs, or that ran last."""
    step_began_at: float
    change: int
    """The number of the alias's change that this roll-out made last. With a higher one, somebody else moved the alias."""
    created_at: float
    ended_at: float | None = None
    reason: str | None = None
    """Why the roll-out ended other than completed."""

    @property
    def canary_label(self) -> str:
        return f"{self.adapter}@{self.version}"

    @property
    def stable_label(self) -> str:
        return f"{self.adapter}@{self.stable}"

    @property
    def target(self) -> AliasTarget:
        """The alias's target in the present step."""
        weight = self.steps[self.step].weight
        return AliasTarget(tuple(sorted(((self.version, weight), (self.stable, 100 - weight)))))

    def is_step_over(self, canary: Outcomes, now: float) -> bool:
        """Returns whether the present step has lasted long enough, and has had enough requests."""
        is_late = now >= self.step_began_at + self.steps[self.step].seconds
        return is_late and canary.requests >= self.limits.min_requests

    def broken_limit(self, canary: Outcomes, stable: Outcomes) -> str | None:
        """Returns what is wrong with the new version by the figures of the present step; None if nothing is.

        A rate counts only as far as it is above chance: by the lower bound of its Wilson interval.
        """
        limits = self.limits
        if canary.requests < max(limits.min_requests, 1):
            return None
        for name, limit, count, base in (
            ("error", limits.error_rate, canary.errors, stable.error_rate),
            ("refusal", limits.refusal_rate, canary.refusals, stable.refusal_rate),
        ):
            if limit is not None and at_least(count, canary.requests) > base + limit:
                rate = count / canary.requests
                return (
                    f"the {name} rate is {rate:.3f}, and {base:.3f} for version {self.stable} (limit: {limit:g} more)"
                )
        mine, theirs, ratio = canary.first_token_s, stable.first_token_s, limits.first_token_ratio
        if ratio is None or mine is None or theirs is None or stable.requests < limits.min_requests:
            return None
        if mine > ratio * theirs:
            return (
                f"the median time to the first token is {mine:.3f} s, and {theirs:.3f} s for version {self.stable} "
                f"(limit: {ratio:g} times)"
            )
        return None


def at_least(count: int, total: int) -> float:
    """Returns the lower bound of the Wilson score interval for `count` of `total`, with total > 0."""
    share, square = count / total, _Z * _Z
    middle = share + square / (2 * total)
    spread = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    return max(0.0, (middle - spread) / (1 + square / total))
