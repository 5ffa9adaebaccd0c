"""Tests of the choice of the row operations."""

import logging

import pytest
import torch

from graftwork.engine.build.kernels import choose_row_ops
from graftwork.engine.runner.row_ops import TorchRowOps
from graftwork.platform.errors import InvalidRequest
from tests.engine.runner.row_sides import MODEL

CPU = torch.device("cpu")


@pytest.mark.parametrize("row_kernels", ["auto", "torch"])
def test_a_cpu_is_served_by_torch(row_kernels: str) -> None:
    """On a CPU torch computes the row operations, unless the kernels are asked for by name."""
    assert choose_row_ops(row_kernels, MODEL, CPU, torch.float32) is TorchRowOps


def test_kernels_that_cannot_work_are_refused() -> None:
    """Kernels that are asked for by name and fail their trial are refused; the message says why and what to choose."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    with pytest.raises(InvalidRequest, match=r"do not work on cpu \(\w+: .+kernels auto or torch") as refusal:
        choose_row_ops("triton", MODEL, CPU, torch.float32)

    assert refusal.value.param == "kernels"


def test_where_the_kernels_do_not_work_torch_serves_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """On a CUDA device whose kernels fail their trial, as on one that is not there, torch is used."""
    with caplog.at_level(logging.WARNING):
        chosen = choose_row_ops("auto", MODEL, torch.device("cuda", 99), torch.bfloat16)

    assert chosen is TorchRowOps
    (record,) = caplog.records
    assert record.message == "row_kernels_unavailable"
    assert record.__dict__["reason"]
    assert "launches" in record.__dict__["loss"]


def test_an_unknown_name_is_refused() -> None:
    """An unknown name is refused, and the message lists the known names."""
    with pytest.raises(InvalidRequest, match="auto, triton, torch"):
        choose_row_ops("native", MODEL, CPU, torch.float32)
