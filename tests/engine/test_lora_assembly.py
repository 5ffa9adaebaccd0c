"""How an engine comes to apply adapters the way it does."""

import pytest
import torch

from graftwork.engine.config import EngineConfig
from graftwork.engine.lora_assembly import build_lora
from graftwork.engine.lora_backend import LoraBackend, TorchLora
from graftwork.engine.model_config import read_model_config
from graftwork.platform.errors import InvalidRequest
from tests.engine.conftest import Lab


def build(lab: Lab, kernels: str) -> LoraBackend:
    config = EngineConfig(lab.base, lora_kernels=kernels)
    return build_lora(config, read_model_config(lab.base), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_cpu_is_served_by_torch(lab: Lab, kernels: str) -> None:
    """Triton is not even looked for."""
    assert isinstance(build(lab, kernels), TorchLora)


def test_kernels_that_are_asked_for_by_name_and_cannot_work_are_refused(lab: Lab) -> None:
    """On a CPU there is nothing to launch them on; the message names the setting and the way out."""
    with pytest.raises(InvalidRequest, match="lora_kernels torch") as refusal:
        build(lab, "triton")

    assert refusal.value.param == "lora_kernels"


def test_a_name_that_nobody_knows_is_refused(lab: Lab) -> None:
    """With the names that are known."""
    with pytest.raises(InvalidRequest, match="auto, triton, torch"):
        build(lab, "cuda")
