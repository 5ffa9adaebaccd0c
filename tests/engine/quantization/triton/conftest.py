"""Fixtures that run the kernels of quantised weights by Triton's interpreter on CPU tensors."""

from types import ModuleType

import pytest

from tests.engine.kernels.interpreted import interpreted_copies

PACKAGE = "graftwork.engine.quantization.triton"
CODE_KERNEL = "tests.engine.quantization.triton.code_kernel"
WITH_KERNELS = ("kernels", "launch", "float8_kernels", "float8_launch", "products", "selftest")


@pytest.fixture(scope="session")
def interpreted() -> dict[str, ModuleType]:
    """Copies of the modules that hold or launch kernels, by name, with the kernels interpreted."""
    shared = [f"graftwork.engine.kernels.{name}" for name in ("blocks", "codes")]
    copies = interpreted_copies([*shared, CODE_KERNEL, *(f"{PACKAGE}.{name}" for name in WITH_KERNELS)])
    return {name.rpartition(".")[2]: module for name, module in copies.items()}
