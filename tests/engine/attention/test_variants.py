"""Tests of the compiled attention kernels on a machine without a GPU."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.kernels.compiled import assert_fits

pytest.importorskip("triton", reason="the kernels extra is not installed")

MATRIX_INSTRUCTIONS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


def compiled_for(number: int, capability: int, **changes: Any) -> list[Any]:
    """The three kernels of one of SHAPES on one architecture: splits, merge, tiles."""
    from graftwork.engine.attention.variants import SHAPES, launches_for
    from graftwork.engine.kernels.compile_ahead import compile_variant, variant_of

    named = SHAPES[number]
    named = replace(named, shape=replace(named.shape, **changes))
    return [compile_variant(variant_of(named.name, launch), capability) for launch in launches_for(named)]


def rolling_for(number: int, capability: int) -> list[Any]:
    """The kernels of rows with a rolling window: splits, tiles, and the angles if the shape rotates."""
    from graftwork.engine.attention.variants import SHAPES, rolling_launches_for
    from graftwork.engine.kernels.compile_ahead import compile_variant, variant_of

    named = SHAPES[number]
    return [compile_variant(variant_of(named.name, launch), capability) for launch in rolling_launches_for(named)]


def assert_rolling_sound(built: list[Any], *, spilled_bytes: int = 0) -> None:
    """Decoding and angles spill nothing, decoding leaves room for two programs a multiprocessor, and there are no atomics."""
    splits, tiles, *angles = built
    assert_fits(splits)
    assert_fits(tiles, spilled_bytes=spilled_bytes)
    assert splits.shared_bytes <= 80 * 1024
    for one in angles:
        assert_fits(one)
        assert one.registers <= 64
    for one in built:
        assert not re.findall(r"\b(?:atom|red)\.", one.ptx), one.variant.name


def assert_sound(built: list[Any], *, spilled_bytes: int = 0) -> None:
    """Decoding spills nothing, leaves room for two programs a multiprocessor, and there are no atomics."""
    splits, merge, tiles = built
    assert_fits(splits)
    assert_fits(merge)
    assert_fits(tiles, spilled_bytes=spilled_bytes)
    assert splits.shared_bytes <= 80 * 1024
    assert splits.registers <= 255
    assert merge.registers <= 64
    for one in built:
        assert not re.findall(r"\b(?:atom|red)\.", one.ptx), one.variant.name


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_of_a_common_model_build_and_fit(capability: int) -> None:
    """For Llama-3.1-8B's sizes, decoding copies pages asynchronously, prefill uses the newest matrix instructions, and
    neither spills (on Ampere, prefill spills a few registers)."""
    built = compiled_for(0, capability)
    splits, _, tiles = built

    assert_sound(built, spilled_bytes=64 if capability == 80 else 0)
    assert "mma.sync" in splits.ptx
    assert MATRIX_INSTRUCTIONS[capability] in tiles.ptx
    for one in (splits, tiles):
        assert len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*0x10", one.ptx)) >= 8, one.variant.name


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_of_rolling_windows_build_and_fit(capability: int) -> None:
    """For Llama-3.1-8B's sizes, decoding with a rolling window takes no more registers and shared memory than without, and
    neither it nor prefill spills (on Ampere, prefill spills a few registers)."""
    built = rolling_for(0, capability)
    plain = compiled_for(0, capability)[0]

    assert_rolling_sound(built, spilled_bytes=64 if capability == 80 else 0)
    splits, tiles, _ = built
    assert splits.registers <= 128
    assert splits.shared_bytes <= plain.shared_bytes
    assert "mma.sync" in splits.ptx
    assert MATRIX_INSTRUCTIONS[capability] in tiles.ptx
    for one in (splits, tiles):
        assert len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*0x10", one.ptx)) >= 8, one.variant.name


def every_shape(number: int, capability: int) -> int:
    """The number of a shape. Skips the test if the architecture does not convert its codes."""
    from graftwork.engine.attention.variants import SHAPES

    if capability < 89 and SHAPES[number].shape.kv_dtype == torch.float8_e4m3fn:
        pytest.skip("Ampere does not convert e4m3")
    return number


@pytest.mark.slow
@pytest.mark.parametrize("number", range(15))
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_variants_of_rolling_windows_build_and_fit(capability: int, number: int) -> None:
    """So do those of the other shapes, also of partly rotated heads, of neighbours, of layers that rotate nothing, and of codes
    with scales."""
    number = every_shape(number, capability)
    assert_rolling_sound(rolling_for(number, capability), spilled_bytes=320)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(15))
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_variants_build_and_fit(capability: int, number: int) -> None:
    """Every variant compiles for Ampere, Hopper and Blackwell; decoding never spills, prefill in fp32 most."""
    number = every_shape(number, capability)
    assert_sound(compiled_for(number, capability), spilled_bytes=320)


def test_every_shape_has_its_kernels() -> None:
    """The list of variants holds the kernels of each shape, with angles where it rotates, and the numbers of the slow test are
    all of them."""
    from graftwork.engine.attention.variants import SHAPES, attention_variants

    names = [(variant.name, variant.kernel.__name__) for variant in attention_variants()]

    kernels = [
        *("attend_splits_kernel", "merge_splits_kernel", "attend_tiles_kernel"),
        *("attend_rolling_splits_kernel", "attend_rolling_tiles_kernel", "step_angles_kernel"),
    ]
    expected = [(named.name, kernel) for named in SHAPES for kernel in kernels]
    assert names == [one for one in expected if one != ("32/32x80 fp16", "step_angles_kernel")]
    assert len(SHAPES) == 15
