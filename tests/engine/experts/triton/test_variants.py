"""Tests of the compiled kernels of routed layers on a machine without a GPU."""

import re
from typing import Any

import pytest
from benchmarks.kernel_builds import ROUTED_MODELS

from tests.engine.kernels.compiled import assert_fits

DECODE = "16 rows"
ON_OTHERS = ("gpt-oss-20b mxfp4 bf16", "qwen3-30b sorted int4", "qwen3-30b fp8 rows, blocks")
FLOAT8 = "multiply_float8_tiles_kernel"
FLOAT8_INSTRUCTIONS = {90: "wgmma", 100: "tcgen05.mma"}


@pytest.fixture(scope="module")
def compiled() -> list[Any]:
    """Kernels of the examples: all on Hopper, those of the first and of experts in MXFP4 and sorted int4 on the others."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.experts.triton.variants import CODE_SHAPES, SHAPES
    from graftwork.engine.kernels.compile_ahead import compile_variant

    on_others = [SHAPES[0], *(shape for shape in CODE_SHAPES if shape.name.startswith(ON_OTHERS))]
    wanted = [(90, shape) for shape in (*SHAPES, *CODE_SHAPES)]
    wanted += [(other, shape) for other in (80, 100) for shape in on_others]
    variants = {(capability, one.key): one for capability, shape in wanted for one in shape.variants}
    return [
        compile_variant(variant, capability)
        for (capability, _), variant in variants.items()
        if capability >= variant.least_capability
    ]


def test_all_kernels_build_and_fit(compiled: list[Any]) -> None:
    """Each kernel compiles for Ampere, Hopper and Blackwell within the limits of each architecture, and none spills."""
    names = (
        "count_rows",
        "arrange_rows",
        "multiply_tiles",
        "multiply_code_tiles",
        "sort_features",
        "sum_parts",
        "round_rows",
    )
    kernels = {f"{name}_kernel" for name in names}
    built_for = {(built.variant.kernel.__name__, built.capability) for built in compiled}
    assert built_for - {(kernel, target) for kernel in kernels for target in (80, 90, 100)} == {
        (FLOAT8, 90),
        (FLOAT8, 100),
    }
    assert {kernel for kernel, target in built_for if target == 80} == kernels
    for built in compiled:
        assert_fits(built)


def test_one_matrix_instruction_serves_all_tiles(compiled: list[Any]) -> None:
    """Tiles of both sizes use mma.sync on every architecture in 16 bits, so a row's bits do not depend on its tile's size;
    fp32 uses no matrix unit, and nothing is summed atomically."""
    for built in compiled:
        is_product = built.variant.kernel.__name__ in ("multiply_tiles_kernel", "multiply_code_tiles_kernel")
        has_matrices = is_product and "fp32" not in built.variant.name
        instructions = {*re.findall(r"mma\.sync|wgmma(?=\.mma_async)|tcgen05\.mma", built.ptx)}
        wanted = {"mma.sync"} if has_matrices else set()
        if built.variant.kernel.__name__ == FLOAT8:
            wanted = {FLOAT8_INSTRUCTIONS[built.capability]}
        assert instructions == wanted, built.variant.name
        assert not re.search(r"\b(?:atom|red)\.", built.ptx), built.variant.name


def test_an_engine_with_experts_lists_their_kernels() -> None:
    """The kernels that an engine of a routed model may launch are those of its dense parts, and of its experts."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.build.compile_kernels import served_variants

    for model in ROUTED_MODELS.values():
        names = [variant.name for variant in served_variants(model) if variant.name.startswith("experts")]
        products = {name for name in names if "gate_up" in name or "down" in name}  # one may stand for both
        assert {name.removeprefix("experts ").partition(" ")[2] for name in products} == {"16 rows", "32 rows"}
        assert len(names) == len(set(names)) + 1  # one name stands for both kernels that arrange rows
