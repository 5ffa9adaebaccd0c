"""Estimates how long an operation takes from how long it took before.

LatencyHistogram owns the weights of logarithmic buckets, and older observations lose weight. There are four buckets per
octave from 1 ms to 10 h, so a quantile is wrong by at most a factor of 2^(1/4) (19 %). This is exact enough for a
lease. A histogram takes 0.8 KiB.

Inside a bucket the logarithm of the time is uniform. In the first bucket the time itself is uniform. A time above the
last edge counts as "never".
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BUCKETS_PER_OCTAVE = 4
SHORTEST_S = 0.001
LONGEST_S = 36_000.0

_NUM_STEPS = math.ceil(BUCKETS_PER_OCTAVE * math.log2(LONGEST_S / SHORTEST_S))
EDGES: Floats = SHORTEST_S * np.exp2(np.arange(_NUM_STEPS + 1) / BUCKETS_PER_OCTAVE)
"""The upper edges of all buckets except the last, in seconds. A bucket includes its upper edge, but not its lower edge.
"""
_LOG_EDGES: Floats = np.log(EDGES)
_NUM_BUCKETS = len(EDGES) + 1


@dataclass(frozen=True, slots=True, eq=False)
class LatencyDistribution:
    """A distribution of a time T in seconds. `cdf[i]` is P(T <= EDGES[i])."""

    cdf: Floats

    @classmethod
    def from_masses(cls, masses: Floats) -> "LatencyDistribution":
        """Makes the distribution of a histogram. The masses may have any positive sum."""
        return cls(np.cumsum(masses[:-1]) / masses.sum())

    @classmethod
    def latest_of(cls, distributions: Iterable["LatencyDistribution"]) -> "LatencyDistribution":
        """Returns the distribution of the maximum of several independent times."""
        return cls(np.prod([distribution.cdf for distribution in distributions], axis=0))

    def probability_within(self, seconds: float) -> float:
        """Returns P(T <= seconds)."""
        if seconds <= SHORTEST_S:
            return float(self.cdf[0]) * max(seconds, 0.0) / SHORTEST_S
        return float(np.interp(math.log(seconds), _LOG_EDGES, self.cdf))

    def quantile(self, share: float) -> float:
        """Returns the smallest time t with P(T <= t) >= `share`, which is in [0, 1]; infinity if there is none."""
        number = int(np.searchsorted(self.cdf, share))
        if number == len(EDGES):
            return math.inf
        if number == 0:
            return SHORTEST_S * share / float(self.cdf[0]) if share > 0 else 0.0
        below, above = self.cdf[number - 1], self.cdf[number]
        return float(EDGES[number - 1] * 2 ** ((share - below) / (above - below) / BUCKETS_PER_OCTAVE))

    def return_probability(self, waited_s: float, within_s: float) -> float:
        """Returns P(T <= waited_s + within_s | T > waited_s).

        This is 0 if no observation was longer than `waited_s`.
        """
        survival = 1.0 - self.probability_within(waited_s)
        if survival <= 0.0:
            return 0.0
        return (self.probability_within(waited_s + within_s) - 1.0 + survival) / survival

    def expected_wait(self, seconds: float) -> float:
        """Returns E[min(T, seconds)]: the mean wait of a caller that gives up after `seconds`."""
        whole = int(np.searchsorted(EDGES, seconds, side="right"))
        edges = np.append(EDGES[:whole], max(seconds, 0.0))
        cdf = np.append(self.cdf[:whole], self.probability_within(seconds))
        return float(np.sum(_waits(edges, cdf)))

    def expected_waits(self) -> Floats:
        """Returns `expected_wait` of each edge."""
        return np.cumsum(_waits(EDGES, self.cdf))


def _waits(edges: Floats, cdf: Floats) -> Floats:
    """Returns the integral of P(T > t) between neighbouring edges; the first integral starts at 0."""
    lower, widths = np.concatenate(([0.0], edges[:-1])), np.diff(edges, prepend=0.0)
    masses = np.diff(cdf, prepend=0.0)
    # The mean of the times inside (lower, upper] is the logarithmic mean of both; in the first bucket it is the middle.
    means = np.empty_like(edges)
    means[0] = edges[0] / 2
    ratios = np.log(edges[1:] / lower[1:])
    means[1:] = np.where(ratios > 0, widths[1:] / np.where(ratios > 0, ratios, 1.0), edges[1:])
    return (1.0 - cdf) * widths + masses * (means - lower)


class LatencyHistogram:
    """Latencies of one kind of event. An observation has half its weight after `half_life` newer ones."""

    def __init__(self, half_life: float = 256.0) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self._masses: Floats = np.zeros(_NUM_BUCKETS)

    @property
    def masses(self) -> Floats:
        """The weight of each bucket.  # [num_buckets], read-only"""
        return self._masses

    @property
    def weight(self) -> float:
        """The present number of observations, older ones counted by their remaining weight."""
        return float(self._masses.sum())

    def observe(self, seconds: float) -> None:
        """Records one latency; infinity for an event that never ended."""
        self._masses *= self._decay
        self._masses[np.searchsorted(EDGES, seconds)] += 1.0

    def distribution(self, prior: Floats) -> LatencyDistribution:
        """Returns the distribution of the observations together with a prior.

        The sum of the prior's masses is its weight, in observations.
        """
        return LatencyDistribution.from_masses(self._masses + prior)

    def check_integrity(self) -> None:
        """Checks that no weight is negative and that the sum is not above its limit."""
        assert bool(np.all(self._masses >= 0.0)), "a bucket has a negative weight"
        assert self.weight * (1.0 - self._decay) <= 1.0 + 1e-9, "more is remembered than can be"


def lognormal_masses(median_s: float, sigma: float) -> Floats:
    """Returns masses of a lognormal prior; they sum to 1. `sigma` is the standard deviation of ln T."""
    scores = (_LOG_EDGES - math.log(median_s)) / (sigma * math.sqrt(2.0))
    cdf = np.array([0.5 * (1.0 + math.erf(score)) for score in scores])
    return np.diff(cdf, prepend=0.0, append=1.0)
