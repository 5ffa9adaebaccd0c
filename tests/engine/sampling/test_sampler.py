"""The sampler against the definition of each of its steps, and against itself in other batches."""

from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from graftwork.engine.core.prefix_keys import TokenHistory
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.sampling.rng import uniform
from graftwork.engine.sampling.top_k_top_p import first_width, keep_likeliest
from graftwork.engine.sampling.torch_sampler import choose_tokens
from tests.hypothesis_profiles import examples

CHI_SQUARE_3 = 16.27
"""The 99.9 % quantile for 3 degrees of freedom."""
PROBABILITIES = [0.1, 0.2, 0.3, 0.4]


def spec(seed: int = 0, position: int = 0, banned: tuple[int, ...] = (), **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams(max_tokens=1, **params), seed, position, banned)


def drawn(probabilities: list[float], specs: list[SampleSpec]) -> Counter[int]:
    """How often each token is chosen, with one row for each spec."""
    return Counter(choose_tokens(torch.tensor(probabilities).log().repeat(len(specs), 1), specs).tolist())


def frequencies(probabilities: list[float], draws: int, **params: Any) -> Counter[int]:
    return drawn(probabilities, [spec(seed=9, position=position, **params) for position in range(draws)])


def chi_square(counts: Counter[int], probabilities: list[float]) -> float:
    draws = counts.total()
    return sum((counts[token] - draws * p) ** 2 / (draws * p) for token, p in enumerate(probabilities))


def test_temperature_zero_is_argmax() -> None:
    """Temperature 0, or one that is almost 0, takes the largest logit for any seed."""
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0], [0.0, 1e-3, 0.0]])
    specs = [spec(temperature=0.0), spec(seed=3, temperature=0.0), spec(temperature=1e-40)]

    assert choose_tokens(logits, specs).tolist() == [1, 0, 1]


@pytest.mark.parametrize("keyed_by", ["position", "seed", "choice"])
def test_draws_follow_the_distribution(keyed_by: str) -> None:
    """20,000 draws over positions, seeds or choices pass a chi-square test."""
    fixed: dict[str, Any] = {"seed": 5, "position": 5}
    specs = [spec(**(fixed | {keyed_by: number})) for number in range(20_000)]

    assert chi_square(drawn(PROBABILITIES, specs), PROBABILITIES) < CHI_SQUARE_3


def test_draws_without_a_seed_follow_the_distribution() -> None:
    """Random seeds of 63 bits, as the scheduler draws them, give the right distribution."""
    seeds = Random(3)
    specs = [spec(seed=seeds.getrandbits(63), position=position % 7) for position in range(20_000)]

    assert chi_square(drawn(PROBABILITIES, specs), PROBABILITIES) < CHI_SQUARE_3


def test_draws_of_a_cut_distribution_follow_it() -> None:
    """The tokens that top-k keeps are drawn in proportion to their weights."""
    counts = frequencies([0.4, 0.3, 0.2, 0.05, 0.05], 20_000, top_k=3)

    assert chi_square(counts, [4 / 9, 3 / 9, 2 / 9]) < CHI_SQUARE_3


