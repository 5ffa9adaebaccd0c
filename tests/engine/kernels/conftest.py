"""Fixtures that run the row kernels by Triton's interpreter on CPU tensors."""

from types import ModuleType

import pytest
import torch

from tests.engine.kernels.interpreted import interpreted_copies

PACKAGE = "graftwork.engine.kernels"


@pytest.fixture(scope="session")
def interpreted() -> dict[str, ModuleType]:
    """Copies of the modules of the row kernels, by name, with the kernels interpreted."""
    names = ("blocks", "codes", "norm", "activation", "angles", "rotary")
    copies = interpreted_copies([f"{PACKAGE}.{name}" for name in names])
    return {name: copies[f"{PACKAGE}.{name}"] for name in names}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(31)
