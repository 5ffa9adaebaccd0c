"""Tests of the compiled kernels of quantised weights on a machine without a GPU."""

import re
from typing import Any

import pytest

from tests.engine.kernels.compiled import assert_fits

pytestmark = pytest.mark.timeout(900)  # compiles a hundred kernels, where no cache has them
MANY_ROWS_SPILL = 16
"""The most bytes of a thread that a kernel with tiles of 32 or 64 rows spills."""
ON_OTHERS = ("int4 zeros fp16", "fp8 rows, blocks bf16")
MATRIX_INSTRUCTIONS = {
    ("multiply_codes_kernel", 80): "mma.sync.aligned.m16n8k16",
    ("multiply_codes_kernel", 90): "mma.sync.aligned.m16n8k16",
    ("multiply_codes_kernel", 100): "mma.sync.aligned.m16n8k16",
    ("multiply_float8_kernel", 90): "wgmma.mma_async.sync.aligned.m64n64k32",
    ("multiply_float8_kernel", 100): "tcgen05.mma.cta_group::1.kind::f8f6f4",
}
"""By kernel and architecture, the one instruction that all products in 16 bits, or in float8, take."""


@pytest.fixture(scope="module")
def compiled() -> list[Any]:
    """Kernels of the examples: all on Hopper, those of two forms on the others."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.kernels.compile_ahead import compile_variant
    from graftwork.engine.quantization.triton.variants import weight_variants

    variants = {variant.key: variant for variant in weight_variants()}.values()
    wanted = [(90, one) for one in variants]
    wanted += [(arch, one) for arch in (80, 100) for one in variants if one.name.startswith(ON_OTHERS)]
    return [compile_variant(variant, arch) for arch, variant in wanted if arch >= variant.least_capability]


def test_all_kernels_build_and_fit(compiled: list[Any]) -> None:
    """Each kernel compiles for Ampere, Hopper and Blackwell within the limits of each architecture. Kernels with tiles
    of 16 rows, which serve most decoding steps, spill nothing."""
    kernels = {f"{name}_kernel" for name in ("sum_parts", "multiply_codes", "add_spans", "round_rows")}
    assert {(one.variant.kernel.__name__, one.capability) for one in compiled} == {
        *((kernel, target) for kernel in kernels for target in (80, 90, 100)),
        *(("multiply_float8_kernel", target) for target in (90, 100)),
    }
    for built in compiled:
        tile = built.variant.constants.get("BLOCK_ROWS", 0)
        assert_fits(built, spilled_bytes=MANY_ROWS_SPILL if tile > 16 else 0)


def test_one_matrix_instruction_serves_all_tiles(compiled: list[Any]) -> None:
    """Tiles of all sizes use one instruction of each architecture in 16 bits, and one with float8 on both sides, so a row's
    bits do not depend on its tile; fp32 uses no matrix unit, and nothing is summed atomically."""
    for built in compiled:
        found = {*re.findall(r"mma\.sync\.aligned\.\w+|wgmma\.mma_async[\w.]+?k\d+|tcgen05\.mma[\w.:]+", built.ptx)}
        wanted = MATRIX_INSTRUCTIONS.get((built.variant.kernel.__name__, built.capability))
        is_fp32 = "fp32" in built.variant.name
        assert found == (set() if wanted is None or is_fp32 else {wanted}), built.variant.name
        assert not re.search(r"\b(?:atom|red)\.", built.ptx), built.variant.name
