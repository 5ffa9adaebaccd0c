"""Tests of the figures of a measured phase, against sums and intervals worked out by other means."""

from random import Random

import pytest

from graftwork.api.cli.bench.figures import (
    WINDOW_S,
    Window,
    computed_within,
    contended_jain,
    jain,
    percentile,
    tenant_figures,
)
from graftwork.api.cli.bench.load import Sent, arrivals


def chat(tenant: str, sent_at: float, *tokens: float, ended_at: float | None = None, status: int | None = 200) -> Sent:
    return Sent(tenant, sent_at, status, list(tokens), ended_at)


def test_a_percentile_is_a_value_that_enough_values_do_not_exceed() -> None:
    """Of 1 to 100 the 99th percentile is 100, the median 51, and of nothing there is none."""
    values = [float(value) for value in range(1, 101)]

    assert (percentile(values, 0.99), percentile(values, 0.5), percentile([], 0.5)) == (100.0, 51.0, None)


def test_only_what_has_ended_is_answered_refused_or_failed() -> None:
    """A chat that the end of the phase cuts off counts as sent alone, and a broken connection as failed."""
    sent = [
        chat("a", 0.0, 0.5, 0.7, ended_at=0.8),
        chat("a", 1.0, 1.2),
        chat("a", 2.0, ended_at=2.1, status=429),
        chat("a", 3.0, ended_at=3.1, status=503),
        chat("a", 4.0, ended_at=4.1, status=None),
        chat("a", 5.0, ended_at=5.1, status=500),
    ]

    (figures,) = tenant_figures([Window(sent, 0.0, 10.0)])

    assert (figures.sent, figures.answered, figures.refused, figures.failed) == (6, 1, 2, 2)
    assert (figures.ttft_p99, figures.itl_p99) == pytest.approx((0.5, 0.2))
    assert figures.tokens_per_s == pytest.approx(0.3)


def test_a_chat_that_still_waits_counts_with_its_wait() -> None:
    """A chat without a token at the end of the phase is not left out of the times to first token; a refused one is."""
    sent = [
        chat("a", 0.0, 0.5, ended_at=0.6),
        chat("a", 1.0, status=None),
        chat("a", 2.0, ended_at=2.1, status=429),
    ]

    (figures,) = tenant_figures([Window(sent, 0.0, 10.0)])

    assert (figures.ttft_p50, figures.ttft_p99) == (9.0, 9.0)


def test_the_servers_count_of_tokens_goes_before_the_pieces() -> None:
    """If the server says how many tokens an answer has, that number counts, not the pieces that arrived."""
    one = chat("a", 0.0, 0.5, ended_at=0.6)
    one.completion_tokens = 8

    (figures,) = tenant_figures([Window([one], 0.0, 2.0)])

    assert figures.tokens_per_s == 4.0


def test_prompts_count_where_their_first_token_came() -> None:
    """A chat's uncached prompt counts in the phase of its first token; one that was cut off has its tenant's mean prompt."""
    early, late, cut, other = (
        chat(*one) for one in (("a", 0.0, 0.5, 1.5), ("a", 0.0, 2.5), ("a", 0.0, 1.0), ("b", 0.0, 1.0))
    )
    early.computed_tokens, late.computed_tokens = 30, 50

    assert computed_within([early, late, cut, other], 0.0, 2.0) == 4 + 30 + 40
    assert computed_within([early, late, cut, other], 2.0, 3.0) == 1 + 50


def test_only_tenants_that_wait_all_through_a_window_are_compared() -> None:
    """Jain's index is that of the two tenants with a queue; a light tenant that waits now and then does not count."""
    flood = [chat("flood", 0.0, *(0.1 * number for number in range(1, 40))), chat("flood", 0.0)]
    other = [chat("other", 0.0, *(0.4 * number for number in range(1, 11))), chat("other", 0.0)]
    light = [chat("light", 1.0, 1.5, ended_at=2.0)]

    assert contended_jain([*flood, *other, *light], 0.0, WINDOW_S) == pytest.approx(jain([39, 10]))
    assert contended_jain([*flood, *light], 0.0, WINDOW_S) is None


def test_service_is_divided_by_the_weight() -> None:
    """A tenant of weight 2 with twice the tokens has its share, and one with as many as the other has not."""
    heavy = [chat("heavy", 0.0, *(0.1 * number for number in range(1, 41))), chat("heavy", 0.0)]
    other = [chat("other", 0.0, *(0.2 * number for number in range(1, 21))), chat("other", 0.0)]
    for one in heavy:
        one.weight = 2.0

    fair = contended_jain([*heavy, *other], 0.0, WINDOW_S)
    for one in other:
        one.weight = 2.0
    unfair = contended_jain([*heavy, *other], 0.0, WINDOW_S)

    assert fair == pytest.approx(1.0)
    assert unfair == pytest.approx(jain([2, 1]))


def test_waits_may_follow_one_another() -> None:
    """A tenant waits through a window if at each moment some chat of it waits: compared with a walk in small steps."""
    noise = Random(5)
    for _ in range(60):
        begins = [noise.uniform(-1, WINDOW_S) for _ in range(8)]
        some = [chat("a", begin, begin + noise.uniform(0.3, 3.0)) for begin in begins]
        through = chat("b", -1.0)

        moments = [WINDOW_S * (number + 0.5) / 2000 for number in range(2000)]
        waits = all(any(one.sent_at <= at < one.token_times[0] for one in some) for at in moments)

        assert (contended_jain([*some, through], 0.0, WINDOW_S) is not None) == waits


def test_arrivals_are_those_of_their_seed_at_their_rate() -> None:
    """A seed gives the same times in order within the phase, and their number is near rate times seconds."""
    times = arrivals(50.0, 100.0, "flood")

    assert times == arrivals(50.0, 100.0, "flood") == sorted(times)
    assert times != arrivals(50.0, 100.0, "other")
    assert times[-1] < 100.0
    assert len(times) == pytest.approx(5000, rel=0.06)


def test_windows_of_a_phase_count_as_one() -> None:
    """Percentiles are over the chats of all windows, a speed over the time of all, and a chat that its window cuts off has
    waited until the end of that window only."""
    first = Window([chat("a", 0.0, 0.1, 0.3, ended_at=0.4), chat("a", 1.0, status=None)], 0.0, 4.0)
    second = Window([chat("a", 10.0, 10.2, ended_at=10.3), chat("a", 11.0, 11.4, ended_at=11.5)], 10.0, 14.0)

    (figures,) = tenant_figures([first, second])

    assert figures.sent == 4
    assert figures.ttft_p50 == pytest.approx(0.4)
    assert figures.ttft_p99 == pytest.approx(3.0)
    assert figures.tokens_per_s == pytest.approx(4 / 8)
