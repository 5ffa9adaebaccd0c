"""Estimates how long tools take, and decides how long a session that waits for tools keeps its pages on the device.

Owns the latency histograms of each tool of each domain (usually one tenant). A lease protects the pages of a session
for a limited time: it raises their rank, so that they are evicted later. It never makes an allocation fail. Clients can
only shorten a lease.

A lease of `s` seconds has this value:

    P(T <= s) * benefit - cost * E[min(T, s)]

T is the time until the last tool answers, P a probability, and E a mean. `benefit` is the time that is saved if T is at
most `s`, because the pages need not be loaded or computed. `cost` is the cost of one second of the lease, because its
pages take room from other sessions. LeaseTerms gives both. Source: the time-to-live of Continuum / CacheTTL (arXiv
2511.02230), with the cost added.

A histogram has four buckets per octave (factor of two) from 1 ms to 10 h, so a quantile is wrong by at most a factor of
2^(1/4) (19 %). The first bucket holds all times up to 1 ms. Inside it, times are assumed to be uniform. Inside every
other bucket, the logarithm of the time is assumed to be uniform. A time above 10 h counts as "never". The number of
histograms is limited per domain and in total, so that no domain can fill the memory by inventing tool names.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
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
    """A probability distribution of a time T in seconds, for example of the time that a tool takes."""

    cdf: Floats
    """The probability that T is at most EDGES[i], for each i.  # [len(EDGES)]"""

    @classmethod
    def from_masses(cls, masses: Floats) -> "LatencyDistribution":
        """Returns the distribution that a histogram describes.

        `masses` are the weights of the histogram's buckets, with any positive sum.  # [num_buckets]
        """
        return cls(np.cumsum(masses[:-1]) / masses.sum())

    @classmethod
    def latest_of(cls, distributions: Iterable["LatencyDistribution"]) -> "LatencyDistribution":
        """Returns the distribution of the longest of several independent times, which have the given `distributions`."""
        return cls(np.prod([distribution.cdf for distribution in distributions], axis=0))

    def probability_within(self, seconds: float) -> float:
        """Returns the probability that the time (for example, of a tool's answer) is at most `seconds`."""
        if seconds <= SHORTEST_S:
            return float(self.cdf[0]) * max(seconds, 0.0) / SHORTEST_S
        return float(np.interp(math.log(seconds), _LOG_EDGES, self.cdf))

    def quantile(self, share: float) -> float:
        """Returns a quantile: the time in seconds that is not exceeded with probability `share`, which is in [0, 1].

        Returns infinity if this time is above the last edge of the histogram.
        """
        number = int(np.searchsorted(self.cdf, share))
        if number == len(EDGES):
            return math.inf
        if number == 0:
            return SHORTEST_S * share / float(self.cdf[0]) if share > 0 else 0.0
        below, above = self.cdf[number - 1], self.cdf[number]
        return float(EDGES[number - 1] * 2 ** ((share - below) / (above - below) / BUCKETS_PER_OCTAVE))

    def return_probability(self, waited_s: float, within_s: float) -> float:
        """Returns the probability that an event (for example, a tool's answer) happens within the next `within_s`
        seconds.

        The event has not happened in the first `waited_s` seconds. Returns 0 if the distribution has no time above
        `waited_s`.
        """
        survival = 1.0 - self.probability_within(waited_s)
        if survival <= 0.0:
            return 0.0
        return (self.probability_within(waited_s + within_s) - 1.0 + survival) / survival

    def expected_wait(self, seconds: float) -> float:
        """Returns the mean time in seconds that a caller waits for an event, if the caller gives up after `seconds`."""
        whole = int(np.searchsorted(EDGES, seconds, side="right"))
        edges = np.append(EDGES[:whole], max(seconds, 0.0))
        cdf = np.append(self.cdf[:whole], self.probability_within(seconds))
        return float(np.sum(_waits(edges, cdf)))

    def expected_waits(self) -> Floats:
        """Returns `expected_wait(edge)` for each upper edge of a histogram bucket, in seconds.  # [len(EDGES)]"""
        return np.cumsum(_waits(EDGES, self.cdf))


def _waits(edges: Floats, cdf: Floats) -> Floats:
    """Returns the integral of P(T > t) over each bucket except the last, in seconds. The first bucket starts at 0."""
    lower, widths = np.concatenate(([0.0], edges[:-1])), np.diff(edges, prepend=0.0)
    masses = np.diff(cdf, prepend=0.0)
    # The mean of the times inside (lower, upper] is the logarithmic mean of both; in the first bucket it is the middle.
    means = np.empty_like(edges)
    means[0] = edges[0] / 2
    ratios = np.log(edges[1:] / lower[1:])
    means[1:] = np.where(ratios > 0, widths[1:] / np.where(ratios > 0, ratios, 1.0), edges[1:])
    return (1.0 - cdf) * widths + masses * (means - lower)


