"""Fixtures that run the Triton kernels by Triton's interpreter on CPU tensors."""

import sys
from types import ModuleType

import pytest
import torch

from tests.engine.kernels.interpreted import interpreted_copies

PACKAGE = "graftwork.engine.lora.triton"
WITH_KERNELS = (
    "expand_blocks",
    "row_kernels",
    "tile_kernels",
    "launch",
    "fused_lora",
    "selftest",
    "backend",
)


@pytest.fixture(scope="session")
def interpreted() -> dict[str, ModuleType]:
    """Copies of the modules that hold or launch kernels, by name, with the kernels interpreted."""
    copies = interpreted_copies(["graftwork.engine.kernels.blocks", *(f"{PACKAGE}.{name}" for name in WITH_KERNELS)])
    return {name: copies[f"{PACKAGE}.{name}"] for name in WITH_KERNELS}


@pytest.fixture
def lora_matmul(interpreted: dict[str, ModuleType]) -> ModuleType:
    return interpreted["launch"]


@pytest.fixture
def fused_lora(interpreted: dict[str, ModuleType]) -> ModuleType:
    return interpreted["fused_lora"]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)


@pytest.fixture
def engine_interprets(interpreted: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built in the test get the interpreted copies when they ask for the kernels."""
    for name in ("selftest", "backend"):
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", interpreted[name])
