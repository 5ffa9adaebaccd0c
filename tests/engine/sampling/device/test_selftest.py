"""The self-test of the sampling kernels, and the choice of an engine's sampler."""

from types import ModuleType

import pytest
import torch

from graftwork.engine.build.kernels import build_sampler
from graftwork.engine.sampling.torch_sampler import TorchSampler


def test_working_kernels_pass(interpreted: dict[str, ModuleType]) -> None:
    """The interpreted kernels have nothing wrong with them."""
    assert interpreted["selftest"].why_sampler_fails(torch.device("cpu")) is None


def test_a_device_that_cannot_sample_says_why(interpreted: dict[str, ModuleType]) -> None:
    """On a device that computes nothing, the self-test returns the reason, and raises nothing."""
    assert "meta" in (interpreted["selftest"].why_sampler_fails(torch.device("meta")) or "")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_device_without_kernels_gets_torch(device: str) -> None:
    """A device other than CUDA is served by the sampler in torch."""
    assert isinstance(build_sampler(100, 4, torch.device(device)), TorchSampler)
