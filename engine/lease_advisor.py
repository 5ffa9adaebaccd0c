"""How long the device keeps the pages of a session that waits for its tools.

Holding pages for tau seconds is worth P(T <= tau) * benefit - cost * E[min(T, tau)], where T is when the last tool
returns: a return within the lease saves loading or recomputing and the queue, and every second held takes room from
others. LeaseAdvisor learns T for each tool of each party, and answers the tau where that is largest.
Source: the time-to-live of Continuum / CacheTTL (arXiv 2511.02230), with a cost for the time held in expectation.

A lease is advice: it never makes an allocation fail. Clients can only shorten it. What is learnt is bounded in number
by party and in all, so that invented tool names cost nobody else what is known of theirs.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from graftwork.engine.latency_sketch import EDGES, Floats, LatencyDistribution, LatencySketch, lognormal_masses

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


class SketchBook:
    """Sketches by party and tool, those used least recently given up first."""

    def __init__(
        self, max_pairs: int = 4096, max_tools_per_party: int = 64, prior_weight: float = 8.0, half_life: float = 256.0
    ) -> None:
        """A prior is worth `prior_weight` observations: that of all tools for one, the first guess for all."""
        self._max_pairs = max_pairs
        self._max_tools = max_tools_per_party
        self._prior_weight = prior_weight
        self._half_life = half_life
        self._of_all = LatencySketch(half_life)
        self._by_party: OrderedDict[str, OrderedDict[str, LatencySketch]] = OrderedDict()
        self._num_pairs = 0

    def __len__(self) -> int:
        """Pairs of party and tool that something is known of."""
        return self._num_pairs

    def observe(self, party: str, tool: str, seconds: float) -> None:
        """A tool has returned after `seconds`, or never (infinite)."""
        self._of_all.observe(seconds)
        sketches = self._by_party.setdefault(party, OrderedDict())
        self._by_party.move_to_end(party)
        if tool not in sketches:
            sketches[tool] = LatencySketch(self._half_life)
            self._num_pairs += 1
            self._give_up_oldest(sketches)
        sketches.move_to_end(tool)
        sketches[tool].observe(seconds)

    def distribution(self, party: str, tool: str) -> LatencyDistribution:
        """What to expect of a tool; of one never seen, what all tools of all parties have shown."""
        sketches = self._by_party.get(party)
        sketch = sketches.get(tool) if sketches is not None else None
        prior = self._of_all.masses + max(self._prior_weight, 1e-9) * _FIRST_GUESS
        scaled = prior * (self._prior_weight / prior.sum())
        return sketch.distribution(scaled) if sketch is not None else LatencyDistribution.from_masses(prior)

    def check_integrity(self) -> None:
        """Recount the pairs."""
        found = sum(len(sketches) for sketches in self._by_party.values())
        assert found == self._num_pairs <= self._max_pairs, f"{self._num_pairs} pairs counted, {found} found"
        for sketches in self._by_party.values():
            assert 0 < len(sketches) <= self._max_tools
            for sketch in sketches.values():
                sketch.check_integrity()

    def _give_up_oldest(self, sketches: OrderedDict[str, LatencySketch]) -> None:
        """Keep the party within its bound at its own cost, and all within theirs at that of whoever was away longest."""
        if len(sketches) > self._max_tools:
            sketches.popitem(last=False)
            self._num_pairs -= 1
        while self._num_pairs > self._max_pairs:
            party, oldest = next(iter(self._by_party.items()))
            oldest.popitem(last=False)
            self._num_pairs -= 1
            if not oldest:
                del self._by_party[party]


class LeaseAdvisor:
    """Answers for how long, and how soon."""

    def __init__(self, book: SketchBook | None = None, terms: LeaseTerms | None = None) -> None:
        """`terms` hold for every lease that does not bring its own."""
        self._book = book if book is not None else SketchBook()
        self._terms = terms if terms is not None else LeaseTerms()

    def observe(self, party: str, tool: str, seconds: float) -> None:
        """A tool has returned after `seconds`; infinite for a session that ended or was given up without it."""
        self._book.observe(party, tool, seconds)

    def lease_s(self, party: str, tools: Mapping[str, float | None], terms: LeaseTerms | None = None) -> float:
        """Seconds from the call of `tools`, which run side by side, each with the milliseconds its client expects.

        0 if holding is worth nothing.
        """
        if not tools:
            return 0.0
        terms = terms if terms is not None else self._terms
        distribution = self._latest_of(party, tools)
        lease_s, hinted_s = _best_lease_s(distribution, terms, terms.longest_s), _hinted_s(tools.values())
        return lease_s if lease_s <= hinted_s else _best_lease_s(distribution, terms, hinted_s)

    def return_probability(self, party: str, tools: Collection[str], waited_s: float, within_s: float) -> float:
        """P(the last of `tools` returns within the next `within_s`, given that it has not for `waited_s`).

        1 where nothing is waited for: the session is about to go on.
        """
        if not tools:
            return 1.0
        return self._latest_of(party, tools).return_probability(waited_s, within_s)

    def check_integrity(self) -> None:
        self._book.check_integrity()

    def _latest_of(self, party: str, tools: Iterable[str]) -> LatencyDistribution:
        return LatencyDistribution.latest_of(self._book.distribution(party, tool) for tool in tools)


def _best_lease_s(distribution: LatencyDistribution, terms: LeaseTerms, longest_s: float) -> float:
    """The lease of at most `longest_s` that is worth most; 0 if none is worth anything."""
    is_candidate = longest_s > EDGES
    candidates = np.append(EDGES[is_candidate], longest_s)
    returned = np.append(distribution.cdf[is_candidate], distribution.probability_within(longest_s))
    held = np.append(distribution.expected_waits()[is_candidate], distribution.expected_wait(longest_s))
    worth = returned * terms.benefit_s - held * terms.cost_per_s
    best = int(np.argmax(worth))
    return float(candidates[best]) if worth[best] > 0.0 else 0.0


def _hinted_s(expected_ms: Iterable[float | None]) -> float:
    """When all tools should be back by their clients' word; infinite if of one nothing was said."""
    return max(_HINT_SLACK * expected / 1000.0 if expected is not None else math.inf for expected in expected_ms)