class LatencyHistogram:
    """Counts the latencies of one kind of event, in buckets of logarithmic width. Takes 0.8 KiB of memory.

    The weight of a latency halves with every `half_life` newer latencies.
    """

    def __init__(self, half_life: float = 256.0) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self._masses: Floats = np.zeros(_NUM_BUCKETS)

    @property
    def masses(self) -> Floats:
        """The sum of the weights of the latencies in each bucket.  # [num_buckets], read-only"""
        return self._masses

    @property
    def weight(self) -> float:
        """The sum of the weights of all recorded latencies. A new latency has weight 1, an older one less."""
        return float(self._masses.sum())

    def observe(self, seconds: float) -> None:
        """Records one latency in seconds. Infinity stands for an event that never happened."""
        self._masses *= self._decay
        self._masses[np.searchsorted(EDGES, seconds)] += 1.0

    def distribution(self, prior: Floats) -> LatencyDistribution:
        """Returns the distribution of the recorded latencies together with a prior (latencies assumed in advance).

        `prior` is a weight for each bucket. The sum of these weights says how many latencies the prior counts as.
        """
        return LatencyDistribution.from_masses(self._masses + prior)

    def check_integrity(self) -> None:
        """Checks that no bucket has a negative weight, and that the sum of all weights is not above its mathematical
        limit.
        """
        assert bool(np.all(self._masses >= 0.0)), "a bucket has a negative weight"
        assert self.weight * (1.0 - self._decay) <= 1.0 + 1e-9, "more is remembered than can be"


def lognormal_masses(median_s: float, sigma: float) -> Floats:
    """Returns the probability that a time with a lognormal distribution is in each bucket of a histogram.  #
    [num_buckets]

    `median_s` is the median of the time in seconds. `sigma` is the standard deviation of the time's natural logarithm.
    """
    scores = (_LOG_EDGES - math.log(median_s)) / (sigma * math.sqrt(2.0))
    cdf = np.array([0.5 * (1.0 + math.erf(score)) for score in scores])
    return np.diff(cdf, prepend=0.0, append=1.0)


_FIRST_GUESS: Floats = lognormal_masses(median_s=2.0, sigma=2.0)
"""The distribution assumed before any observation: half of all tools answer within 2 s, 5 % need more than 54 s.

Both figures are guesses.
"""


_HINT_SLACK = 1.5
"""A lease lasts at most this many times as long as the client expects the tool to take."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What a lease is worth and what it costs, in seconds of the engine's work, and how long it may last."""

    benefit_s: float = 1.0
    """The seconds that a lease saves if the tools answer before it ends: no load, no prefill and no wait for free
    pages.
    """
    cost_per_s: float = 0.05
    """The cost of one second of a lease: the share of the device that the leased pages take, or 0 if no request waits
    for room.
    """
    longest_s: float = 300.0
    """The largest length of a lease, in seconds."""


class ToolHistograms:
    """Owns a latency histogram for each tool of each domain (usually one tenant).

    If there are too many, the least recently used histograms are removed.
    """

    def __init__(
        self, max_pairs: int = 4096, max_tools_per_domain: int = 64, prior_weight: float = 8.0, half_life: float = 256.0
    ) -> None:
        """`prior_weight` is the weight of a prior in observations.

        The prior of one tool is the histogram of all tools.
        """
        self._max_pairs = max_pairs
        self._max_tools = max_tools_per_domain
        self._prior_weight = prior_weight
        self._half_life = half_life
        self._of_all = LatencyHistogram(half_life)
        self._by_domain: OrderedDict[str, OrderedDict[str, LatencyHistogram]] = OrderedDict()
        self._num_pairs = 0

    def __len__(self) -> int:
        """Returns the number of pairs of domain and tool."""
        return self._num_pairs

    def observe(self, domain: str, tool: str, seconds: float) -> None:
        """Records that a tool has taken `seconds` to answer. Infinity means that the tool never answered."""
        self._of_all.observe(seconds)
        histograms = self._by_domain.setdefault(domain, OrderedDict())
        self._by_domain.move_to_end(domain)
        if tool not in histograms:
            histograms[tool] = LatencyHistogram(self._half_life)
            self._num_pairs += 1
            self._enforce_bounds(histograms)
        histograms.move_to_end(tool)
        histograms[tool].observe(seconds)

    def forget_domain(self, domain: str) -> None:
        """Drops the histograms of a domain (usually one tenant), with the names of its tools."""
        self._num_pairs -= len(self._by_domain.pop(domain, ()))

    def distribution(self, domain: str, tool: str) -> LatencyDistribution:
        """Returns the distribution of the time that a tool of `domain` (usually one tenant) takes to answer.

        If nothing was recorded for the tool, returns the distribution of all tools of all domains.
        """
        histograms = self._by_domain.get(domain)
        histogram = histograms.get(tool) if histograms is not None else None
        prior = self._of_all.masses + max(self._prior_weight, 1e-9) * _FIRST_GUESS
        scaled = prior * (self._prior_weight / prior.sum())
        return histogram.distribution(scaled) if histogram is not None else LatencyDistribution.from_masses(prior)

    def check_integrity(self) -> None:
        """Recounts the histograms, and checks that their number is within the limits per domain and in total."""
        found = sum(len(histograms) for histograms in self._by_domain.values())
        assert found == self._num_pairs <= self._max_pairs, f"{self._num_pairs} pairs counted, {found} found"
        for histograms in self._by_domain.values():
            assert 0 < len(histograms) <= self._max_tools
            for histogram in histograms.values():
                histogram.check_integrity()

    def _enforce_bounds(self, histograms: OrderedDict[str, LatencyHistogram]) -> None:
        """Removes the least recently used tool of one domain if the domain has too many. `histograms` are those of this
        domain.

        While all domains together have too many tools, removes tools of the least recently used domain.
        """
        if len(histograms) > self._max_tools:
            histograms.popitem(last=False)
            self._num_pairs -= 1
        while self._num_pairs > self._max_pairs:
            domain, oldest = next(iter(self._by_domain.items()))
            oldest.popitem(last=False)
            self._num_pairs -= 1
            if not oldest:
                del self._by_domain[domain]


