"""Fixtures that run the row operations with interpreted Triton kernels."""

import sys
from types import ModuleType

import pytest
import torch

from graftwork.engine.model import batch_invariance
from graftwork.engine.model.batch_invariance import BatchInvariance
from tests.engine.kernels.interpreted import interpreted_copies
from tests.engine.runner import interpreted_engine as interpreted_modules

MODULES = (
    *(f"graftwork.engine.kernels.{name}" for name in ("blocks", "codes", "norm", "activation", "angles", "rotary")),
    "graftwork.engine.runner.triton_row_ops",
    "graftwork.engine.runner.row_selftest",
)


@pytest.fixture(scope="session")
def interpreted_rows() -> dict[str, ModuleType]:
    """Copies of the modules of TritonRowOps, by full name, with the kernels interpreted."""
    return interpreted_copies(MODULES)


@pytest.fixture
def engine_interprets_rows(interpreted_rows: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built in the test get the interpreted copies when they ask for the row kernels."""
    for name in MODULES[-2:]:
        monkeypatch.setitem(sys.modules, name, interpreted_rows[name])


@pytest.fixture(scope="session")
def interpreted_engine() -> dict[str, ModuleType]:
    """Copies of all modules that hold or launch kernels of the forward pass and the sampler, by full name."""
    return interpreted_copies(interpreted_modules.MODULES)


@pytest.fixture
def engine_interprets_all(interpreted_engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built in the test get the interpreted copies when they ask for any kernels."""
    for name in interpreted_modules.USED_BY_ENGINES:
        monkeypatch.setitem(sys.modules, name, interpreted_engine[name])


@pytest.fixture
def rules_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are padded as on a GPU, whatever this machine's processor needs: so the sizes of graphs are the same anywhere."""
    gpu = torch.device("cuda")
    rules = {dtype: BatchInvariance.of(dtype, gpu) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    monkeypatch.setattr(batch_invariance, "measured_rules", rules.__getitem__)
