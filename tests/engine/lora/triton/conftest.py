"""Fixtures that run the Triton kernels by Triton's interpreter on CPU tensors."""

import importlib
import sys
from types import ModuleType

import pytest
import torch

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
    """Copies of the modules that hold or launch kernels, by name, with the kernels interpreted.

    Whether a kernel is compiled or interpreted is settled when its module is loaded. Only these copies are loaded under
    TRITON_INTERPRET, after triton itself, so that compiled kernels still work in the same process.
    """
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    package = importlib.import_module(PACKAGE)
    names = [f"{PACKAGE}.{name}" for name in WITH_KERNELS]
    compiled = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    attributes = {name: vars(package).pop(name) for name in WITH_KERNELS if name in vars(package)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            return {name: importlib.import_module(f"{PACKAGE}.{name}") for name in WITH_KERNELS}
    finally:
        for name in WITH_KERNELS:
            sys.modules.pop(f"{PACKAGE}.{name}", None)
            vars(package).pop(name, None)
        sys.modules.update(compiled)
        vars(package).update(attributes)


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
