"""Tests the kernels of quantised weights on a device at the engine's start, before any request uses them.

The test multiplies a few rows with a small weight of one form, and compares the products with plain torch. It also checks
that a row has the same bits alone, in a tile of each size, and where one program adds all spans.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch

from graftwork.engine.quantization.triton.products import products_of
from graftwork.engine.quantization.weight import WHOLE_ROW, Codes, QuantizedWeight

_SEED = 20263
_IN_FEATURES, _OUT_FEATURES = 1376, 200
"""More than one span and block, and no whole number of blocks."""
_FEW, _MANY = 5, 4200
"""Rows of a small tile, and so many rows in large tiles that no spans are parallel."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The largest error, relative to the largest value: one rounding, and a margin for another order of the sums."""
FLOAT8_TOLERANCE = 2e-3
"""The same of products of float8 with float8, of whose sums Hopper's matrix units keep 13 bits within a block."""


def why_weight_kernels_fail(
    form: QuantizedWeight, device: torch.device, dtype: torch.dtype, *, rounds_rows: bool = False
) -> str | None:
    """Returns what is wrong with the kernels for weights of the form of `form` on a device, as a text for the log; None if
    they compute what torch does. With `rounds_rows`, products with FLOAT8 round the rows too.
    """
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return _failure(form, device, dtype, rounds_rows=rounds_rows)
    except Exception as error:  # noqa: BLE001 - compilers, drivers and linkers each fail in a way of their own
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        return f"{type(error).__name__}: {first_line}"


def _failure(form: QuantizedWeight, device: torch.device, dtype: torch.dtype, *, rounds_rows: bool) -> str | None:
    generator = torch.Generator().manual_seed(_SEED)
    weight = trial_weight(form, (_OUT_FEATURES, _IN_FEATURES), generator)
    x = torch.randn(_MANY if device.type == "cuda" else _FEW * 7, _IN_FEATURES, generator=generator).to(dtype)
    products = products_of(rounds_rows=rounds_rows)(weight.to(device))

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(rows), _OUT_FEATURES, dtype=dtype, device=device)
        products.multiply(rows.to(device), None, y)
        return y.cpu()

    first, tolerance = x[:_FEW], _TOLERANCE[dtype]
    if rounds_rows and form.kind is Codes.FLOAT8:
        first, tolerance = rounded_rows(first), max(tolerance, FLOAT8_TOLERANCE)
    exact = first.double() @ replace(weight, scale_dtype=torch.float64).dense(torch.float64).t()
    few = multiply(x[:_FEW])
    error = ((few.double() - exact).abs().max() / exact.abs().max()).item()
    if not error <= tolerance:
        return f"products of {form.kind.value} differ from plain torch by {error:.3g} of the largest"
    if not torch.equal(multiply(x[:1]), few[:1]) or not torch.equal(multiply(x)[:_FEW], few):
        return f"a row's product with {form.kind.value} depends on its neighbours"
    return None


def trial_weight(form: QuantizedWeight, shape: tuple[int, int], generator: torch.Generator) -> QuantizedWeight:
    """Returns a weight of (out_features, in_features) with random codes and scales, and groups and zero points as `form` has
    them.
    """
    out_features, in_features = shape
    group = form.group_size if form.group_size < in_features else WHOLE_ROW
    groups = 1 if group == WHOLE_ROW else -(-in_features // group)
    if form.kind is Codes.FLOAT4:
        codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.int16).to(torch.uint8)
        powers = torch.randint(125, 130, (out_features, groups), generator=generator, dtype=torch.int16)
        return QuantizedWeight.of(codes, powers.to(torch.uint8), kind=form.kind, group_size=group)
    scales = 0.5 + torch.rand(out_features, groups, generator=generator)
    if form.kind is Codes.FLOAT8:
        codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        return QuantizedWeight.of(codes, scales, kind=form.kind, group_size=group)
    most = 8 if form.kind is Codes.INT4 else 128
    codes = torch.randint(-most, most, shape, generator=generator, dtype=torch.int16).to(torch.int8)
    zeros = None
    if form.zeros is not None:
        zeros = torch.randint(-most, most + 1, (out_features, groups), generator=generator, dtype=torch.int16)
    return QuantizedWeight.of(codes, scales, zeros, kind=form.kind, group_size=group)


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns rows that are rounded to float8_e4m3fn with a scale of their own, in fp32: [num_rows, features]."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = (x.float().abs().amax(dim=1, keepdim=True) / largest).clamp(min=1 / (largest * 512))
    return (x.float() / scales).clamp(-largest, largest).to(torch.float8_e4m3fn).float() * scales
