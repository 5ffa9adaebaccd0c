"""Tests of the settings of the engine."""

from pathlib import Path

import pytest

from graftwork.engine.core.config import EngineConfig, KernelPart

PARTS: tuple[KernelPart, ...] = ("lora", "rows", "attention", "sampler")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("kernels", ["auto", "torch", "triton"])
def test_one_setting_chooses_the_kernels_of_all_parts(kernels: str, kv_dtype: str) -> None:
    """What `kernels` names computes every part, however KV is stored."""
    config = EngineConfig(Path("model"), kernels=kernels, kv_dtype=kv_dtype)

    assert [config.kernels_for(part) for part in PARTS] == [kernels] * 4


def test_only_adapters_have_a_native_kernel() -> None:
    """With `native`, torch computes all but adapters."""
    config = EngineConfig(Path("model"), kernels="native")

    assert [config.kernels_for(part) for part in PARTS] == ["native", "torch", "torch", "torch"]


def test_a_parts_own_setting_goes_before_kernels() -> None:
    """A setting of one part changes this part alone."""
    config = EngineConfig(Path("model"), kernels="torch", row_kernels="triton")

    assert [config.kernels_for(part) for part in PARTS] == ["torch", "triton", "torch", "torch"]
