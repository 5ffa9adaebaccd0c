"""Compares load decisions with a search of all choices, and fitted costs with known ones."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.cost_model import (
    CostTracker,
    LoadCost,
    PrefillCost,
    PrefillSample,
    TransferCost,
    TransferSample,
    fit_costs,
    fit_prefill,
    fit_transfer,
)

H200 = LoadCost(
    host=TransferCost(fixed_s=50e-6, page_s=50e-6),
    disk=TransferCost(fixed_s=500e-6, page_s=500e-6),
    prefill=PrefillCost(token_s=40e-6, attended_s=1e-9, fixed_s=5e-3),
)
"""Costs like those of an 8B model: pages of 16 tokens and 2 MiB, 40 GB/s from the host, 4 GB/s from disk."""

small = st.floats(0.0, 1.0)
transfers = st.builds(TransferCost, small, small)
costs = st.builds(LoadCost, transfers, transfers, st.builds(PrefillCost, small, st.floats(0.0, 0.1), small))


def seconds_of(
    cost: LoadCost, pages_by_tier: Sequence[Tier], num_loaded: int, total_tokens: int, page_tokens: int
) -> float:
    """Returns the seconds to load exactly `num_loaded` missing pages, counted page by page and token by token."""
    missing = [number for number, tier in enumerate(pages_by_tier) if tier is not Tier.DEVICE]
    covered = missing[num_loaded] if num_loaded < len(missing) else len(pages_by_tier)
    seconds = 0.0
    for tier, transfer in ((Tier.HOST, cost.host), (Tier.DISK, cost.disk)):
        count = sum(pages_by_tier[number] is tier for number in missing[:num_loaded])
        seconds += transfer.fixed_s * (count > 0) + transfer.page_s * count
    tokens = range(covered * page_tokens, total_tokens)
    attended = sum(position + 0.0 for position in tokens) + len(tokens) / 2
    return (
        seconds
        + cost.prefill.token_s * len(tokens)
        + cost.prefill.attended_s * attended
        + cost.prefill.fixed_s * (len(tokens) > 0)
    )


@given(costs, st.lists(st.sampled_from(Tier), max_size=12), st.integers(0, 20), st.integers(1, 4))
def test_no_number_of_pages_is_faster(cost: LoadCost, tiers: list[Tier], uncached: int, page_tokens: int) -> None:
    """No other number of loaded pages takes less time than the chosen one."""
    total_tokens = len(tiers) * page_tokens + uncached
    num_missing = sum(tier is not Tier.DEVICE for tier in tiers)
    every_way = [seconds_of(cost, tiers, count, total_tokens, page_tokens) for count in range(num_missing + 1)]

    chosen = cost.best_prefix(tiers, total_tokens, page_tokens)

    assert every_way[chosen] == pytest.approx(min(every_way), rel=1e-9, abs=1e-12)


def test_long_prefixes_are_loaded_and_short_ones_computed() -> None:
    """With costs like an H200's, a long prefix is loaded from both tiers, and two pages on a slow disk are recomputed."""
    slow = LoadCost(H200.host, TransferCost(fixed_s=0.05, page_s=0.01), H200.prefill)

    assert H200.best_prefix([Tier.HOST] * 2000, 32_100, 16) == 2000
    assert H200.best_prefix([Tier.DISK] * 2000, 32_100, 16) == 2000
    assert slow.best_prefix([Tier.DISK] * 2, 40, 16) == 0


def test_a_load_may_stop_where_a_slower_tier_begins() -> None:
    """If the disk is slower than computing, the host's pages are loaded and the disk's pages after them are recomputed."""
    slow = LoadCost(H200.host, TransferCost(fixed_s=0.05, page_s=0.01), H200.prefill)

    assert slow.best_prefix([Tier.DEVICE, *[Tier.HOST] * 50, *[Tier.DISK] * 4], 900, 16) == 50


def test_device_pages_after_missing_ones_count_for_loading() -> None:
    """One missing page is loaded if a hundred device pages after it become usable, and recomputed if there are none."""
    slow = LoadCost(H200.host, TransferCost(fixed_s=0.0, page_s=0.01), H200.prefill)

    assert slow.best_prefix([Tier.DISK], 32, 16) == 0
    assert slow.best_prefix([Tier.DISK, *[Tier.DEVICE] * 100], 1632, 16) == 1


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_a_transfer_is_fitted_exactly_to_exact_measurements(fixed_s: float, page_s: float) -> None:
    """A fit to exact samples returns the costs that made them."""
    truth = TransferCost(fixed_s, page_s)

    fitted = fit_transfer([TransferSample(count, truth.seconds(count)) for count in (1, 2, 8, 64, 256)])

    assert (fitted.fixed_s, fitted.page_s) == pytest.approx((fixed_s, page_s), rel=1e-6, abs=1e-9)


