"""The self-test that the kernels of routed layers pass before an engine uses them, and what follows if they do not."""

import logging
from types import ModuleType

import pytest
import torch

from graftwork.engine.experts.expert_loop import ExpertLoop
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import DenseWeights, RoutedWeights
from graftwork.engine.quantization.linear import QuantizedLinear, StepKinds
from graftwork.engine.quantization.rounding import rounded
from graftwork.engine.quantization.scheme import Method, Scheme
from graftwork.engine.runner.choose_experts import choose_experts
from graftwork.platform.errors import InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
CPU = torch.device("cpu")
FP32 = torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_that_compute_pass(interpreted: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """The kernels pass the self-test in every served dtype."""
    assert interpreted["selftest"].why_expert_kernels_fail(CPU, dtype) is None


def test_kernels_that_compute_something_else_are_found_out(
    interpreted: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test reports products that are not written."""
    launch = interpreted["launch"].Launch
    run, kernel = launch.run, interpreted["kernels"].multiply_tiles_kernel
    monkeypatch.setattr(launch, "run", lambda one: None if one.kernel is kernel else run(one))

    failure = interpreted["selftest"].why_expert_kernels_fail(CPU, FP32)

    assert failure is not None
    assert "for 7 tokens" in failure


def routed(*, is_quantized: bool) -> RoutedWeights:
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    quantised = QuantizedLinear([rounded(weight, Scheme(Method.ROUND_INT8, 8, None))], None, FP32, StepKinds())
    linear = quantised if is_quantized else Linear(weight)
    return RoutedWeights(Linear(weight), None, (DenseWeights(linear, linear),), None)


@pytest.mark.parametrize(("is_quantized", "reason"), [(True, "quantised weights"), (False, "Error: ")])
def test_kernels_that_do_not_work_are_refused_or_replaced(
    is_quantized: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a GPU, and with quantised experts, `triton` is refused with the reason and `auto` takes the loop."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    layers = [routed(is_quantized=is_quantized)]

    with pytest.raises(InvalidRequest, match=reason):
        choose_experts("triton", layers, CPU, FP32)
    with pytest.raises(InvalidRequest, match="kernels 'native' of experts is not known"):
        choose_experts("native", layers, CPU, FP32)
    with caplog.at_level(logging.WARNING):
        assert choose_experts("auto", layers, CPU, FP32) is ExpertLoop
        assert not caplog.records
        assert choose_experts("auto", layers, torch.device("cuda"), FP32) is ExpertLoop
    assert [record.message for record in caplog.records] == ["expert_kernels_unavailable"]
