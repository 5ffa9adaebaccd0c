# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines the arithmetic of the sampling kernels: keys that order logits, integer weights, and the seeded noise.

A weight is exp(logit - best logit), as an integer: the number of parts of 2^-44. Sums of integers do not depend on the
order in which they are added. So a row draws the same token however its tokens are cut into blocks, and a mass that two
kernels compute has the same bits in both. The sum over 2^18 tokens fits into 63 bits. A token more than 31 below the
best has the weight 0.
"""

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """Returns int32 keys in the order of the fp32 values x. Equal values have equal keys, -0 and 0 too. NaN is above
    all, as in torch's argmax.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # noqa: PLR0124


@triton.jit
def value_of(key):
    """Returns the fp32 value of an int32 key; NaN for the lowest key, which no value has."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(x, tokens):
    """Returns int64 numbers in the order of the values x. Of equal values, the lowest token is the largest number.

    The high word is the key, and the low one is 2^31 - 1 - token.
    """
    return (key_of(x).to(tl.int64) << 32) | (tokens ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def packed_token(packed):
    return (packed & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def packed_value(packed):
    return value_of((packed >> 32).to(tl.int32))


@triton.jit
def weight_of(distance):
    """Returns int64 exp(-distance) in parts of 2^-44, within 2e-7 of the true value; 0 for NaN and beyond 31.

    Source: expf of the Cephes library. Uses no function of the device, so all devices agree in (nearly) every bit.

    distance: fp32, the best logit minus the token's own.
    """
    is_near = distance <= 31.0
    x = tl.where(is_near, -distance, 0.0)
    exponent = tl.floor(x * 1.44269504 + 0.5)  # the logarithm of e to the base of 2
    x = tl.fma(exponent, -0.693359375, x)  # the logarithm of 2, in two parts
    x = tl.fma(exponent, 2.12194440e-4, x)
    series = tl.fma(x, 1.9875691500e-4, 1.3981999507e-3)
    series = tl.fma(series, x, 8.3334519073e-3)
    series = tl.fma(series, x, 4.1665795894e-2)
    series = tl.fma(series, x, 1.6666665459e-1)
    series = tl.fma(series, x, 5.0000001201e-1)
    series = tl.fma(series, x * x, x) + 1.0
    scale = ((exponent.to(tl.int32) + (127 + 44)) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_near, (series * scale).to(tl.int64), 0)


@triton.jit
def uniform_of(seed, choice, position):
    """Returns the number in [0, 1) that engine/sampling/rng.py makes of the same int64 numbers, as fp64."""
    state = _mix(seed.to(tl.uint64, bitcast=True))
    state = _mix(state ^ (choice.to(tl.uint64, bitcast=True) * 0xD1342543DE82EF95))
    state = _mix(state ^ (position.to(tl.uint64, bitcast=True) * 0xD1342543DE82EF95))
    return (state >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _mix(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def mass_below(share, total):
    """Returns the whole part of share * total, at most total - 1. The first token whose running mass exceeds it is the
    token at this share of the mass.

    share: fp64, total: int64.
    """
    return tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def whole_parts(mass, weight):
    """Returns mass // weight of two int64 numbers, with at most 2^20 parts; weight 0 counts as 1.

    An integer division takes hundreds of instructions. The quotient of fp64 numbers is off by at most one.
    """
    weight = tl.maximum(weight, 1)
    parts = (mass.to(tl.float64) / weight.to(tl.float64)).to(tl.int64)
    parts -= tl.where(parts * weight > mass, 1, 0)
    return parts + tl.where((parts + 1) * weight <= mass, 1, 0)
