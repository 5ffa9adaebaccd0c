"""Tests of the choice of the LoRA backend."""

import logging
import sys

import pytest
import torch

from graftwork.engine.build.lora import build_lora
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.lora import cpu_backend as native_lora
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.cpu_backend import CpuLora
from graftwork.engine.lora.torch_backend import TorchLora
from graftwork.engine.model.config import read_model_config
from graftwork.platform.errors import InvalidRequest
from tests.engine.conftest import RandomModels


def build(models: RandomModels, kernels: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LoraBackend:
    config = EngineConfig(models.base, lora_kernels=kernels)
    return build_lora(config, read_model_config(models.base), torch.device(device), dtype)


@pytest.mark.parametrize("kernels", ["auto", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_is_served_by_its_own_kernel(models: RandomModels, kernels: str, dtype: torch.dtype) -> None:
    """On a CPU the CPU kernels are used unless torch is asked for; Triton is not imported."""
    assert isinstance(build(models, kernels, dtype), CpuLora)
    assert isinstance(build(models, "torch", dtype), TorchLora)


def refuse(*arguments: object) -> None:
    raise OSError("no memory may be written and executed")


@pytest.mark.parametrize("obstacle", ["numba is not installed", "OSError: no memory may be written", "torch.float16"])
def test_where_the_kernel_does_not_work_torch_serves_and_the_log_says_why(
    models: RandomModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    """Without numba, if it cannot compile, or in an unsupported dtype, torch is used; kernels asked for by name are
    refused."""
    dtype = torch.float16 if obstacle == "torch.float16" else torch.float32
    if "numba" in obstacle:
        monkeypatch.setitem(sys.modules, "numba", None)
    if "OSError" in obstacle:
        monkeypatch.setattr(native_lora, "add_to_rows", refuse)

    with caplog.at_level(logging.WARNING):
        assert isinstance(build(models, "auto", dtype), TorchLora)
    with pytest.raises(InvalidRequest, match="kernels auto or torch") as refusal:
        build(models, "native", dtype)

    (record,) = caplog.records
    assert record.message == "lora_kernels_unavailable"
    assert obstacle in record.__dict__["reason"]
    assert "decoding" in record.__dict__["loss"]
    assert obstacle in refusal.value.message


@pytest.mark.parametrize(("kernels", "device"), [("triton", "cpu"), ("native", "cuda")])
def test_kernels_that_are_asked_for_by_name_and_cannot_work_are_refused(
    models: RandomModels, kernels: str, device: str
) -> None:
    """Kernels of another device are refused; the message names the setting and what to choose."""
    with pytest.raises(InvalidRequest, match="kernels auto or torch") as refusal:
        build(models, kernels, device=device)

    assert refusal.value.param == "kernels"


def test_an_unknown_name_is_refused(models: RandomModels) -> None:
    """An unknown name is refused, and the message lists the known names."""
    with pytest.raises(InvalidRequest, match="auto, native, triton, torch"):
        build(models, "cuda")
