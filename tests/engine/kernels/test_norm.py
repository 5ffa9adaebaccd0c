"""Tests of the kernel that adds and normalises, under the interpreter."""

from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

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


def norm_launch(interpreted: dict[str, ModuleType], x: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor) -> Any:
    norm = interpreted["norm"]
    return norm.norm_launch(x, weight, normed, norm.NormRules(EPSILON))


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

    norm = interpreted["norm"]
    norm.add_norm_launch(hidden, delta, (None, weight), normed, norm.NormRules(EPSILON)).run()

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

    norm_launch(interpreted, x, weight, normed).run()

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

    norm_launch(interpreted, x, weight, together).run()
    norm_launch(interpreted, x[2:3], weight, alone).run()

    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(together[2:3], alone)
    assert together.isnan().any(dim=1).tolist() == [False, False, False, True, False, False]


NORMS = {"rms": LlamaRMSNorm, "rms_rounded_once": Olmo2RMSNorm, "layer": Cohere2LayerNorm}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("has_post", "has_norm", "scale"), [(True, True, 1.0), (False, True, 0.22), (True, False, 0.5)]
)
def test_each_kind_of_norm_and_place_is_that_of_transformers(
    interpreted: dict[str, ModuleType],
    generator: torch.Generator,
    dtype: torch.dtype,
    kind: str,
    has_post: bool,
    has_norm: bool,
    scale: float,
) -> None:
    """What is added is normalised and scaled first, and the sum is normalised by the kind of norm of the model."""
    hidden, delta = (strided(5, 72, dtype, generator) for _ in range(2))
    norms: list[Any] = [NORMS[kind](72, eps=EPSILON).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data.copy_(1 + 0.4 * torch.randn(72, generator=generator))
    kept = dtype if kind == "rms" else torch.float32
    post_weight, weight = (norm.weight.detach().to(kept) for norm in norms)
    normed = torch.full((5, 72), float("nan"), dtype=dtype) if has_norm else None
    total = hidden + (norms[0](delta).detach() if has_post else delta) * scale
    kernels = interpreted["norm"]

    kernels.add_norm_launch(
        hidden,
        delta,
        (post_weight if has_post else None, weight if has_norm else None),
        normed,
        kernels.NormRules(EPSILON, kind, scale),
    ).run()

    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(hidden, total, rtol=tolerance, atol=tolerance)
    if normed is not None:
        torch.testing.assert_close(normed, norms[1](total).detach(), rtol=2 * tolerance, atol=2 * tolerance)


def test_a_norm_may_replace_its_input(interpreted: dict[str, ModuleType], generator: torch.Generator) -> None:
    """Written over rows of a wider tensor, a norm has the same bits as beside them, and changes nothing else."""
    whole = torch.randn(4, 40, generator=generator)
    weight, apart, before = torch.rand(24, generator=generator), torch.empty(4, 24), whole.clone()

    norm_launch(interpreted, whole[:, 8:32], weight, apart).run()
    norm_launch(interpreted, whole[:, 8:32], weight, whole[:, 8:32]).run()

    assert torch.equal(whole[:, 8:32], apart)
    assert torch.equal(whole[:, :8], before[:, :8])
    assert torch.equal(whole[:, 32:], before[:, 32:])


def test_large_values_do_not_overflow(interpreted: dict[str, ModuleType]) -> None:
    """The squares of fp16 values are summed in fp32, so the norm of values near the largest fp16 is finite."""
    x = torch.full((1, 64), 60_000.0, dtype=torch.float16)
    normed = torch.empty_like(x)

    norm_launch(interpreted, x, torch.ones(64, dtype=torch.float16), normed).run()

    assert torch.equal(normed, torch.ones_like(x))


def test_features_that_are_not_adjacent_are_refused(interpreted: dict[str, ModuleType]) -> None:
    """A transposed input or result is refused before the launch."""
    x, weight = torch.ones(4, 4), torch.ones(4)

    with pytest.raises(ValueError, match="adjacent"):
        norm_launch(interpreted, x.t(), weight, torch.empty(4, 4))
    with pytest.raises(ValueError, match="adjacent"):
        norm_launch(interpreted, x, weight, torch.empty(4, 4).t())
