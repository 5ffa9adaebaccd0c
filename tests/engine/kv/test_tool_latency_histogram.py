"""Compares the latency histogram with numpy's quantiles and with sums over the samples."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.kv.tool_latency import (
    EDGES,
    LONGEST_S,
    SHORTEST_S,
    LatencyDistribution,
    LatencyHistogram,
    lognormal_masses,
)
from tests.hypothesis_profiles import examples

WIDTH = 2**0.25 * (1 + 1e-9)
"""The ratio between neighbouring edges."""
NOTHING = np.zeros(len(EDGES) + 1)
latencies = st.lists(st.floats(SHORTEST_S * 1.01, LONGEST_S * 0.99), min_size=1, max_size=60)
times = st.floats(0.0, 2 * LONGEST_S)


def histogram_of(samples: list[float], half_life: float = math.inf) -> LatencyHistogram:
    histogram = LatencyHistogram(half_life)
    for sample in samples:
        histogram.observe(sample)
    return histogram


def distribution_of(samples: list[float]) -> LatencyDistribution:
    return histogram_of(samples).distribution(NOTHING)


@given(latencies, st.floats(0.01, 1.0))
def test_a_quantile_is_right_to_a_bucket(samples: list[float], share: float) -> None:
    """Without decay, every quantile is within a quarter of an octave of numpy's."""
    exact = float(np.quantile(samples, share - 1e-12, method="inverted_cdf"))

    found = distribution_of(samples).quantile(share - 1e-12)

    assert exact / WIDTH <= found <= exact * WIDTH


@given(latencies, times)
def test_a_probability_is_that_of_the_samples_to_a_bucket(samples: list[float], seconds: float) -> None:
    """P(T <= t) is between the samples' shares one bucket below and one bucket above t."""
    shares = [float(np.mean(np.asarray(samples) <= limit)) for limit in (seconds / WIDTH, seconds * WIDTH)]

    found = distribution_of(samples).probability_within(seconds)

    assert shares[0] - 1e-9 <= found <= shares[1] + 1e-9


@given(latencies, st.sampled_from(list(EDGES[:-1])), st.sampled_from(list(EDGES[:-1])))
def test_a_waiting_tool_is_estimated_from_tools_that_took_longer(
    samples: list[float], waited: float, limit: float
) -> None:
    """At the edges, the probability of a return is that of the samples that took longer than the wait."""
    limit = max(waited, limit)
    slower = [sample for sample in samples if sample > waited]
    expected = sum(sample <= limit for sample in slower) / len(slower) if slower else 0.0

    found = distribution_of(samples).return_probability(waited, limit - waited)

    assert found == pytest.approx(expected, abs=1e-6)


@settings(max_examples=examples(40))
@given(latencies, times)
def test_the_expected_wait_is_the_integral_of_survival(samples: list[float], seconds: float) -> None:
    """E[min(T, t)] equals the area under P(T > s), summed over a fine grid."""
    distribution = distribution_of(samples)
    grid = np.concatenate(([0.0], np.geomspace(SHORTEST_S / 10, seconds, 4_000))) if seconds > 0.001 else np.zeros(2)
    survival = 1.0 - np.array([distribution.probability_within(point) for point in (grid[1:] + grid[:-1]) / 2])

    found = distribution.expected_wait(seconds)

    assert found == pytest.approx(float(np.sum(survival * np.diff(grid))), rel=2e-3, abs=2e-3)


@settings(max_examples=examples(20))
@given(latencies)
def test_the_expected_waits_of_all_edges_agree_with_one_at_a_time(samples: list[float]) -> None:
    """Both ways to compute the integral give the same numbers."""
    distribution = distribution_of(samples)

    assert distribution.expected_waits() == pytest.approx([distribution.expected_wait(edge) for edge in EDGES])


@given(latencies, latencies)
def test_the_last_of_two_tools_is_the_product(samples: list[float], others: list[float]) -> None:
    """At an edge, the probability that both tools are back is the share of all pairs of samples."""
    last = LatencyDistribution.latest_of([distribution_of(samples), distribution_of(others)])
    pairs = np.maximum.outer(samples, others)

    assert last.cdf == pytest.approx([float(np.mean(pairs <= edge)) for edge in EDGES])


def test_an_observation_counts_half_after_its_half_life() -> None:
    """After 100 latencies of one second and 10 of one minute with a half-life of 10, the minute has about half the
    weight."""
    histogram = histogram_of([1.0] * 100 + [60.0] * 10, half_life=10)

    within = histogram.distribution(NOTHING).probability_within(10.0)

    assert within == pytest.approx(0.5, abs=0.001)
    assert histogram.weight == pytest.approx(sum(0.5 ** (age / 10) for age in range(110)))
    histogram.check_integrity()


def test_what_never_ends_counts_as_never() -> None:
    """If one of four never returned, no quantile above 0.75 is finite and no return is certain."""
    distribution = distribution_of([1.0, 1.0, 1.0, math.inf])

    assert distribution.quantile(0.7) < 1.2
    assert distribution.quantile(0.8) == math.inf
    assert distribution.return_probability(2.0, 1e9) == 0.0
    assert distribution.return_probability(0.0, 1e9) == pytest.approx(0.75)


def test_times_shorter_than_the_first_edge_are_kept_apart_from_longer_ones() -> None:
    """Tools that answer at once are all within 1 ms, and half of them within 0.5 ms."""
    distribution = distribution_of([0.0, 0.0001])

    assert distribution.probability_within(SHORTEST_S) == 1.0
    assert distribution.quantile(0.5) == pytest.approx(SHORTEST_S / 2)


@given(st.floats(0.01, 1000.0), st.floats(0.2, 3.0))
def test_a_lognormal_prior_has_its_median_and_its_spread(median: float, sigma: float) -> None:
    """Half of the prior is below its median, and 84 % is below one sigma above it."""
    prior = LatencyDistribution.from_masses(lognormal_masses(median, sigma))

    assert prior.probability_within(median) == pytest.approx(0.5, abs=0.04)
    assert prior.probability_within(median * math.exp(sigma)) == pytest.approx(0.8413, abs=0.04)
