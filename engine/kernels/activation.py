# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Computes the gated activation of an MLP, activation(gate) * up, in one launch.

One program computes one row (token) and one block of columns. Sigmoids and error functions are approximate in their
last fp32 bits. The activation is rounded before it is multiplied by `up`, as torch does, so few 16-bit values differ
from torch's, and then by one rounding.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from graftwork.engine.kernels.blocks import rounded
from graftwork.engine.kernels.launch import Launch

_BLOCK = 1024


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Returns the activation of fp32 values."""
    if ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is the sigmoid of 2 * z. From 80 on, the exponential is as good as infinite.
        power = -1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = tl.where(power < 80.0, x / (1.0 + tl.exp(tl.minimum(power, 80.0))), 0.0)
    else:
        y = x / (1.0 + tl.exp(-x))
    return y


@triton.jit
def activate_kernel(
    gate_up,
    inner,
    gate_up_stride,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes one block of columns of one row of activation(gate) * up."""
    dtype = inner.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gates = gate_up + row * gate_up_stride + columns
    gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gates + WIDTH, mask=mask, other=0.0).to(tl.float32)
    y = rounded(activated(gate, ACTIVATION), dtype) * up
    tl.store(inner + row * WIDTH + columns, y.to(dtype), mask=mask)


def activate_launch(gate_up: torch.Tensor, inner: torch.Tensor, activation: str) -> Launch:
    """Returns the launch that writes activation(gate) * up to `inner`.

    gate_up: [num_rows, 2 * width] with any stride between rows, gates first; inner: [num_rows, width], contiguous, of
    the same dtype; activation: "silu", "gelu" (by the error function) or "gelu_tanh" (its approximation). Raises ValueError if the columns of a row are not adjacent in memory.
    """
    num_rows, width = inner.shape
    if gate_up.stride(1) != 1 or not inner.is_contiguous():
        raise ValueError("the columns of a row must be adjacent in memory, and the result contiguous")
    arguments: dict[str, Any] = {
        "gate_up": gate_up,
        "inner": inner,
        "gate_up_stride": gate_up.stride(0),
        "WIDTH": width,
        "ACTIVATION": activation,
        "BLOCK": _BLOCK,
    }
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    return Launch(activate_kernel, grid, arguments, {"num_warps": 4, "num_stages": 1})
