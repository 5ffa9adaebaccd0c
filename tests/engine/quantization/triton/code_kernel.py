# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Kernels that write the bits and the scales which the kernels of quantised weights make of what is stored."""

import triton
import triton.language as tl

from graftwork.engine.quantization.triton.kernels import bits_of, scales_of


@triton.jit
def write_bits_kernel(words, bits, STEP: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(bits + places, bits_of(tl.load(words + places), STEP, KIND, DTYPE))


@triton.jit
def write_scales_kernel(stored, scales, KIND: tl.constexpr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(scales + places, scales_of(tl.load(stored + places), KIND))
