"""Fixtures that run the attention kernels by Triton's interpreter on CPU tensors."""

import sys
from types import ModuleType

import pytest

from tests.engine.kernels.interpreted import interpreted_copies

PACKAGE = "graftwork.engine.attention"
WITH_KERNELS = (
    *("online_softmax", "paged_kernels", "rolling_kernels", "launch", "reference", "triton_attention", "selftest"),
)


@pytest.fixture(scope="session")
def interpreted() -> dict[str, ModuleType]:
    """Copies of the modules that hold or launch kernels, by name, with the kernels interpreted."""
    shared = [f"graftwork.engine.kernels.{name}" for name in ("blocks", "angles")]
    copies = interpreted_copies([*shared, *(f"{PACKAGE}.{name}" for name in WITH_KERNELS)])
    return {name.rpartition(".")[2]: copy for name, copy in copies.items()}


@pytest.fixture
def engine_interprets(interpreted: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built in the test get the interpreted copies when they ask for the kernels."""
    for name in ("selftest", "triton_attention"):
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", interpreted[name])
