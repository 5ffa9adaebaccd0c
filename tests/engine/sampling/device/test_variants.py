"""Tests of the compiled sampling kernels on a machine without a GPU."""

import re
from typing import Any

import pytest

from tests.engine.kernels.compiled import assert_fits

MOST_REGISTERS = {"edit_kernel": 160, "weigh_kernel": 160, "gather_kernel": 128, "choose_kernel": 128}
"""Of a thread. An SM has 65,536: 3 programs of edit or weigh, 4 of gather, 1 of choose, which has 512 threads."""


def compiled(capabilities: tuple[int, ...], *, all_dtypes: bool) -> list[Any]:
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.kernels.compile_ahead import compile_variant
    from graftwork.engine.sampling.device.variants import sampler_variants

    variants = [variant for variant in sampler_variants() if all_dtypes or variant.name == "128256 bfloat16"]
    return [compile_variant(variant, capability) for variant in variants for capability in capabilities]


def assert_all_fit(built: list[Any]) -> None:
    """Assert that the kernels spill nothing, use little shared memory and few registers, and have no atomics."""
    assert {one.variant.kernel.__name__ for one in built} == MOST_REGISTERS.keys()
    for one in built:
        assert_fits(one, spilled_bytes=0)
        assert one.shared_bytes <= 48 * 1024
        assert one.registers <= MOST_REGISTERS[one.variant.kernel.__name__], (one.variant.name, one.capability)
        assert not re.search(r"\b(?:atom|red)\.", one.ptx)


def test_the_kernels_fit_hopper() -> None:
    """At a vocabulary of 128,256 in bf16, the four kernels compile for Hopper without spills or atomics, and edit reads
    its logits in wide loads."""
    built = compiled((90,), all_dtypes=False)

    assert_all_fit(built)
    assert re.search(r"ld\.global[.\w]*\.v4\.b32", built[0].ptx)


@pytest.mark.slow
def test_every_variant_fits_every_architecture() -> None:
    """All variants compile for Ampere, Hopper and Blackwell without spills or atomics."""
    built = compiled((80, 90, 100), all_dtypes=True)

    assert len(built) == 3 * 12
    assert_all_fit(built)
