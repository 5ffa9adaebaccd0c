"""How long the device keeps the pages of a session that waits for its tools.

Holding pages for tau seconds is worth P(T <= tau) * benefit - cost * E[min(T, tau)], where T is when the last tool
returns: a return within the lease saves loading or recomputing and the queue, and every second held takes room from
others. ToolLatencyModel learns T for each tool of each domain, and answers the tau where that is largest.
Source: the time-to-live of Continuum / CacheTTL (arXiv 2511.02230), with a cost for the time held in expectation.

A lease is advice: it never makes an allocation fail. Clients can only shorten it. What is learnt is bounded in number
by domain and in all, so that invented tool names cost nobody else what is known of theirs.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from graftwork.engine.kv.latency_histogram import EDGES, Floats, LatencyDistribution, LatencyHistogram, lognormal_masses

_FIRST_GUESS: Floats = lognormal_masses(median_s=2.0, sigma=2.0)
"""Before anything is known: half of all tools within 2 s, 5 % above 54 s (an estimate; it is outweighed soon)."""
_HINT_SLACK = 1.5
"""A tool that takes half again as long as its client expected still finds its pages."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What holding is for, in seconds of the engine's time."""

    benefit_s: float = 1.0
    """What a return within the lease saves: loading or recomputing the pages, and waiting for room for them."""
    cost_per_s: float = 0.05
    """What a second of holding costs: the share of the device that is held, if others wait for it; 0 if nobody does."""
    longest_s: float = 300.0
    """No lease is longer, whatever it is worth."""


class ToolHistograms:
    """Sketches by domain and tool, those used least recently given up first."""

    def __init__(
        self, max_pairs: int = 4096, max_tools_per_domain: int = 64, prior_weight: float = 8.0, half_life: float = 256.0
    ) -> None:
        """A prior is worth `prior_weight` observations: that of all tools for one, the first guess for all."""
        self._max_pairs = max_pairs
        self._max_tools = max_tools_per_domain
        self._prior_weight = prior_weight
        self._half_life = half_life
        self._of_all = LatencyHistogram(half_life)
        self._by_domain: OrderedDict[str, OrderedDict[str, LatencyHistogram]] = OrderedDict()
        self._num_pairs = 0

    def __len__(self) -> int:
        """Pairs of domain and tool that something is known of."""
        return self._num_pairs

    def observe(self, domain: str, tool: str, seconds: float) -> None:
        """A tool has returned after `seconds`, or never (infinite)."""
        self._of_all.observe(seconds)
        histograms = self._by_domain.setdefault(domain, OrderedDict())
        self._by_domain.move_to_end(domain)
        if tool not in histograms:
            histograms[tool] = LatencyHistogram(self._half_life)
            self._num_pairs += 1
            self._give_up_oldest(histograms)
        histograms.move_to_end(tool)
        histograms[tool].observe(seconds)

    def distribution(self, domain: str, tool: str) -> LatencyDistribution:
        """What to expect of a tool; of one never seen, what all tools of all domains have shown."""
        histograms = self._by_domain.get(domain)
        histogram = histograms.get(tool) if histograms is not None else None
        prior = self._of_all.masses + max(self._prior_weight, 1e-9) * _FIRST_GUESS
        scaled = prior * (self._prior_weight / prior.sum())
        return histogram.distribution(scaled) if histogram is not None else LatencyDistribution.from_masses(prior)

    def check_integrity(self) -> None:
        """Recount the pairs."""
        found = sum(len(histograms) for histograms in self._by_domain.values())
        assert found == self._num_pairs <= self._max_pairs, f"{self._num_pairs} pairs counted, {found} found"
        for histograms in self._by_domain.values():
            assert 0 < len(histograms) <= self._max_tools
            for histogram in histograms.values():
                histogram.check_integrity()

    def _give_up_oldest(self, histograms: OrderedDict[str, LatencyHistogram]) -> None:
        """Keep the domain within its bound at its own cost, and all within theirs at that of whoever was away longest."""
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
    """Answers for how long, and how soon."""

    def __init__(self, histograms: ToolHistograms | None = None, terms: LeaseTerms | None = None) -> None:
        """`terms` hold for every lease that does not bring its own."""
        self._histograms = histograms if histograms is not None else ToolHistograms()
        self._terms = terms if terms is not None else LeaseTerms()

    def observe(self, domain: str, tool: str, seconds: float) -> None:
        """A tool has returned after `seconds`; infinite for a session that ended or was given up without it."""
        self._histograms.observe(domain, tool, seconds)

    def lease_s(self, domain: str, tools: Mapping[str, float | None], terms: LeaseTerms | None = None) -> float:
        """Seconds from the call of `tools`, which run side by side, each with the milliseconds its client expects.

        0 if holding is worth nothing.
        """
        if not tools:
            return 0.0
        terms = terms if terms is not None else self._terms
        distribution = self._latest_of(domain, tools)
        longest = min(terms.longest_s, _hinted_s(tools.values()))
        is_candidate = longest > EDGES
        candidates = np.append(EDGES[is_candidate], longest)
        returned = np.append(distribution.cdf[is_candidate], distribution.probability_within(longest))
        held = np.append(distribution.expected_waits()[is_candidate], distribution.expected_wait(longest))
        worth = returned * terms.benefit_s - held * terms.cost_per_s
        best = int(np.argmax(worth))
        return float(candidates[best]) if worth[best] > 0.0 else 0.0

    def return_probability(self, domain: str, tools: Collection[str], waited_s: float, within_s: float) -> float:
        """P(the last of `tools` returns within the next `within_s`, given that it has not for `waited_s`).

        1 where nothing is waited for: the session is about to go on.
        """
        if not tools:
            return 1.0
        return self._latest_of(domain, tools).return_probability(waited_s, within_s)

    def check_integrity(self) -> None:
        self._histograms.check_integrity()

    def _latest_of(self, domain: str, tools: Iterable[str]) -> LatencyDistribution:
        return LatencyDistribution.latest_of(self._histograms.distribution(domain, tool) for tool in tools)


def _hinted_s(expected_ms: Iterable[float | None]) -> float:
    """When all tools should be back by their clients' word; infinite if of one nothing was said."""
    return max(_HINT_SLACK * expected / 1000.0 if expected is not None else math.inf for expected in expected_ms)
