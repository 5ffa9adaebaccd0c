"""Layers whose codes the kernels read: which parts are joined, and what stays of the weights."""

from types import ModuleType

import numpy as np
import pytest
import torch

from graftwork.engine.quantization.linear import LinearWeight, QuantizedLinear, StepKinds
from graftwork.engine.quantization.weight import WHOLE_ROW, Codes, QuantizedWeight
from tests.engine.quantization.test_products import random_weight

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
FP32 = torch.float32


def layers(weights: list[LinearWeight], products: type, bias: torch.Tensor | None = None) -> list[QuantizedLinear]:
    """The layer as a CPU computes it, and the same by kernels."""
    made = [QuantizedLinear(weights, bias, FP32, StepKinds()) for _ in range(2)]
    made[1].take_kernels(products)
    return made


@pytest.mark.parametrize("kind", Codes)
def test_parts_of_one_form_are_joined_and_keep_their_values(interpreted: dict[str, ModuleType], kind: Codes) -> None:
    """Three parts become one weight, for one launch. Made dense, it has their values bit by bit, and the layer gives
    prompts and decoding rows the same bits."""
    parts: list[LinearWeight] = [random_weight(kind, out, 160, 32, seed=out) for out in (64, 8, 40)]
    bias = torch.randn(112, generator=torch.Generator().manual_seed(1))
    x = torch.randn(5, 160, generator=torch.Generator().manual_seed(2))

    plain, own = layers(parts, interpreted["products"].CodeProducts, bias)

    assert [weight.out_features for weight in own.quantized] == [112]
    assert own.has_kernels
    assert not plain.has_kernels
    assert torch.equal(own.weight, plain.weight)
    assert torch.equal(own.rows(60, 75)[0], plain.rows(60, 75)[0])
    assert (own.out_features, own.in_features) == (112, 160)
    offsets = 0 if kind in (Codes.FLOAT8, Codes.FLOAT4) else 4 * 112 * 8  # groups of two whole blocks
    assert own.num_bytes == own.quantized[0].num_bytes + offsets + bias.nbytes
    exact = x.double() @ plain.weight.double().t() + bias.double()
    torch.testing.assert_close(own(x).double(), exact, atol=3e-6 * float(exact.abs().max()), rtol=0)
    assert torch.equal(own.of_some(x, np.array([True, False, True, False, False])), own(x))


def test_parts_of_other_forms_stay_apart(interpreted: dict[str, ModuleType]) -> None:
    """Parts of different codes and plain ones have products of their own; those with zero points join those without."""
    zeroless = QuantizedWeight.of(torch.ones(8, 160).to(torch.int8), torch.ones(8, 5), kind=Codes.INT8, group_size=32)
    parts: list[LinearWeight] = [
        random_weight(Codes.INT4, 24, 160, 32),
        random_weight(Codes.FLOAT8, 16, 160, WHOLE_ROW),
        torch.randn(16, 160, generator=torch.Generator().manual_seed(3)),
        random_weight(Codes.INT8, 8, 160, 32),
        zeroless,
    ]
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(4))

    plain, own = layers(parts, interpreted["products"].CodeProducts)

    assert [weight.out_features for weight in own.quantized] == [24, 16, 16]
    assert torch.equal(own.weight, plain.weight)
    torch.testing.assert_close(own(x), plain(x), atol=1e-4 * float(plain(x).abs().max()), rtol=0)


def test_sorted_columns_are_read_in_their_order(interpreted: dict[str, ModuleType]) -> None:
    """Parts whose columns are sorted alike are joined; parts with orders of their own are not. Both give the products."""
    one = random_weight(Codes.INT4, 24, 160, 32, seed=1, sort=True)
    same = random_weight(Codes.INT4, 8, 160, 32, seed=1, sort=True)
    other = random_weight(Codes.INT4, 16, 160, 32, seed=2, sort=True)
    same = QuantizedWeight(**{name: getattr(same, name) for name in QuantizedWeight.__slots__} | {"order": one.order})
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(5))

    for second, widths in ((same, [32]), (other, [24, 16])):
        plain, own = layers([one, second], interpreted["products"].CodeProducts)

        assert [weight.out_features for weight in own.quantized] == widths
        assert torch.equal(own.weight, plain.weight)
        torch.testing.assert_close(own(x), plain(x), atol=1e-4 * float(plain(x).abs().max()), rtol=0)
