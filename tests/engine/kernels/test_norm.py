"""Tests of the kernel that adds and normalises, under the interpreter."""

from types import ModuleType

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

EPSILON = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter cuts bf16 off instead of rounding it: up to three roundings that each lose a whole last bit.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}


def strided(num_rows: int, features: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random rows inside of a wider tensor that is NaN elsewhere.  # [num_rows, features]"""
    whole = torch.full((num_rows + 2, features + 5), float("nan"), dtype=dtype)
    part = whole[1:-1, 2 : 2 + features]
    part.copy_(3 * torch.randn(num_rows, features, generator=generator))
    return part


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = LlamaRMSNorm(len(weight), eps=EPSILON).to(x.dtype)
    norm.weight.data.copy_(weight)
    return norm(x).detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize("features", [1, 12, 128, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_and_norm_are_those_of_transformers(
    interpreted: dict[str, ModuleType], generator: torch.Generator, dtype: torch.dtype, features: int
) -> None:
    """Rows with any stride are added in place, and the norm of the sum is that of transformers' Llama."""
    hidden, delta = (strided(5, features, dtype, generator) for _ in range(2))
    weight = (1 + 0.4 * torch.randn(features, generator=generator)).to(dtype)
    normed = torch.full((5, features), float("nan"), dtype=dtype)
    total = hidden + delta

    interpreted["norm"].add_norm_launch(hidden, delta, weight, normed, EPSILON).run()

    tolerance = TOLERANCE[dtype]
    if dtype == torch.bfloat16:
        torch.testing.assert_close(hidden, total, rtol=2**-7, atol=0)
    else:
        assert torch.equal(hidden, total)
    torch.testing.assert_close(normed, reference(total, weight), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_almost_all_bits_are_torchs(
    interpreted: dict[str, ModuleType], generator: torch.Generator, dtype: torch.dtype
) -> None:
    """Rounding happens before and after the multiplication by the weight, so fp16 values differ in 1 of 1,000 at most.
    Without the first rounding a quarter would differ."""
    x = strided(64, 96, dtype, generator)
    weight = (1 + 0.4 * torch.randn(96, generator=generator)).to(dtype)
    normed = torch.empty(64, 96, dtype=dtype)

    interpreted["norm"].add_norm_launch(x, None, weight, normed, EPSILON).run()

    expected = reference(x, weight)
    if dtype == torch.float16:
        assert (normed != expected).float().mean() < 1e-3
    torch.testing.assert_close(normed, expected, rtol=1e-3 if dtype == torch.float16 else 1e-6, atol=0)


def test_a_norm_alone_changes_no_input(interpreted: dict[str, ModuleType], generator: torch.Generator) -> None:
    """Without a delta the input is left as it is, and a row has the same bits alone and beside others, even NaN."""
    x = strided(6, 40, torch.float32, generator)
    x[3] = float("nan")
    before, weight = x.clone(), torch.rand(40, generator=generator)
    together, alone = torch.empty(6, 40), torch.empty(1, 40)

    interpreted["norm"].add_norm_launch(x, None, weight, together, EPSILON).run()
    interpreted["norm"].add_norm_launch(x[2:3], None, weight, alone, EPSILON).run()

    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(together[2:3], alone)
    assert together.isnan().any(dim=1).tolist() == [False, False, False, True, False, False]


def test_large_values_do_not_overflow(interpreted: dict[str, ModuleType]) -> None:
    """The squares of fp16 values are summed in fp32, so the norm of values near the largest fp16 is finite."""
    x = torch.full((1, 64), 60_000.0, dtype=torch.float16)
    normed = torch.empty_like(x)

    interpreted["norm"].add_norm_launch(x, None, torch.ones(64, dtype=torch.float16), normed, EPSILON).run()

    assert torch.equal(normed, torch.ones_like(x))


def test_features_that_are_not_adjacent_are_refused(interpreted: dict[str, ModuleType]) -> None:
    """A transposed input is refused before the launch."""
    x, weight = torch.ones(4, 4), torch.ones(4)

    with pytest.raises(ValueError, match="adjacent"):
        interpreted["norm"].add_norm_launch(x.t(), None, weight, torch.empty(4, 4), EPSILON)
    with pytest.raises(ValueError, match="adjacent"):
        interpreted["norm"].add_norm_launch(x, None, weight, torch.empty(4, 8)[:, :4], EPSILON)
