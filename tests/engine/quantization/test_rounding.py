"""Rounding at load gives the nearest codes, with the scales that compressed-tensors computes for symmetric integers."""

import pytest
import torch

from graftwork.engine.quantization.rounding import rounded
from graftwork.engine.quantization.scheme import round_to_nearest
from graftwork.platform.errors import InvalidRequest


def reference(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Returns the weight after compressed-tensors' calculate_qparams, quantize and dequantize of a symmetric range."""
    groups = weight.view(len(weight), -1, group)
    lowest, highest = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    largest = torch.max(lowest.abs(), highest.abs()).float()
    scale = (largest / ((2**bits - 1) / 2)).to(weight.dtype)
    codes = torch.clamp(groups.float() / scale.float(), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).round()
    values: torch.Tensor = codes.to(weight.dtype) * scale
    return values.view_as(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize(("width", "group"), [(512, 128), (160, 32), (192, 64)])
def test_rounding_is_to_the_nearest(dtype: torch.dtype, name: str, bits: int, width: int, group: int) -> None:
    """A rounded weight is that of compressed-tensors: each output of int8, each group of int4 has a scale."""
    weight = torch.randn(24, width, generator=torch.Generator().manual_seed(0)).to(dtype)

    found = rounded(weight, round_to_nearest(name, None).scheme).dense(dtype)

    assert torch.equal(found, reference(weight, bits, width if bits == 8 else group))


def test_a_group_of_zeros_stays_zero() -> None:
    """A weight of zeros, which has no scale, is rounded to zeros."""
    found = rounded(torch.zeros(4, 64), round_to_nearest("int4", None).scheme)

    assert not found.dense(torch.float32).any()


def test_what_is_no_number_is_refused() -> None:
    """A weight that is not finite is refused."""
    with pytest.raises(InvalidRequest, match="infinite or no number"):
        rounded(torch.full((4, 64), torch.nan), round_to_nearest("int8", None).scheme)


def test_a_name_that_is_not_served_is_refused() -> None:
    """A quantisation that is neither int8 nor int4 is refused by name."""
    with pytest.raises(InvalidRequest, match="quantization 'fp8' is not served: give int8 or int4"):
        round_to_nearest("fp8", None)
