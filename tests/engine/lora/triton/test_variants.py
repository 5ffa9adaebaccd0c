"""Tests of the compiled LoRA kernels on a machine without a GPU."""

import re
from typing import Any

import pytest

from tests.engine.kernels.compiled import assert_fits, run_python


@pytest.fixture(scope="module")
def compiled() -> list[tuple[Any, Any]]:
    """Pairs of a layer shape and a kernel compiled for it: all on one architecture, four shapes on the others."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.kernels.compile_ahead import compile_variant
    from graftwork.engine.lora.triton.variants import SHAPES

    wanted = [(90, shape) for shape in SHAPES] + [(other, shape) for other in (80, 100) for shape in SHAPES[:4]]
    return [(shape, compile_variant(variant, capability)) for capability, shape in wanted for variant in shape.variants]


def test_all_kernels_build_and_fit(compiled: list[tuple[Any, Any]]) -> None:
    """Each kernel compiles for Ampere, Hopper and Blackwell within the limits of each architecture, and none spills."""
    built_for = {(built.variant.kernel.__name__, built.capability) for _, built in compiled}
    kernels = {f"{step}_{way}_kernel" for step in ("shrink", "expand") for way in ("tiles", "rows")}
    assert built_for == {(kernel, target) for kernel in kernels for target in (80, 90, 100)}
    for _, built in compiled:
        assert_fits(built)


def test_one_matrix_instruction_serves_all_tiles(compiled: list[tuple[Any, Any]]) -> None:
    """Tiles of both sizes use mma.sync on every architecture, so a row's bits do not depend on its tile's size.
    Row-wise kernels and fp32 use none."""
    for shape, built in compiled:
        has_matrices = shape.dtype.itemsize == 2 and shape.tile_rows > 1
        instructions = {*re.findall(r"mma\.sync|wgmma|tcgen05\.mma", built.ptx)}
        assert instructions == ({"mma.sync"} if has_matrices else set()), built.variant.name


def test_loads_are_wide(compiled: list[tuple[Any, Any]]) -> None:
    """No load fetches a single 16-bit number, though the addresses are known only at run time."""
    for shape, built in compiled:
        assert not re.findall(r"ld\.global[.\w]*\.[bu]16", built.ptx), built.variant.name
        if shape.tile_rows == 1:
            assert re.findall(r"ld\.global[.\w]*\.v4\.b32", built.ptx), built.variant.name


def test_nothing_is_summed_atomically(compiled: list[tuple[Any, Any]]) -> None:
    """No kernel has an atomic addition, so the order of each sum is fixed."""
    assert [built.variant.name for _, built in compiled if re.search(r"\b(?:atom|red)\.", built.ptx)] == []


def test_triton_is_imported_with_the_kernels_only() -> None:
    """Metadata, tables, plans and the reference can be imported without triton."""
    script = (
        "import sys; from graftwork.engine.lora.triton import launch_plan, random_adapters, reference, "
        "slice_table, tiles; sys.exit('triton' in sys.modules)"
    )

    assert run_python("-c", script).returncode == 0
