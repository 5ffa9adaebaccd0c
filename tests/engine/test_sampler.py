"""The sampler against what the textbook says of each of its parts."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.batch import SampleSpec
from graftwork.engine.request import SamplingParams
from graftwork.engine.sampler import choose_tokens


def spec(seed: int = 0, position: int = 0, banned: tuple[int, ...] = (), **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams(max_tokens=1, **params), seed, position, banned)


def frequencies(probabilities: list[float], draws: int, **params: Any) -> Counter[int]:
    logits = torch.tensor(probabilities).log().repeat(draws, 1)
    return Counter(choose_tokens(logits, [spec(seed=9, position=position, **params) for position in range(draws)]))


def test_temperature_zero_is_argmax() -> None:
    """Greedy rows take the largest logit, whatever their seed."""
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])

    assert choose_tokens(logits, [spec(temperature=0.0), spec(seed=3, temperature=0.0)]) == [1, 0]


def test_draws_follow_the_distribution() -> None:
    """A chi-square over 20,000 positions of one seed stays under its 99.9 % quantile for 3 degrees of freedom."""
    probabilities = [0.1, 0.2, 0.3, 0.4]
    draws = 20_000

    counts = frequencies(probabilities, draws)

    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(probabilities))
    assert chi_square < 16.27


def test_draws_of_different_seeds_at_one_position_follow_it_too() -> None:
    """The noise is as good across seeds as across positions."""
    probabilities = [0.1, 0.2, 0.3, 0.4]
    draws = 20_000
    logits = torch.tensor(probabilities).log().repeat(draws, 1)

    counts = Counter(choose_tokens(logits, [spec(seed=seed, position=5) for seed in range(draws)]))

    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(probabilities))
    assert chi_square < 16.27


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {2, 3}),
        ({"top_p": 0.5}, {2, 3}),
        ({"top_p": 0.39}, {3}),
        ({"top_p": 0.71}, {1, 2, 3}),
        ({"min_p": 0.6}, {2, 3}),
        ({"top_k": 3, "min_p": 0.6}, {2, 3}),
        ({"top_k": 1}, {3}),
    ],
)
def test_truncation_keeps_exactly_the_likeliest(params: dict[str, float], kept: set[int]) -> None:
    """top_k, top_p (the smallest set whose sum reaches p) and min_p, each against the set worked out by hand."""
    assert set(frequencies([0.1, 0.2, 0.3, 0.4], 600, **params)) == kept


def test_banned_tokens_are_never_chosen() -> None:
    """Neither greedy nor sampled, even when they are the likeliest."""
    logits = torch.tensor([[0.0, 9.0, 1.0]]).repeat(50, 1)
    specs = [spec(position=n, banned=(1,), temperature=n % 2) for n in range(50)]

    assert 1 not in choose_tokens(logits, specs)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 7))
def test_a_row_draws_the_same_whatever_stands_beside_it(seed: int, position: int, row: int) -> None:
    """Noise depends on seed, position and token alone."""
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    others = [spec(seed=n, position=n, temperature=0.5 + n / 10, top_p=0.9) for n in range(8)]
    mine = spec(seed=seed, position=position, temperature=0.8, top_p=0.95)
    others[row] = mine

    assert choose_tokens(logits.clone(), others)[row] == choose_tokens(logits[row : row + 1].clone(), [mine])[0]