class ToolLatencyModel:
    """Learns how long tools take, and computes how long the pages of a session that waits for tools stay on the device."""

    def __init__(self, histograms: ToolHistograms | None = None, terms: LeaseTerms | None = None) -> None:
        """`terms` are the default terms of a lease."""
        self._histograms = histograms if histograms is not None else ToolHistograms()
        self._terms = terms if terms is not None else LeaseTerms()

    def observe(self, domain: str, tool: str, seconds: float) -> None:
        """Records that a tool has taken `seconds` to answer. Infinity means that the session ended before an answer."""
        self._histograms.observe(domain, tool, seconds)

    def forget_domain(self, domain: str) -> None:
        """Drops what was learned of the tools of a domain (usually one tenant)."""
        self._histograms.forget_domain(domain)

    def lease_s(self, domain: str, tools: Mapping[str, float | None], terms: LeaseTerms | None = None) -> float:
        """Returns how many seconds a session's pages should stay on the device while the session waits for `tools`.

        `tools` maps the name of each tool to the milliseconds that the client expects it to take, or to None. The tools
        were called at the same time. Returns 0 if no lease is worth its cost.
        """
        if not tools:
            return 0.0
        terms = terms if terms is not None else self._terms
        distribution = self._latest_of(domain, tools)
        lease_s, hinted_s = _best_lease_s(distribution, terms, terms.longest_s), _hinted_s(tools.values())
        return lease_s if lease_s <= hinted_s else _best_lease_s(distribution, terms, hinted_s)

    def return_probability(self, domain: str, tools: Collection[str], waited_s: float, within_s: float) -> float:
        """Returns the probability that all `tools` have answered after `within_s` more seconds; 1 if `tools` is empty.

        The tools were called `waited_s` seconds ago, and not all of them have answered.
        """
        if not tools:
            return 1.0
        return self._latest_of(domain, tools).return_probability(waited_s, within_s)

    def check_integrity(self) -> None:
        self._histograms.check_integrity()

    def _latest_of(self, domain: str, tools: Iterable[str]) -> LatencyDistribution:
        return LatencyDistribution.latest_of(self._histograms.distribution(domain, tool) for tool in tools)


def _best_lease_s(distribution: LatencyDistribution, terms: LeaseTerms, longest_s: float) -> float:
    """Returns the lease of at most `longest_s` seconds with the highest value; 0 if no lease has a value above 0."""
    is_candidate = longest_s > EDGES
    candidates = np.append(EDGES[is_candidate], longest_s)
    returned = np.append(distribution.cdf[is_candidate], distribution.probability_within(longest_s))
    held = np.append(distribution.expected_waits()[is_candidate], distribution.expected_wait(longest_s))
    worth = returned * terms.benefit_s - held * terms.cost_per_s
    best = int(np.argmax(worth))
    return float(candidates[best]) if worth[best] > 0.0 else 0.0


def _hinted_s(expected_ms: Iterable[float | None]) -> float:
    """Returns the seconds after which all tools should have answered; infinity if the client gave no hint for one."""
    return max(_HINT_SLACK * expected / 1000.0 if expected is not None else math.inf for expected in expected_ms)