def test_neighbouring_draws_are_independent() -> None:
    """Pairs of draws at neighbouring positions, or of neighbouring choices, fall evenly into 16 cells."""
    ahead = [uniform(spec(seed=4, position=number)) for number in range(20_001)]
    beside = [uniform(spec(seed=4, position=1, choice=number)) for number in range(20_001)]

    for numbers in (ahead, beside):
        cells = Counter(int(x * 4) * 4 + int(y * 4) for x, y in pairwise(numbers))
        assert chi_square(cells, [1 / 16] * 16) < 37.70  # the 99.9 % quantile for 15 degrees of freedom


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {2, 3}),
        ({"top_p": 0.5}, {2, 3}),
        ({"top_p": 0.39}, {3}),
        ({"top_p": 0.71}, {1, 2, 3}),
        ({"min_p": 0.6}, {2, 3}),
        ({"top_k": 3, "min_p": 0.6}, {2, 3}),
        ({"top_k": 2, "top_p": 0.5}, {3}),  # of the kept tokens, 4/7 is the likeliest
        ({"top_k": 3, "top_p": 0.5}, {2, 3}),  # of the kept tokens, 4/9 and 3/9
        ({"top_k": 1}, {3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
    ],
)
def test_truncation_keeps_exactly_the_likeliest(params: dict[str, float], kept: set[int]) -> None:
    """top_k, top_p (the smallest set whose sum reaches p) and min_p keep the tokens that were worked out by hand."""
    assert set(frequencies(PROBABILITIES, 600, **params)) == kept


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.05, 1.0, 4.0]),
    top_k=st.none() | st.integers(1, 400),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2]),
)
def test_truncation_is_that_of_transformers(
    seed: int, scale: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    """A thousand draws hit exactly the tokens that transformers keeps, in flat and in peaked distributions."""
    logits = torch.randn(1, 1500, generator=torch.Generator().manual_seed(seed)) * scale
    context: Any = torch.zeros(1, 0, dtype=torch.int64)
    expected = logits if top_k is None else TopKLogitsWarper(top_k)(context, logits)
    expected = expected if top_p == 1 else TopPLogitsWarper(top_p)(context, expected)
    expected = expected if min_p == 0 else MinPLogitsWarper(min_p)(context, expected)
    allowed = set(expected[0].isfinite().nonzero().squeeze(1).tolist())
    likely = set((expected[0].softmax(dim=-1) > 0.025).nonzero().squeeze(1).tolist())
    rows = [spec(position=row, top_k=top_k, top_p=top_p, min_p=min_p) for row in range(1000)]

    tokens = set(choose_tokens(logits.repeat(1000, 1), rows).tolist())

    assert len(tokens - allowed) <= (
        top_p < 1
    )  # sums of probabilities are rounded differently, by one token at the edge
    assert len(likely - tokens) <= (top_p < 1)


def test_equal_logits_are_kept_in_order_of_token_id() -> None:
    """Among equal logits at the cut, the lowest token ids are kept."""
    logits = torch.zeros(400, 3000)
    logits[:, 2500] = 1.0

    for params, kept in (({"top_k": 4}, {2500, 0, 1, 2}), ({"top_p": 0.0012}, {2500, 0})):
        assert set(choose_tokens(logits.clone(), [spec(position=row, **params) for row in range(400)]).tolist()) == kept


def test_a_masked_row_needs_no_wider_pass() -> None:
    """If a mask leaves fewer tokens than top-k or top-p would keep, all are kept without a second, wider pass."""
    logits = torch.full((400, 3000), float("-inf"))
    logits[:, [7, 900, 2999]] = torch.tensor([0.0, 1.0, 0.5])
    specs = [spec(position=row, **({"top_k": 50} if row % 2 else {"top_p": 0.999})) for row in range(400)]

    assert keep_likeliest(logits, specs, first_width(specs)).is_whole.all()
    assert set(choose_tokens(logits, specs).tolist()) == {7, 900, 2999}


@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_a_row_without_any_token_affects_no_other(params: dict[str, Any]) -> None:
    """A row with all tokens masked gets some valid token, and the other row is not affected."""
    logits = torch.tensor([[float("-inf")] * 5, [0.0, 0.0, 90.0, 0.0, 0.0]])

    lost, found = choose_tokens(logits, [spec(**params), spec(**params)]).tolist()

    assert 0 <= lost < 5
    assert found == 2


def test_banned_tokens_are_never_chosen() -> None:
    """A banned token is not chosen, greedy or sampled, even if it is the likeliest."""
    logits = torch.tensor([[0.0, 9.0, 1.0]]).repeat(50, 1)
    specs = [spec(position=n, banned=(1,), temperature=n % 2) for n in range(50)]

    assert 1 not in choose_tokens(logits, specs).tolist()


def random_spec(source: Random, position: int) -> SampleSpec:
    """A spec with random sampling parameters, for a vocabulary of 300."""
    params = SamplingParams(
        max_tokens=1,
        temperature=source.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=source.choice([None, None, 1, 7, 290]),
        top_p=source.choice([1.0, 0.2, 0.95]),
        min_p=source.choice([0.0, 0.05]),
        presence_penalty=source.choice([0.0, 1.5]),
        frequency_penalty=source.choice([0.0, -0.4]),
        repetition_penalty=source.choice([1.0, 1.3]),
        logit_bias=source.choice([(), ((3, 2.0), (7, -100.0))]),
        choice=source.choice([0, 3]),
    )
    history = TokenHistory([source.randrange(300) for _ in range(20)])
    history.extend(source.randrange(300) for _ in range(30))
    return SampleSpec(
        params=params,
        seed=source.getrandbits(64),
        position=position,
        banned_token_ids=source.choice([(), (1, 2)]),
        history=history if params.counts_tokens else None,
        draft_token_ids=source.choice([(), (5, 6, 5)]),
    )


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_a_row_chooses_the_same_in_any_batch(seed: int) -> None:
    """A row's token is the same alone, in a batch, and in any order of rows."""
    source = Random(seed)
    specs = [random_spec(source, position) for position in range(12)]
    # Few distinct values, as bf16 has: ties everywhere.
    logits = torch.randn(12, 300, generator=torch.Generator().manual_seed(seed)).mul(4).round().div(2)
    order = source.sample(range(12), 12)

    together = choose_tokens(logits.clone(), specs).tolist()

    assert [choose_tokens(logits[row : row + 1].clone(), specs[row : row + 1]).item() for row in range(12)] == together
    shuffled = choose_tokens(logits[order].clone(), [specs[row] for row in order]).tolist()
    assert shuffled == [together[row] for row in order]