@given(st.floats(1e-6, 1e-3), st.floats(0.0, 1e-7), st.floats(0.0, 2.0))
def test_a_prefill_is_fitted_exactly_to_exact_measurements(token_s: float, attended_s: float, fixed: float) -> None:
    """A fit to exact samples predicts them and lengths that were not among them.

    `fixed` is the fixed time as a share of the time that grows with the tokens of the longest measured prefill.
    """
    truth = PrefillCost(token_s, attended_s, fixed * PrefillCost(token_s, attended_s, 0.0).seconds(512, 0))
    measured = [(tokens, context) for tokens in (16, 128, 512) for context in (0, 512, 4096)]

    fitted = fit_prefill([PrefillSample(*where, truth.seconds(*where)) for where in measured])

    for where in [*measured, (2048, 32_000)]:
        assert fitted.seconds(*where) == pytest.approx(truth.seconds(*where), rel=1e-4)


@given(st.lists(st.floats(1e-3, 1.0), min_size=3, max_size=3))
def test_no_noise_makes_tokens_free(seconds: list[float]) -> None:
    """Whatever times a busy machine shows, pages are loaded when that takes a tenth of the longest prefill's time."""
    cells = [(32, 0), (32, 384), (128, 0)]
    samples = [PrefillSample(*cell, seconds=time) for cell, time in zip(cells, seconds, strict=True)]
    quick = TransferCost(0.0, seconds[-1] / 10 / 8)

    cost = LoadCost(quick, quick, fit_prefill(samples))

    assert cost.best_prefix([Tier.DISK] * 8, 8 * 16 + 1, 16) == 8


@given(st.lists(st.tuples(st.floats(1.0, 100.0), st.floats(0.1, 10.0), st.floats(0.001, 10.0)), min_size=1, max_size=8))
def test_fitted_costs_are_never_negative_and_no_worse_than_their_neighbours(
    samples: list[tuple[float, float, float]],
) -> None:
    """For any samples, no small change of a weight brings the fit nearer, and no weight is negative."""
    features, seconds = [list(sample[:2]) for sample in samples], [sample[2] for sample in samples]

    def error(weights: Sequence[float]) -> float:
        return sum(
            (sum(weight * feature for weight, feature in zip(weights, row, strict=True)) / second - 1.0) ** 2
            for row, second in zip(features, seconds, strict=True)
        )

    fitted = fit_costs(features, seconds)

    assert min(fitted) >= 0.0
    for number in range(2):
        for step in (-0.01, -1e-4, 1e-4, 0.01):
            moved = list(fitted)
            moved[number] = max(moved[number] + step, 0.0)
            assert error(fitted) <= error(moved) + 1e-6


def test_noise_does_not_make_anything_free() -> None:
    """Loads whose time does not grow with their size still cost something per page."""
    fitted = fit_transfer([TransferSample(1, 0.02), TransferSample(100, 0.01)])

    assert fitted.page_s > 0.0


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_the_estimate_follows_a_device_that_became_slower_or_faster(factor: float) -> None:
    """After a hundred observations of each kind, the expected times are the observed ones."""
    tracker = CostTracker(H200)

    for count in range(1, 101):
        tracker.observe_load(Tier.DISK, count, factor * H200.disk.seconds(count))
        tracker.observe_prefill(count, 1000, factor * H200.prefill.seconds(count, 1000))
        tracker.check_integrity()

    assert tracker.cost.disk.seconds(50) == pytest.approx(factor * H200.disk.seconds(50), rel=0.01)
    assert tracker.cost.prefill.seconds(50, 0) == pytest.approx(factor * H200.prefill.seconds(50, 0), rel=0.01)
    assert tracker.cost.host == H200.host


def test_one_stall_does_not_turn_the_estimate_around() -> None:
    """A load that hung for an hour raises the expected time by less than a quarter."""
    tracker = CostTracker(H200)

    tracker.observe_load(Tier.HOST, 10, 3600.0)

    assert H200.host.page_s < tracker.cost.host.page_s < 1.25 * H200.host.page_s
