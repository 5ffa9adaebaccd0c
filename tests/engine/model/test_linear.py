"""The linear layers of the base give the same bits in both memory layouts."""

import pytest
import torch
from torch.nn import functional

from graftwork.engine.model.layers import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), [(97, 56), (17, 33), (256, 128)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_layer_gives_the_bits_of_the_plain_one(
    out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype
) -> None:
    """A packed layer gives the same bits for any number of rows, and returns the same weight."""
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
    layer = Linear(weight.clone(), bias)

    layer.pack()

    for num_rows in (1, 2, 7, 8, 31, 64):
        x = torch.randn(num_rows, in_features, generator=generator).to(dtype)
        assert torch.equal(layer(x), functional.linear(x, weight, bias))
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer.rows(3, 9)[0], weight[3:9])
