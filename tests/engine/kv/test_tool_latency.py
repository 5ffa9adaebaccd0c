"""Compares leases with a search over the samples, and tests what the model remembers."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graftwork.engine.kv.tool_latency import EDGES, LeaseTerms, ToolHistograms, ToolLatencyModel

latencies = st.lists(st.floats(0.002, 2000.0), min_size=1, max_size=40)
WIDTH = 2**0.25


def taught(samples: list[float], prior_weight: float = 0.0) -> ToolLatencyModel:
    """Returns a model without decay that knows one tool by its samples."""
    model = ToolLatencyModel(ToolHistograms(prior_weight=prior_weight, half_life=math.inf))
    for sample in samples:
        model.observe("domain", "tool", sample)
    return model


def worth(samples: list[float], lease_s: float, terms: LeaseTerms) -> float:
    """Returns the mean worth of a lease over the samples."""
    returned = np.mean(np.asarray(samples) <= lease_s)
    held = np.mean(np.minimum(samples, lease_s))
    return float(returned * terms.benefit_s - held * terms.cost_per_s)


@given(latencies, st.floats(0.05, 20.0), st.floats(0.001, 1.0), st.floats(0.1, 3000.0))
def test_no_lease_would_have_been_worth_more(samples: list[float], benefit: float, cost: float, longest: float) -> None:
    """No lease up to the longest is worth more on the samples, within the width of one bucket."""
    terms = LeaseTerms(benefit, cost, longest)
    tried = [0.0, *(edge for edge in EDGES if edge <= longest)]
    best = max(worth(samples, lease, terms) for lease in tried)

    lease = taught(samples).lease_s("domain", {"tool": None}, terms)

    forgiven = (WIDTH - 1) * cost * float(np.mean(np.minimum(samples, longest)))
    assert 0.0 <= lease <= longest
    assert worth(samples, lease * (1 + 1e-9), terms) >= best - forgiven - _partial_bucket(samples, longest, benefit)


def _partial_bucket(samples: list[float], longest: float, benefit: float) -> float:
    """Returns the possible error of the bucket in which the longest lease ends."""
    number = int(np.searchsorted(EDGES, longest))
    return benefit * float(np.mean([EDGES[number - 1] < sample <= EDGES[number] for sample in samples]))


@example([28.0], 3862.0)
@given(latencies, st.floats(1.0, 100_000.0))
def test_a_hint_only_shortens_a_lease(samples: list[float], expected_ms: float) -> None:
    """A hint never makes a lease longer, and limits it to 1.5 times the expected time."""
    model = taught(samples, prior_weight=8.0)

    free = model.lease_s("domain", {"tool": None})
    hinted = model.lease_s("domain", {"tool": expected_ms})

    assert hinted <= free + 1e-9
    assert hinted <= 1.5 * expected_ms / 1000 + 1e-9


def test_a_hint_for_one_of_two_tools_shortens_nothing() -> None:
    """A hint for only one of two tools does not shorten the lease, because the session waits for both."""
    model = ToolLatencyModel()

    both = model.lease_s("domain", {"quick": 10.0, "other": None})

    assert both == model.lease_s("domain", {"quick": None, "other": None}) > 0


def test_quick_tools_get_a_lease_and_slow_ones_do_not() -> None:
    """After some calls, a quick tool's lease is a little longer than its latency, and a slow tool's lease is 0."""
    model = ToolLatencyModel(terms=LeaseTerms(benefit_s=2.0, cost_per_s=0.05))
    for _ in range(50):
        model.observe("domain", "read_file", 0.1)
        model.observe("domain", "train_model", 3600.0)

    assert 0.1 <= model.lease_s("domain", {"read_file": None}) < 10.0
    assert model.lease_s("domain", {"train_model": None}) < 1.0
    assert model.lease_s("domain", {"read_file": None, "train_model": None}) < 1.0


def test_a_lease_that_costs_nothing_is_as_long_as_allowed() -> None:
    """If holding costs nothing, a lease lasts until no more returns are expected, up to the longest lease."""
    model = ToolLatencyModel()

    assert model.lease_s("domain", {"tool": None}, LeaseTerms(1.0, 0.0, 120.0)) == 120.0
    assert model.lease_s("domain", {"tool": None}, LeaseTerms(0.0, 1.0, 120.0)) == 0.0
    assert model.lease_s("domain", {}) == 0.0


def test_an_unknown_tool_is_estimated_from_all_tools() -> None:
    """Other domains' tools change the estimate for a new tool, and a few calls of its own outweigh them."""
    model = ToolLatencyModel()
    for _ in range(200):
        model.observe("other", "anything", 60.0)

    before = model.return_probability("domain", ["tool"], 0.0, 1.0)
    for _ in range(50):
        model.observe("domain", "tool", 0.5)
    after = model.return_probability("domain", ["tool"], 0.0, 1.0)

    assert before < 0.05
    assert after > 0.8


def test_one_call_does_not_outweigh_the_prior() -> None:
    """The prior weighs eight calls, so one call of a tool has a ninth of the weight."""
    model = ToolLatencyModel(ToolHistograms(half_life=math.inf))
    for _ in range(10_000):
        model.observe("other", "anything", 60.0)
    model.observe("domain", "tool", 0.5)

    assert model.return_probability("domain", ["tool"], 0.0, 1.0) == pytest.approx(1 / 9, abs=0.001)


def test_waiting_changes_the_estimate() -> None:
    """Nine tools in ten take 0.1 s and one takes a minute: after one second the minute is expected."""
    model = taught([0.1] * 90 + [60.0] * 10)

    assert model.return_probability("domain", ["tool"], 0.0, 1.0) == pytest.approx(0.9)
    assert model.return_probability("domain", ["tool"], 1.0, 1.0) == pytest.approx(0.0)
    assert model.return_probability("domain", ["tool"], 1.0, 100.0) == pytest.approx(1.0)
    assert model.return_probability("domain", [], 1.0, 0.0) == 1.0


def test_invented_tools_displace_only_tools_of_their_own_domain() -> None:
    """A domain that calls a thousand tools keeps its newest few, none once it is forgotten, and another domain's tool stays known."""
    histograms = ToolHistograms(max_pairs=20, max_tools_per_domain=8)
    model = ToolLatencyModel(histograms)
    for _ in range(50):
        model.observe("calm", "tool", 1000.0)
    for number in range(1000):
        model.observe("flood", f"tool{number}", 0.01)
        histograms.check_integrity()

    assert len(histograms) == 9
    model.forget_domain("flood")
    histograms.check_integrity()
    assert len(histograms) == 1
    assert model.return_probability("calm", ["tool"], 0.0, 1.0) < 0.2


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("stuvw")), max_size=60))
def test_the_number_of_histograms_is_bounded(calls: list[tuple[str, str]]) -> None:
    """The number of histograms stays within both bounds, and the last observed pair is always known."""
    histograms = ToolHistograms(max_pairs=6, max_tools_per_domain=3)

    for domain, tool in calls:
        histograms.observe(domain, tool, 1.0)
        histograms.check_integrity()

    distinct = len(set(calls))
    assert min(distinct, 3) <= len(histograms) <= 6 or distinct == len(histograms)
