"""Leases against brute force over the samples, and what the advisor remembers of whom."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graftwork.engine.latency_sketch import EDGES
from graftwork.engine.lease_advisor import LeaseAdvisor, LeaseTerms, SketchBook

latencies = st.lists(st.floats(0.002, 2000.0), min_size=1, max_size=40)
WIDTH = 2**0.25


def taught(samples: list[float], prior_weight: float = 0.0) -> LeaseAdvisor:
    """An advisor that knows one tool by its samples, and forgets nothing."""
    advisor = LeaseAdvisor(SketchBook(prior_weight=prior_weight, half_life=math.inf))
    for sample in samples:
        advisor.observe("party", "tool", sample)
    return advisor


def worth(samples: list[float], lease_s: float, terms: LeaseTerms) -> float:
    """What a lease is worth on average over the samples themselves."""
    returned = np.mean(np.asarray(samples) <= lease_s)
    held = np.mean(np.minimum(samples, lease_s))
    return float(returned * terms.benefit_s - held * terms.cost_per_s)


@given(latencies, st.floats(0.05, 20.0), st.floats(0.001, 1.0), st.floats(0.1, 3000.0))
def test_no_lease_would_have_been_worth_more(samples: list[float], benefit: float, cost: float, longest: float) -> None:
    """Against every lease up to the longest, tried on the samples; a bucket's width of the time held is forgiven."""
    terms = LeaseTerms(benefit, cost, longest)
    tried = [0.0, *(edge for edge in EDGES if edge <= longest)]
    best = max(worth(samples, lease, terms) for lease in tried)

    lease = taught(samples).lease_s("party", {"tool": None}, terms)

    forgiven = (WIDTH - 1) * cost * float(np.mean(np.minimum(samples, longest)))
    assert 0.0 <= lease <= longest
    assert worth(samples, lease * (1 + 1e-9), terms) >= best - forgiven - _partial_bucket(samples, longest, benefit)


def _partial_bucket(samples: list[float], longest: float, benefit: float) -> float:
    """What cannot be known of the bucket in which the longest lease ends: who of it returns before."""
    number = int(np.searchsorted(EDGES, longest))
    return benefit * float(np.mean([EDGES[number - 1] < sample <= EDGES[number] for sample in samples]))


@example([28.0], 3862.0)
@given(latencies, st.floats(1.0, 100_000.0))
def test_a_hint_only_shortens(samples: list[float], expected_ms: float) -> None:
    """With the client's expectation no lease is longer than without it, nor than half again the expectation."""
    advisor = taught(samples, prior_weight=8.0)

    free = advisor.lease_s("party", {"tool": None})
    hinted = advisor.lease_s("party", {"tool": expected_ms})

    assert hinted <= free + 1e-9
    assert hinted <= 1.5 * expected_ms / 1000 + 1e-9


def test_a_hint_for_one_of_two_tools_shortens_nothing() -> None:
    """The session goes on when the last tool is back, and of that one nothing was said."""
    advisor = LeaseAdvisor()

    both = advisor.lease_s("party", {"quick": 10.0, "other": None})

    assert both == advisor.lease_s("party", {"quick": None, "other": None}) > 0


def test_quick_tools_are_waited_for_and_slow_ones_are_not() -> None:
    """After some calls each, pages are held a little longer than the quick tool takes and not at all for the slow."""
    advisor = LeaseAdvisor(terms=LeaseTerms(benefit_s=2.0, cost_per_s=0.05))
    for _ in range(50):
        advisor.observe("party", "read_file", 0.1)
        advisor.observe("party", "train_model", 3600.0)

    assert 0.1 <= advisor.lease_s("party", {"read_file": None}) < 10.0
    assert advisor.lease_s("party", {"train_model": None}) < 1.0
    assert advisor.lease_s("party", {"read_file": None, "train_model": None}) < 1.0


def test_free_room_is_held_as_long_as_allowed() -> None:
    """Where holding costs nothing, a lease lasts until nothing more would return, at most the longest."""
    advisor = LeaseAdvisor()

    assert advisor.lease_s("party", {"tool": None}, LeaseTerms(1.0, 0.0, 120.0)) == 120.0
    assert advisor.lease_s("party", {"tool": None}, LeaseTerms(0.0, 1.0, 120.0)) == 0.0
    assert advisor.lease_s("party", {}) == 0.0


def test_a_tool_never_seen_is_judged_by_all_tools() -> None:
    """What other parties' tools have shown moves the guess for a new one, and a few calls of its own outweigh it."""
    advisor = LeaseAdvisor()
    for _ in range(200):
        advisor.observe("other", "anything", 60.0)

    before = advisor.return_probability("party", ["tool"], 0.0, 1.0)
    for _ in range(50):
        advisor.observe("party", "tool", 0.5)
    after = advisor.return_probability("party", ["tool"], 0.0, 1.0)

    assert before < 0.05
    assert after > 0.8


def test_one_call_does_not_outweigh_what_is_known_of_all() -> None:
    """A prior worth eight calls: after one of a tool's own, a ninth of the weight is its."""
    advisor = LeaseAdvisor(SketchBook(half_life=math.inf))
    for _ in range(10_000):
        advisor.observe("other", "anything", 60.0)
    advisor.observe("party", "tool", 0.5)

    assert advisor.return_probability("party", ["tool"], 0.0, 1.0) == pytest.approx(1 / 9, abs=0.001)


def test_waiting_changes_the_expectation() -> None:
    """Nine tools in ten take a tenth of a second and one a minute: after a second, the minute is to be expected."""
    advisor = taught([0.1] * 90 + [60.0] * 10)

    assert advisor.return_probability("party", ["tool"], 0.0, 1.0) == pytest.approx(0.9)
    assert advisor.return_probability("party", ["tool"], 1.0, 1.0) == pytest.approx(0.0)
    assert advisor.return_probability("party", ["tool"], 1.0, 100.0) == pytest.approx(1.0)
    assert advisor.return_probability("party", [], 1.0, 0.0) == 1.0


def test_invented_tools_displace_only_their_own_partys() -> None:
    """A party that calls a thousand tools keeps its newest few; another party's one stays known."""
    book = SketchBook(max_pairs=20, max_tools_per_party=8)
    advisor = LeaseAdvisor(book)
    for _ in range(50):
        advisor.observe("calm", "tool", 1000.0)
    for number in range(1000):
        advisor.observe("flood", f"tool{number}", 0.01)
        book.check_integrity()

    assert len(book) == 9
    assert advisor.return_probability("calm", ["tool"], 0.0, 1.0) < 0.2


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("stuvw")), max_size=60))
def test_the_book_is_bounded_and_gives_up_who_was_away_longest(calls: list[tuple[str, str]]) -> None:
    """It never holds more than its bounds, and the pair observed last is always known."""
    book = SketchBook(max_pairs=6, max_tools_per_party=3)

    for party, tool in calls:
        book.observe(party, tool, 1.0)
        book.check_integrity()

    distinct = len(set(calls))
    assert min(distinct, 3) <= len(book) <= 6 or distinct == len(book)
