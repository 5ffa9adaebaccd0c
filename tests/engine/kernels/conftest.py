"""The Triton kernels, run by Triton's interpreter on CPU tensors."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

INTERPRETED_NAME = "interpreted_lora_matmul"


@pytest.fixture(scope="session")
def lora_matmul() -> ModuleType:
    """A copy of engine/kernels/lora_matmul whose kernels are interpreted.

    Whether a kernel is compiled or interpreted is settled when its module is loaded. Only this copy is loaded under
    TRITON_INTERPRET, after triton itself, so that compiled kernels still work in the same process.
    """
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    spec = importlib.util.find_spec("graftwork.engine.kernels.lora_matmul")
    assert spec is not None
    assert spec.origin is not None
    copy_spec = importlib.util.spec_from_file_location(INTERPRETED_NAME, spec.origin)
    assert copy_spec is not None
    assert copy_spec.loader is not None
    module = importlib.util.module_from_spec(copy_spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setitem(sys.modules, INTERPRETED_NAME, module)
        copy_spec.loader.exec_module(module)
    return module


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)
