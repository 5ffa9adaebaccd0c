"""Tests of the choice of the attention backend."""

import importlib.util
import logging

import pytest
import torch

from graftwork.engine.attention.rolling_attention import RollingAttention
from graftwork.engine.attention.torch_attention import TorchAttention
from graftwork.engine.build.kernels import build_attention
from graftwork.engine.build.kv import KvStorage, allocate_kv_storage, frame_sizer
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.platform.errors import InvalidRequest
from tests.engine.conftest import RandomModels

CPU = torch.device("cpu")


def parts(models: RandomModels, backend: str) -> tuple[EngineConfig, ModelConfig, KvStorage, torch.dtype]:
    config = EngineConfig(models.base, attention_backend=backend, device_bytes=4 * 2**20, host_kv_bytes=0)
    model = read_model_config(models.base)
    dtype = torch.float32
    sizes = frame_sizer(config, model, dtype).given(4 * 2**20)
    return config, model, allocate_kv_storage(config, model, sizes, "fingerprint", CPU, dtype), dtype


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_cpu_is_served_by_torch(models: RandomModels, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """On a CPU, torch computes attention unless Triton is asked for, and the log has no warning."""
    with caplog.at_level(logging.WARNING):
        found = build_attention(*parts(models, backend))
        assert isinstance(found, RollingAttention)
        assert isinstance(found.others, TorchAttention)
    assert not caplog.records


def test_kernels_that_do_not_work_are_refused(models: RandomModels) -> None:
    """Triton kernels asked for by name on a CPU are refused, with the reason and what to do."""
    expected = "" if importlib.util.find_spec("triton") else "is not installed"

    with pytest.raises(InvalidRequest, match="kernels auto or torch") as refusal:
        build_attention(*parts(models, "triton"))

    assert refusal.value.param == "kernels"
    assert expected in refusal.value.message


def test_an_unknown_backend_is_refused(models: RandomModels) -> None:
    """A name that is no backend is refused with the names that are."""
    with pytest.raises(InvalidRequest, match="auto, triton, torch"):
        build_attention(*parts(models, "flash"))
