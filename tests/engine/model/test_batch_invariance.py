"""Tests of the sizes from which a row's bits do not depend on its neighbours."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.model import batch_invariance
from graftwork.engine.model.batch_invariance import BatchInvariance, pad_rows, sigmoid
from graftwork.engine.model.layers import Linear
from tests.engine.families import ADAPTER, FAMILIES, make_family

PADDED = BatchInvariance(48, 32, allows_one_row=True)
"""Rules like those of a processor on which a product needs many rows."""
IN_BLOCKS = BatchInvariance(2, 1, attends_in_any_shape=True, max_rows=3, narrow_features=40)
"""Rules like those of a processor with AMX, on which a product with a wide input may have few rows."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    features=st.integers(16, 180).map(lambda size: size * 8),
    outputs=st.integers(8, 80).map(lambda size: size * 8),
    num_rows=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_a_padded_product_has_the_bits_of_a_large_one(
    dtype: torch.dtype, features: int, outputs: int, num_rows: int, seed: int
) -> None:
    """For shapes that the measurement did not see, rows that are padded and divided as it says have the bits that they
    have among many, with plain weights and with weights in blocks. Sums cancel, so another order leaves another rest."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(90, features // 2, generator=generator), torch.randn(outputs, features // 2)
    places = torch.randperm(features, generator=generator)
    x = torch.cat([x, x], dim=1)[:, places].to(dtype)
    linear = Linear(torch.cat([weight, -weight], dim=1)[:, places].to(dtype))
    linear.limit_rows(BatchInvariance.of(dtype).rows_at_once(features))
    few = pad_rows(x[5 : 5 + num_rows])
    for _ in range(2):
        assert torch.equal(linear(few)[:num_rows], linear(x)[5 : 5 + num_rows])
        linear.pack()


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 1), (2, 48), (47, 48), (48, 48), (50, 50)])
def test_one_row_may_stay_alone(num_rows: int, padded: int) -> None:
    """Where one row has the right bits and two have not, only more than one row are padded."""
    assert PADDED.rows(num_rows) == padded
    assert BatchInvariance(48, 32).rows(num_rows) == max(num_rows, 48)


@pytest.mark.parametrize(
    ("other_order", "min_rows", "max_rows", "narrow_features"),
    [
        (lambda rows, features: 2 <= rows <= 14, 15, None, 0),
        (lambda rows, features: rows >= 37 and features > 480, 1, 32, 480),
        (lambda rows, features: rows == 1 and features > 1000, 2, None, 0),
        (lambda rows, features: False, 1, None, 0),
    ],
    ids=["few", "many-of-wide", "one-of-wide", "none"],
)
def test_sizes_that_matter_are_found(
    monkeypatch: pytest.MonkeyPatch,
    other_order: Callable[[int, int], bool],
    min_rows: int,
    max_rows: int | None,
    narrow_features: int,
) -> None:
    """The measurement finds the rows whose products add up in another order, on processors that differ. All its sums are
    0 but for what an order leaves."""

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.full((len(x), len(weight)), 1e-3 if other_order(*x.shape) else 0.0)

    monkeypatch.setattr("torch.nn.functional.linear", product)
    rules = batch_invariance.measured_rules.__wrapped__(torch.float32)

    assert (rules.min_rows, rules.max_rows) == (min_rows, max_rows)
    assert rules.narrow_features == narrow_features


@pytest.mark.parametrize("rules", [PADDED, IN_BLOCKS], ids=["padded", "in-blocks"])
def test_other_sizes_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: BatchInvariance
) -> None:
    """An engine that pads or divides products as other processors need it gives the same greedy tokens."""
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
    monkeypatch.setattr(batch_invariance, "measured_rules", lambda dtype: rules)

    assert tokens() == usual
    assert {len(own) for own in usual} == {6}


@given(columns=st.integers(1, 70), num_rows=st.integers(1, 12), seed=st.integers(0, 1000))
def test_a_sigmoid_does_not_depend_on_the_rows_beside_it(columns: int, num_rows: int, seed: int) -> None:
    """A row has the same bits alone and among others, also where it is no whole vector, and torch's values."""
    x = torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(seed)) * 3

    together = sigmoid(x)

    assert all(torch.equal(sigmoid(x[row : row + 1]), together[row : row + 1]) for row in range(num_rows))
    torch.testing.assert_close(together, torch.sigmoid(x), rtol=1e-6, atol=0)
