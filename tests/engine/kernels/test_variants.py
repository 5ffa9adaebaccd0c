"""Tests of the compiled row kernels on a machine without a GPU."""

import re
from typing import Any

import pytest

from tests.engine.kernels.compiled import assert_fits

NAMES = (
    *("add_norm_kernel", "rotate_and_store_kernel", "step_angles_kernel", "activate_kernel"),
    "take_tokens_kernel",
)


def compiled_row_kernels(capabilities: tuple[int, ...], num_models: int) -> list[Any]:
    """The row kernels of the first model shapes."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.kernels.compile_ahead import compile_all
    from graftwork.engine.kernels.variants import SHAPES, row_variants

    return list(compile_all(row_variants(SHAPES[:num_models]), capabilities))


def check(compiled: list[Any], capabilities: set[int]) -> None:
    assert {(built.variant.kernel.__name__, built.capability) for built in compiled} == {
        (name, capability) for name in NAMES for capability in capabilities
    }
    for built in compiled:
        name = f"{built.variant.kernel.__name__} {built.variant.name} sm_{built.capability}"
        assert_fits(built)
        assert built.registers <= 80, name  # so that three programs of 8 warps share a multiprocessor
        assert built.shared_bytes <= 1024, name
        assert not re.search(r"\b(?:atom|red)\.", built.ptx), name
        assert not re.search(r"ld\.local|st\.local", built.ptx), name


@pytest.mark.slow
def test_all_row_kernels_build_and_fit() -> None:
    """For every model shape the row kernels compile for Ampere, Hopper and Blackwell, without spills or atomics."""
    check(compiled_row_kernels((80, 90, 100), 100), {80, 90, 100})


def test_the_row_kernels_of_a_model_build_and_fit() -> None:
    """For Llama-3.1-8B the row kernels compile for Hopper without spills or atomics, and load 16 bytes at a time."""
    compiled = compiled_row_kernels((90,), 1)

    check(compiled, {90})
    for built in compiled:
        if built.variant.kernel.__name__ not in ("step_angles_kernel", "take_tokens_kernel"):
            assert re.search(r"ld\.global[.\w]*\.v4\.b32|ld\.global[.\w]*\.v2\.b64", built.ptx), built.variant.name


def test_the_rotation_is_not_contracted() -> None:
    """Products and sums of the rotation are rounded one by one, as torch rounds them: the kernel has no fused
    multiply-add of fp32."""
    rotations = [built for built in compiled_row_kernels((90,), 1) if "rotate" in built.variant.kernel.__name__]

    assert len(rotations) == 2  # for numbers of 32 and of 64 bits
    for rotation in rotations:
        assert not re.search(r"fma\.rn[.\w]*\.f32", rotation.ptx)
        assert rotation.variant.options["enable_fp_fusion"] is False  # so ptxas fuses nothing either
