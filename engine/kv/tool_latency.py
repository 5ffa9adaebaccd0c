"""Decides how long a session that waits for tools keeps its pages on the device.

A lease of tau seconds is worth P(T <= tau) * benefit - cost * E[min(T, tau)], where T is the time at which the last
tool answers. An answer within the lease saves the time to load or compute the pages and to wait for room. Every second
of the lease takes room from other sessions. ToolLatencyModel learns T for each tool of each domain and returns the best
tau. Source: the time-to-live of Continuum / CacheTTL (arXiv 2511.02230), extended by the expected cost of the time
held.

A lease never makes an allocation fail, and clients can only shorten it. The number of histograms is limited per domain
and in total, so a domain that invents tool names cannot evict the histograms of other domains.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from graftwork.engine.kv.latency_histogram import EDGES, Floats, LatencyDistribution, LatencyHistogram, lognormal_masses

_FIRST_GUESS: Floats = lognormal_masses(median_s=2.0, sigma=2.0)
"""The prior before any observation: half of all tools answer within 2 s, and 5 % need more than 54 s.

These are guesses.
"""
_HINT_SLACK = 1.5
"""A lease lasts this many times as long as the client expects the tool to take."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The benefit and the cost of a lease, in seconds of engine time."""

    benefit_s: float = 1.0
    """The time that an answer within the lease saves: to load or compute the pages, and to wait for room for them."""
    cost_per_s: float = 0.05
    """Cost of one second of the lease: the held share of the device if requests wait for room, else 0."""
    longest_s: float = 300.0
    """The upper limit of every lease."""


class ToolHistograms:
    """Latency histograms by domain and tool. The least recently used are removed first."""

    def __init__(
        self, max_pairs: int = 4096, max_tools_per_domain: int = 64, prior_weight: float = 8.0, half_life: float = 256.0
    ) -> None:
        """`prior_weight` is the weight of a prior in observations. The prior of one tool is the histogram of all tools."""
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
        """Records the latency of a tool; infinity if it never answered."""
        self._of_all.observe(seconds)
        histograms = self._by_domain.setdefault(domain, OrderedDict())
        self._by_domain.move_to_end(domain)
        if tool not in histograms:
            histograms[tool] = LatencyHistogram(self._half_life)
            self._num_pairs += 1
            self._enforce_bounds(histograms)
        histograms.move_to_end(tool)
        histograms[tool].observe(seconds)

    def distribution(self, domain: str, tool: str) -> LatencyDistribution:
        """Returns the expected latency of a tool. For an unknown tool, it is the latency of all tools of all domains."""
        histograms = self._by_domain.get(domain)
        histogram = histograms.get(tool) if histograms is not None else None
        prior = self._of_all.masses + max(self._prior_weight, 1e-9) * _FIRST_GUESS
        scaled = prior * (self._prior_weight / prior.sum())
        return histogram.distribution(scaled) if histogram is not None else LatencyDistribution.from_masses(prior)

    def check_integrity(self) -> None:
        """Recounts the pairs."""
        found = sum(len(histograms) for histograms in self._by_domain.values())
        assert found == self._num_pairs <= self._max_pairs, f"{self._num_pairs} pairs counted, {found} found"
        for histograms in self._by_domain.values():
            assert 0 < len(histograms) <= self._max_tools
            for histogram in histograms.values():
                histogram.check_integrity()

    def _enforce_bounds(self, histograms: OrderedDict[str, LatencyHistogram]) -> None:
        """Removes histograms of this domain above its limit, and of the least recently used domain above the total
        limit.
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
    """Learns tool latencies and computes leases."""

    def __init__(self, histograms: ToolHistograms | None = None, terms: LeaseTerms | None = None) -> None:
        """`terms` are the default terms of a lease."""
        self._histograms = histograms if histograms is not None else ToolHistograms()
        self._terms = terms if terms is not None else LeaseTerms()

    def observe(self, domain: str, tool: str, seconds: float) -> None:
        """Records the latency of a tool; infinity if the session ended without an answer."""
        self._histograms.observe(domain, tool, seconds)

    def lease_s(self, domain: str, tools: Mapping[str, float | None], terms: LeaseTerms | None = None) -> float:
        """Returns the best lease in seconds for `tools`, which were called together; 0 if a lease has no value.

        `tools` maps names to the milliseconds that the client expects, or None.
        """
        if not tools:
            return 0.0
        terms = terms if terms is not None else self._terms
        distribution = self._latest_of(domain, tools)
        lease_s, hinted_s = _best_lease_s(distribution, terms, terms.longest_s), _hinted_s(tools.values())
        return lease_s if lease_s <= hinted_s else _best_lease_s(distribution, terms, hinted_s)

    def return_probability(self, domain: str, tools: Collection[str], waited_s: float, within_s: float) -> float:
        """Returns the probability that all `tools` answer within the next `within_s` seconds; 1 without tools.

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
