"""Fixtures that run the sampling kernels by Triton's interpreter on CPU tensors."""

from types import ModuleType

import pytest

from tests.engine.kernels.interpreted import interpreted_copies

PACKAGE = "graftwork.engine.sampling.device"
WITH_KERNELS = (
    "number_math",
    "edit_kernel",
    "weigh_kernels",
    "choose_kernel",
    "launches",
    "device_sampler",
    "selftest",
)


@pytest.fixture(scope="session")
def interpreted() -> dict[str, ModuleType]:
    """Copies of the modules that hold or launch kernels, by name, with the kernels interpreted."""
    copies = interpreted_copies(["graftwork.engine.kernels.blocks", *(f"{PACKAGE}.{name}" for name in WITH_KERNELS)])
    return {name: copies[f"{PACKAGE}.{name}"] for name in WITH_KERNELS}
