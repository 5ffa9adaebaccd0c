"""How long something takes, from what it took before: a histogram with logarithmic buckets that forgets.

Four buckets an octave from 1 ms to 10 h: a quantile is wrong by at most a factor of 2^(1/4), 19 %, which a lease does
not notice, and a histogram is 0.8 KiB. Within a bucket the logarithm of the time is taken as uniform, below the first the
time itself. What takes longer than the last edge, or never ends, has its own bucket and counts as never.
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
"""The upper edges of all buckets but the last, in seconds; a bucket has its upper edge and not its lower."""
_LOG_EDGES: Floats = np.log(EDGES)
_NUM_BUCKETS = len(EDGES) + 1


@dataclass(frozen=True, slots=True, eq=False)
class LatencyDistribution:
    """A distribution of seconds; `cdf` is P(T <= edge) for each of EDGES."""

    cdf: Floats

    @classmethod
    def from_masses(cls, masses: Floats) -> "LatencyDistribution":
        """Of a histogram, whose masses need not add up to one."""
        return cls(np.cumsum(masses[:-1]) / masses.sum())

    @classmethod
    def latest_of(cls, distributions: Iterable["LatencyDistribution"]) -> "LatencyDistribution":
        """When the last of several that run side by side is done, taken as independent."""
        return cls(np.prod([distribution.cdf for distribution in distributions], axis=0))

    def probability_within(self, seconds: float) -> float:
        """P(T <= seconds)."""
        if seconds <= SHORTEST_S:
            return float(self.cdf[0]) * max(seconds, 0.0) / SHORTEST_S
        return float(np.interp(math.log(seconds), _LOG_EDGES, self.cdf))

    def quantile(self, share: float) -> float:
        """The time within which a `share` of all is done; infinite if that many never are."""
        number = int(np.searchsorted(self.cdf, share))
        if number == len(EDGES):
            return math.inf
        if number == 0:
            return SHORTEST_S * share / float(self.cdf[0]) if share > 0 else 0.0
        below, above = self.cdf[number - 1], self.cdf[number]
        return float(EDGES[number - 1] * 2 ** ((share - below) / (above - below) / BUCKETS_PER_OCTAVE))

    def return_probability(self, waited_s: float, within_s: float) -> float:
        """P(T <= waited + within | T > waited): what has not come for `waited_s` comes within the next `within_s`.

        0 for what has taken longer than anything that ever came.
        """
        survival = 1.0 - self.probability_within(waited_s)
        if survival <= 0.0:
            return 0.0
        return (self.probability_within(waited_s + within_s) - 1.0 + survival) / survival

    def expected_wait(self, seconds: float) -> float:
        """E[min(T, seconds)]: how long one waits who gives up after `seconds`."""
        whole = int(np.searchsorted(EDGES, seconds, side="right"))
        edges = np.append(EDGES[:whole], max(seconds, 0.0))
        cdf = np.append(self.cdf[:whole], self.probability_within(seconds))
        return float(np.sum(_waits(edges, cdf)))

    def expected_waits(self) -> Floats:
        """`expected_wait` of every edge."""
        return np.cumsum(_waits(EDGES, self.cdf))


def _waits(edges: Floats, cdf: Floats) -> Floats:
    """The integral of P(T > t) from each edge's predecessor, the first time from 0, to the edge."""
    lower, widths = np.concatenate(([0.0], edges[:-1])), np.diff(edges, prepend=0.0)
    masses = np.diff(cdf, prepend=0.0)
    # Of the mass that ends within (lower, upper], the mean end is the logarithmic mean, in the first bucket the middle.
    means = np.empty_like(edges)
    means[0] = edges[0] / 2
    ratios = np.log(edges[1:] / lower[1:])
    means[1:] = np.where(ratios > 0, widths[1:] / np.where(ratios > 0, ratios, 1.0), edges[1:])
    return (1.0 - cdf) * widths + masses * (means - lower)


class LatencyHistogram:
    """The histogram of one kind of thing; an observation counts half after `half_life` newer ones."""

    def __init__(self, half_life: float = 256.0) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self._masses: Floats = np.zeros(_NUM_BUCKETS)

    @property
    def masses(self) -> Floats:
        """The weight of each bucket, [num_buckets]. To be read only."""
        return self._masses

    @property
    def weight(self) -> float:
        """How many observations it is worth by now."""
        return float(self._masses.sum())

    def observe(self, seconds: float) -> None:
        """Enter one latency; infinite for what never ended."""
        self._masses *= self._decay
        self._masses[np.searchsorted(EDGES, seconds)] += 1.0

    def distribution(self, prior: Floats) -> LatencyDistribution:
        """What to expect, given observations and a prior's masses (their sum is how many observations it is worth)."""
        return LatencyDistribution.from_masses(self._masses + prior)

    def check_integrity(self) -> None:
        """Masses are counts, and no more than forgetting leaves of for-ever."""
        assert bool(np.all(self._masses >= 0.0)), "a bucket has a negative weight"
        assert self.weight * (1.0 - self._decay) <= 1.0 + 1e-9, "more is remembered than can be"


def lognormal_masses(median_s: float, sigma: float) -> Floats:
    """A prior for what nobody has observed: masses that add up to one; `sigma` is that of the natural logarithm."""
    scores = (_LOG_EDGES - math.log(median_s)) / (sigma * math.sqrt(2.0))
    cdf = np.array([0.5 * (1.0 + math.erf(score)) for score in scores])
    return np.diff(cdf, prepend=0.0, append=1.0)
