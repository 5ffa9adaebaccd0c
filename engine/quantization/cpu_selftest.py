"""Tests the compiled kernel once for each kind of codes, before a model with such codes is served.

The test checks that the kernel compiles, that its products are right, that a row has the same bits alone and beside
others, and that weights are made dense bit by bit as in torch. It also loads the kernel from numba's cache, so that no
request waits for that.
"""

from functools import cache

import torch

from graftwork.engine.quantization.cpu_products import CpuProducts
from graftwork.engine.quantization.weight import Codes, QuantizedWeight

_SEED = 20261
_OUTPUTS, _FEATURES = 23, 1344
"""More features than a panel has, and no whole number of panels."""


@cache
def why_kernel_fails(kind: Codes) -> str | None:
    """Returns what is wrong with the kernel on this machine, as a text for the log, or None."""
    try:
        return _failure(kind)
    except Exception as error:  # noqa: BLE001 - a compiler and its libraries fail in ways of their own
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        return f"{type(error).__name__}: {first_line}"


def _failure(kind: Codes) -> str | None:
    generator = torch.Generator().manual_seed(_SEED)
    for group_size, dtype in ((32, torch.float16), (128, torch.bfloat16)):
        weight = trial_weight(kind, group_size, dtype, generator)
        x, own = torch.randn(7, _FEATURES, generator=generator), CpuProducts(weight)
        exact = x.double() @ weight.dense(torch.float64).t()
        alone = torch.cat([own.multiply(x[row : row + 1]) for row in range(len(x))])
        rounding = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
        error = ((alone.double() - exact).abs().max() / exact.abs().max()).item()
        if not error <= rounding:  # `dense` rounds each value to the dtype of the scales, and the kernel does not
            return f"products differ by {error:.3g} of the largest"
        if not torch.equal(own.multiply(x), alone) or not torch.equal(own.multiply(x.flip(0)).flip(0), alone):
            return "a row's product depends on its neighbours"
        for target in (torch.float32, torch.bfloat16):
            if not torch.equal(own.dense(3, _OUTPUTS, target), weight.dense(target)[3:]):
                return f"dense weights in {target} differ from torch's"
    return None


def trial_weight(kind: Codes, group_size: int, dtype: torch.dtype, generator: torch.Generator) -> QuantizedWeight:
    """Returns a weight of random codes and scales, with zero points if the codes are integers."""
    shape, groups = (_OUTPUTS, _FEATURES), -(-_FEATURES // group_size)
    scales = (0.5 + torch.rand(_OUTPUTS, groups, generator=generator)).to(dtype)
    if kind is Codes.FLOAT8:
        codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        return QuantizedWeight.of(codes, scales, kind=kind, group_size=group_size)
    most = 8 if kind is Codes.INT4 else 128
    codes = torch.randint(-most, most, shape, generator=generator, dtype=torch.int16).to(torch.int8)
    zeros = torch.randint(-most, most + 1, (_OUTPUTS, groups), generator=generator, dtype=torch.int16)
    return QuantizedWeight.of(codes, scales, zeros, kind=kind, group_size=group_size)
