# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines how kernels round numbers to codes of one byte: int8, or float8_e4m3fn with the largest number 448.

Rounds by integer arithmetic, to the nearest, ties to even. So every architecture and the interpreter give the bits that
torch gives, also where the hardware has no float8.
"""

import triton
import triton.language as tl

from graftwork.engine.kernels.blocks import max_of


@triton.jit
def float8_of(values):
    """Returns the bits of fp32 values, rounded to the nearest float8_e4m3fn, ties to even: uint8. Values beyond 448 become
    448.
    """
    bits = values.to(tl.int32, bitcast=True)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)  # three bits of the fraction are left
    normal = (rounded >> 20) - 960  # less the difference of the biases of the exponents, 120 * 8
    size = magnitude.to(tl.float32, bitcast=True)
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # a number there counts 2 ** -9
    found = tl.where(size < 0.015625, subnormal, tl.minimum(normal, 126))
    return (found | sign).to(tl.uint8)


@triton.jit
def int8_of(values):
    """Returns the bits of fp32 values, rounded to the nearest integer, ties to even: uint8. Values beyond 127 become 127."""
    kept = tl.minimum(tl.maximum(values, -127.0), 127.0)
    whole = (kept + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2 ** 23, whose last bit counts 1
    return (whole & 0xFF).to(tl.uint8)


@triton.jit
def codes_of(values, KIND: tl.constexpr):
    """Returns the bits of fp32 values as codes of KIND, "int8" or "fp8"."""
    if KIND == "fp8":
        return float8_of(values)
    return int8_of(values)


@triton.jit
def head_scales(first, second, KIND: tl.constexpr):
    """Returns the scales of heads, rounded to bf16: their bits, int16 [heads], and their values, fp32 [heads].

    first, second: the two features of each pair, fp32 [heads, pairs]. A scale is the largest absolute value by the largest
    code. A head that has NaN gets the scale NaN, so all of it reads as NaN.
    """
    MOST: tl.constexpr = 448.0 if KIND == "fp8" else 127.0
    sizes = tl.maximum(first.to(tl.int32, bitcast=True) & 0x7FFFFFFF, second.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = max_of(sizes, 1)  # bits of numbers without a sign are in the order of the numbers, with NaN at the end
    number = largest.to(tl.float32, bitcast=True)
    bits = tl.div_rn(number, tl.full(number.shape, MOST, tl.float32)).to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(largest > 0x7F800000, 0x7FC0, rounded)
    return rounded.to(tl.int16), (rounded << 16).to(tl.float32, bitcast=True)
