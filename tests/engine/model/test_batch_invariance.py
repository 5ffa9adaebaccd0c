"""Tests of the sizes from which a row's bits do not depend on its neighbours."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.model import batch_invariance
from graftwork.engine.model.batch_invariance import BatchInvariance, pad_rows, sigmoid
from graftwork.engine.model.layers import Linear
from tests.engine.families import ADAPTER, FAMILIES, make_family

AMX = BatchInvariance(48, 32, allows_one_row=True)
"""Rules like those of a processor with AMX."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    features=st.integers(2, 180).map(lambda size: size * 8),
    outputs=st.integers(2, 80).map(lambda size: size * 8),
    num_rows=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_a_padded_product_has_the_bits_of_a_large_one(
    dtype: torch.dtype, features: int, outputs: int, num_rows: int, seed: int
) -> None:
    """For shapes that the measurement did not see, rows that are padded as it says have the bits that they have among
    many, with plain weights and with weights in blocks."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(90, features, generator=generator).to(dtype)
    linear = Linear(torch.randn(outputs, features, generator=generator).to(dtype))
    few = pad_rows(x[5 : 5 + num_rows])
    for _ in range(2):
        assert torch.equal(linear(few)[:num_rows], linear(x)[5 : 5 + num_rows])
        linear.pack()


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 1), (2, 48), (47, 48), (48, 48), (50, 50)])
def test_one_row_may_stay_alone(num_rows: int, padded: int) -> None:
    """Where one row has the right bits and two have not, only more than one row are padded."""
    assert AMX.rows(num_rows) == padded
    assert BatchInvariance(48, 32).rows(num_rows) == max(num_rows, 48)


def test_sizes_that_matter_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor whose products of 2 to 33 rows add up in another order, 40 rows are the fewest that are measured."""

    def unlike(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = x.double() @ weight.double().t()
        return (product + (1e-3 if 2 <= len(x) <= 33 else 0)).float()

    monkeypatch.setattr("torch.nn.functional.linear", unlike)

    assert batch_invariance.measured_rules.__wrapped__(torch.float32).min_rows == 40


def test_other_sizes_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that pads as on a processor with AMX gives the same greedy tokens."""
    torch.set_num_threads(1)
    family = make_family(FAMILIES["llama-llama3"], tmp_path)

    def tokens() -> list[list[int]]:
        driver = family.engine()
        driver.warm(ADAPTER)
        asked = [([3, 5, 8, 13, 21][:length], adapter) for length, adapter in ((5, ADAPTER), (2, None), (4, ADAPTER))]
        outcomes = [driver.submit(prompt, adapter=adapter, max_tokens=6, ignore_eos=True) for prompt, adapter in asked]
        driver.finish()
        return [outcome.token_ids for outcome in outcomes]

    usual = tokens()
    monkeypatch.setattr(batch_invariance, "measured_rules", lambda dtype: AMX)

    assert tokens() == usual
    assert {len(own) for own in usual} == {6}


@given(columns=st.integers(1, 70), num_rows=st.integers(1, 12), seed=st.integers(0, 1000))
def test_a_sigmoid_does_not_depend_on_the_rows_beside_it(columns: int, num_rows: int, seed: int) -> None:
    """A row has the same bits alone and among others, also where it is no whole vector, and torch's values."""
    x = torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(seed)) * 3

    together = sigmoid(x)

    assert all(torch.equal(sigmoid(x[row : row + 1]), together[row : row + 1]) for row in range(num_rows))
    torch.testing.assert_close(together, torch.sigmoid(x), rtol=1e-6, atol=0)
