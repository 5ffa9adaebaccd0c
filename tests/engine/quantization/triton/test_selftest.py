"""The self-test that the kernels of quantised weights pass before an engine uses them, and what follows if they do not."""

import logging
from pathlib import Path
from types import ModuleType

import pytest
import torch

from graftwork.engine.build.weights import choose_weight_kernels
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.weights import DecoderWeights
from graftwork.engine.quantization.linear import QuantizedLinear, StepKinds
from graftwork.engine.quantization.weight import WHOLE_ROW, Codes
from graftwork.platform.errors import InvalidRequest
from tests.engine.quantization.test_products import random_weight

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
CPU, FP32 = torch.device("cpu"), torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", Codes)
def test_kernels_that_compute_pass(interpreted: dict[str, ModuleType], kind: Codes, dtype: torch.dtype) -> None:
    """The kernels pass the self-test for every kind of codes, in every served dtype."""
    groups = {Codes.INT4: 128, Codes.FLOAT4: 32}
    form = random_weight(kind, 4, 256, groups.get(kind, WHOLE_ROW))

    assert interpreted["selftest"].why_weight_kernels_fail(form, CPU, dtype) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_float8_pass(interpreted: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """The kernels that round rows pass the self-test too."""
    form = random_weight(Codes.FLOAT8, 4, 256, 128)

    assert interpreted["selftest"].why_weight_kernels_fail(form, CPU, dtype, rounds_rows=True) is None


@pytest.mark.parametrize(("kernel", "result"), [("multiply_codes_kernel", "y"), ("sum_parts_kernel", "sums")])
def test_kernels_that_compute_something_else_are_found_out(
    interpreted: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, kernel: str, result: str
) -> None:
    """The self-test reports products that are wrong, or whose zero points are forgotten."""
    launch = interpreted["launch"].Launch
    run, broken = launch.run, getattr(interpreted["kernels"], kernel)

    def leave_zeros(one: object) -> None:
        if one.kernel is not broken:  # type: ignore[attr-defined]
            run(one)
        else:
            one.arguments[result].zero_()  # type: ignore[attr-defined]

    monkeypatch.setattr(launch, "run", leave_zeros)

    failure = interpreted["selftest"].why_weight_kernels_fail(random_weight(Codes.INT4, 4, 256, 128), CPU, FP32)

    assert failure is not None
    assert "differ from plain torch" in failure


def weights_of(linear: QuantizedLinear) -> DecoderWeights:
    return DecoderWeights(torch.ones(4, 64), (), (), torch.ones(64), linear)


def test_kernels_that_do_not_work_are_refused_or_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """Without a GPU `triton` is refused with the reason, and `auto` leaves a GPU's layers dense and says so."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    linear = QuantizedLinear([random_weight(Codes.INT8, 8, 64, WHOLE_ROW)], None, FP32, StepKinds())
    weights = weights_of(linear)

    def choose(kernels: str, device: str) -> None:
        config = EngineConfig(model=Path(), weight_kernels=kernels)
        choose_weight_kernels(config, weights, torch.device(device), FP32)

    with pytest.raises(InvalidRequest, match=r"quantised weights do not work on cpu \(.*Error: "):
        choose("triton", "cpu")
    with pytest.raises(InvalidRequest, match="kernels 'native' of weights is not known"):
        choose("native", "cpu")
    with caplog.at_level(logging.WARNING):
        for kernels, device in (("auto", "cpu"), ("torch", "cuda")):
            choose(kernels, device)
        assert not caplog.records
        choose("auto", "cuda")
    assert [record.message for record in caplog.records] == ["weight_kernels_unavailable"]
    assert not linear.has_kernels


def test_plain_weights_need_no_kernels() -> None:
    """A model without quantised layers is served whatever the setting says."""
    weights = weights_of(Linear(torch.ones(16, 64)))  # type: ignore[arg-type]

    choose_weight_kernels(EngineConfig(model=Path(), weight_kernels="triton"), weights, CPU, FP32)

    assert weights.quantized_linears == []
