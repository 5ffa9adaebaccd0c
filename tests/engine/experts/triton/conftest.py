"""Fixtures that run the kernels of routed layers by Triton's interpreter on CPU tensors."""

from types import ModuleType

import pytest

from tests.engine.kernels.interpreted import interpreted_copies

PACKAGE = "graftwork.engine.experts.triton"
WITH_KERNELS = ("kernels", "launch", "code_kernels", "code_launch", "float8_launch", "products", "backend", "selftest")
CODES = "graftwork.engine.quantization.triton"
OF_CODES = ("kernels", "launch", "float8_kernels", "float8_launch", "products", "selftest")


@pytest.fixture(scope="session")
def interpreted() -> dict[str, ModuleType]:
    """Copies of the modules that hold or launch kernels, by name, with the kernels interpreted."""
    of_codes = [f"{CODES}.{name}" for name in OF_CODES]
    names = [
        "graftwork.engine.kernels.blocks",
        "graftwork.engine.kernels.codes",
        *of_codes,
        *(f"{PACKAGE}.{name}" for name in WITH_KERNELS),
    ]
    copies = interpreted_copies(names)
    return {name: copies[f"{PACKAGE}.{name}"] for name in WITH_KERNELS} | {"codes": copies[f"{CODES}.products"]}
