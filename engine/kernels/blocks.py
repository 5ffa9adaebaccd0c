# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines functions that the Triton kernels of several rooms call: sums and maxima of a block, rounding, norms.

tl.sum and tl.max are part of Triton's library, not of its language, so an interpreted copy of a kernel does not have
them when other kernels of the process are compiled. The functions here are part of the language. They add in a tree
whose shape follows from the shape of the block alone, so equal blocks give equal bits.
"""

import triton
import triton.language as tl


@triton.jit
def sum_of(block, AXIS: tl.constexpr = 0):
    return tl.reduce(block, AXIS, tl.standard._sum_combine)


@triton.jit
def max_of(block, AXIS: tl.constexpr = 0):
    return tl.reduce(block, AXIS, tl.standard._elementwise_max)


@triton.jit
def running_sum(values):
    return tl.associative_scan(values, 0, tl.standard._sum_combine)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Returns fp32 values that are rounded to DTYPE. torch rounds so between two operations."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def scaled_norm(x, mean_square, weight, epsilon, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Divides x by its root mean square and multiplies it by `weight`. All are fp32.

    If KIND is "rms", rounds to DTYPE before the multiplication and after it, as transformers does. Otherwise rounds only
    after it.
    """
    y = x * tl.rsqrt(mean_square + epsilon)
    if KIND == "rms":
        y = rounded(y, DTYPE)
    return rounded(y * weight, DTYPE)


@triton.jit
def normalised(x, weight, mask, epsilon, KIND: tl.constexpr, FEATURES: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the norm of one row, fp32. KIND is a NormKind: "rms", "rms_rounded_once" or "layer".

    x: fp32 [block], zero beyond FEATURES, where `mask` is False. weight: fp32 [block].
    """
    if KIND == "layer":
        x = tl.where(mask, x - sum_of(x) / FEATURES, 0.0)
    return scaled_norm(x, sum_of(x * x) / FEATURES, weight, epsilon, KIND, DTYPE)
