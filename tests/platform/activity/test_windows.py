"""Tests of counts over the last minutes."""

import math
import random

import pytest

from graftwork.platform.activity.windows import WINDOW_S, WindowCounts, bucket_of, percentile


def test_totals_are_those_of_the_window() -> None:
    """At any time the totals are the sums over the events of the last window, exact to one slice."""
    source = random.Random(3)
    events: list[tuple[float, str, int]] = []
    now, counts = 1000.0, WindowCounts(1000.0)
    for _ in range(3000):
        now += source.expovariate(2.0)
        key, amount = source.choice("abc"), source.randint(1, 5)
        counts.add(key, now, amount)
        events.append((now, key, amount))

        first_slice = now // 5 - WINDOW_S / 5
        expected = {one: sum(n for at, each, n in events if each == one and at // 5 > first_slice) for one in "abc"}
        assert {one: counts.totals[one] for one in "abc"} == expected


def test_counts_of_a_kind_are_those_of_the_totals() -> None:
    """Whatever was added and has left the window, the counts by kind are the totals of the keys of this kind."""
    source, counts, now = random.Random(5), WindowCounts(0.0), 0.0
    keys = ["requests", ("ttft", 3), ("ttft", 4), ("refused", "queue_full")]
    for _ in range(500):
        now += source.choice((0.1, 5.0, 200.0))
        if source.random() < 0.5:
            counts.add(source.choice(keys), now)
        else:
            counts.advance(now)

        for kind in ("ttft", "refused", "none"):
            expected = {key[1]: n for key, n in counts.totals.items() if isinstance(key, tuple) and key[0] == kind}
            assert counts.of_kind(kind) == expected


def test_a_key_that_left_the_window_is_gone() -> None:
    """An hour later nothing is counted, and nothing is kept."""
    counts = WindowCounts(0.0)
    counts.add("a", 0.0)

    counts.advance(3600.0)

    assert not counts
    assert counts.totals == {}


def test_a_steady_rate_is_read_as_it_is() -> None:
    """Four events a second are read as four a second, also shortly after the first of them."""
    counts = WindowCounts(100.0)
    for number in range(4 * 60):
        counts.add("a", 100.0 + number / 4)
        if number in (39, 100, 239):
            assert counts.per_second("a", 100.0 + (number + 1) / 4) == pytest.approx(4.0, rel=0.1)


def test_a_rate_ends_with_its_events() -> None:
    """A quarter of a minute after the last event its rate is 0."""
    counts = WindowCounts(100.0)
    counts.add("a", 100.0, 1000)

    assert counts.per_second("a", 104.0) > 0
    assert counts.per_second("a", 116.0) == 0.0


@pytest.mark.parametrize("share", [0.5, 0.99, 1.0])
def test_percentiles_are_near_those_of_a_sorted_list(share: float) -> None:
    """A percentile differs by at most 5 % from that of the sorted durations."""
    source = random.Random(1)
    durations = [source.lognormvariate(-3, 1.5) for _ in range(999)]
    buckets: dict[int, int] = {}
    for one in durations:
        buckets[bucket_of(one)] = buckets.get(bucket_of(one), 0) + 1

    found = percentile(buckets, share)

    assert found == pytest.approx(sorted(durations)[math.ceil(share * 999) - 1], rel=0.051)


def test_no_durations_have_no_percentile() -> None:
    """Without a duration there is no percentile, rather than 0."""
    assert percentile({}, 0.99) is None
