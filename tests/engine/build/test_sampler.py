"""Tests of the choice of the sampler."""

import logging

import pytest
import torch

from graftwork.engine.build.kernels import build_sampler
from graftwork.engine.sampling.torch_sampler import TorchSampler
from graftwork.platform.errors import InvalidRequest

NO_GPU = torch.device("cuda", 99)


def test_torch_samples_on_a_gpu_if_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """With kernels torch the kernels are not tried, and the log has no warning."""
    with caplog.at_level(logging.WARNING):
        assert isinstance(build_sampler(97, 4, NO_GPU, "torch"), TorchSampler)
    assert not caplog.records


def test_kernels_that_do_not_work_are_replaced_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Where the kernels fail their trial, `auto` takes torch with a warning, and `triton` is refused with the reason."""
    with caplog.at_level(logging.WARNING):
        assert isinstance(build_sampler(97, 4, NO_GPU), TorchSampler)
    assert [record.message for record in caplog.records] == ["sampler_kernels_unavailable"]

    with pytest.raises(InvalidRequest, match="kernels auto or torch") as refusal:
        build_sampler(97, 4, NO_GPU, "triton")
    assert refusal.value.param == "kernels"
