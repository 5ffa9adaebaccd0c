"""Decides by figures whether a quantised or converted model may take the place of its parent.

Owns the limits and the words of the verdict. Never computes a figure.
"""

import math
from dataclasses import dataclass

from graftwork.engine.evaluation.comparison import Divergence, TextFigures


@dataclass(frozen=True, slots=True)
class Limits:
    """What a candidate must keep to."""

    mean_kl: float = 0.05
    """The most nats a token. Weights in int8 have some 0.001, good int4 some 0.02."""
    agreement: float = 0.95
    """The least part of positions with the same likeliest token."""
    perplexity_ratio: float = 1.03
    """The most of the candidate's perplexity by the parent's."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One figure beside its limit."""

    name: str
    value: float
    limit: float
    holds: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate says of a candidate."""

    judgements: tuple[Judgement, ...]

    @property
    def passes(self) -> bool:
        return all(one.holds for one in self.judgements)


def judge(candidate: TextFigures, parent: TextFigures, divergence: Divergence, limits: Limits) -> Verdict:
    """Judges a candidate against its parent. A figure that is no number never holds."""
    ratio = candidate.perplexity / parent.perplexity if parent.perplexity else math.nan
    return Verdict(
        (
            Judgement("mean KL", divergence.mean_kl, limits.mean_kl, divergence.mean_kl <= limits.mean_kl),
            Judgement("agreement", divergence.agreement, limits.agreement, divergence.agreement >= limits.agreement),
            Judgement("perplexity ratio", ratio, limits.perplexity_ratio, ratio <= limits.perplexity_ratio),
        )
    )
