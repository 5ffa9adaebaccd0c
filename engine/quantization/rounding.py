"""Rounds weights to int8 or int4 when they are loaded (round to nearest).

    int8     one scale for each output: its largest absolute value / 127.5, codes -128 … 127
    int4     one scale for each output and group of input features: the largest absolute value / 7.5, codes -8 … 7

Never looks at data: weights alone decide. Sums and scales are fp32, and the scales are rounded to bf16 or fp16 if the
weights are of that dtype, before the codes are computed with them.
Source: the scales of symmetric integers in compressed-tensors: (max - min) / (2 ** bits - 1) of a range around 0.
"""

import torch

from graftwork.engine.quantization.scheme import Method, Scheme
from graftwork.engine.quantization.weight import WHOLE_ROW, Codes, QuantizedWeight
from graftwork.platform.errors import InvalidRequest

_LEAST_GROUP = 32


def rounded(weight: torch.Tensor, scheme: Scheme) -> QuantizedWeight:
    """Quantises a weight [out_features, in_features] of any float dtype.

    Raises InvalidRequest if it has values that are not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise InvalidRequest(
            "--quantization: a weight is infinite or no number: take a whole checkpoint.", param="model"
        )
    in_features = weight.shape[1]
    if scheme.method is Method.ROUND_INT8:
        return _rounded(weight, in_features, Codes.INT8, bits=8)
    return _rounded(weight, group_for(in_features, scheme.group_size or in_features), Codes.INT4, bits=4)


def group_for(in_features: int, wanted: int) -> int:
    """Returns the largest power of two up to `wanted` that divides a layer's input features, or all of them if the
    largest is below 32.
    """
    group = wanted
    while group >= _LEAST_GROUP and in_features % group:
        group //= 2
    return group if group >= _LEAST_GROUP else in_features


def _rounded(weight: torch.Tensor, group: int, kind: Codes, *, bits: int) -> QuantizedWeight:
    out_features, in_features = weight.shape
    values = weight.float().view(out_features, -1, group)  # [out_features, groups, group]
    largest = values.abs().amax(dim=2)
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scales = (largest / ((highest - lowest) / 2)).to(weight.dtype)
    divisors = scales.float().masked_fill(scales == 0, 1.0)  # codes of a group of zeros are 0
    codes = (values / divisors[:, :, None]).round_().clamp_(lowest, highest).to(torch.int8)
    return QuantizedWeight.of(
        codes.view(out_features, in_features),
        scales,
        kind=kind,
        group_size=WHOLE_ROW if group == in_features else group,
    )
