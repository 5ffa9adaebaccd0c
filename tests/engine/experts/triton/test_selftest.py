"""The self-test that the kernels of routed layers pass before an engine uses them, and what follows if they do not."""

import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from graftwork.engine.experts.expert_loop import ExpertLoop
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import DenseWeights, RoutedWeights
from graftwork.engine.quantization.linear import QuantizedLinear, StepKinds
from graftwork.engine.quantization.rounding import rounded
from graftwork.engine.quantization.scheme import Method, Scheme
from graftwork.engine.quantization.weight import WHOLE_ROW, Codes
from graftwork.engine.runner.choose_experts import choose_experts
from graftwork.platform.errors import InvalidRequest
from tests.engine.quantization.test_products import random_weight

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
CPU = torch.device("cpu")
FP32 = torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_that_compute_pass(interpreted: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """The kernels pass the self-test in every served dtype."""
    assert interpreted["selftest"].why_expert_kernels_fail(CPU, dtype) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "group", "sort"),
    [
        (Codes.FLOAT4, 32, False),
        (Codes.INT4, 128, False),
        (Codes.INT4, 32, True),
        (Codes.INT8, WHOLE_ROW, False),
        (Codes.FLOAT8, 128, False),
    ],
)
def test_kernels_that_read_codes_pass(
    interpreted: dict[str, ModuleType], kind: Codes, group: int, sort: bool, dtype: torch.dtype
) -> None:
    """The kernels pass the self-test for each kind of codes, with zero points and sorted columns, in every served dtype."""
    form = random_weight(kind, 4, 256, group, sort=sort)

    assert interpreted["selftest"].why_code_experts_fail(form, CPU, dtype) is None


def test_kernels_that_round_rows_pass(interpreted: dict[str, ModuleType]) -> None:
    """The kernels that multiply float8 with float8 pass the self-test too."""
    form = random_weight(Codes.FLOAT8, 4, 256, 128)

    assert interpreted["selftest"].why_code_experts_fail(form, CPU, torch.bfloat16, rounds_rows=True) is None


@pytest.mark.parametrize("kernel", ["multiply_code_tiles_kernel", "sort_features_kernel"])
def test_kernels_that_read_codes_wrongly_are_found_out(
    interpreted: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """The self-test reports products that are wrong, and columns that are not sorted."""
    launch, broken = interpreted["code_launch"].Launch, getattr(interpreted["code_kernels"], kernel)
    run = launch.run

    def skip(one: Any) -> None:
        if one.kernel is broken:
            one.arguments["y"].copy_(one.arguments["x"]) if "orders" in one.arguments else one.arguments["y"].zero_()
        else:
            run(one)

    monkeypatch.setattr(launch, "run", skip)

    failure = interpreted["selftest"].why_code_experts_fail(random_weight(Codes.INT4, 4, 256, 32, sort=True), CPU, FP32)

    assert failure is not None
    assert "products of int4 differ from plain torch" in failure


def test_kernels_that_compute_something_else_are_found_out(
    interpreted: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test reports products that are not written."""
    launch = interpreted["launch"].Launch
    run, kernel = launch.run, interpreted["kernels"].multiply_tiles_kernel
    monkeypatch.setattr(launch, "run", lambda one: one.arguments["y"].zero_() if one.kernel is kernel else run(one))

    failure = interpreted["selftest"].why_expert_kernels_fail(CPU, FP32)

    assert failure is not None
    assert "for 7 tokens" in failure


def routed(*, is_quantized: bool) -> RoutedWeights:
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    quantised = QuantizedLinear([rounded(weight, Scheme(Method.ROUND_INT8, 8, None))], None, FP32, StepKinds())
    linear = quantised if is_quantized else Linear(weight)
    return RoutedWeights(Linear(weight), None, (DenseWeights(linear, linear),), None)


@pytest.mark.parametrize(
    ("is_quantized", "reason"), [(True, "the kernels of quantised weights are not in use"), (False, "Error: ")]
)
def test_kernels_that_do_not_work_are_refused_or_replaced(
    is_quantized: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a GPU, and with codes that no kernel reads, `triton` is refused with the reason and `auto` takes the loop."""
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


def test_codes_that_kernels_read_are_tried_form_by_form(
    interpreted: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts with codes are tried once for each form that they have, plain ones as before; one failure leaves all to the
    loop."""
    for name in ("products", "selftest", "backend"):
        monkeypatch.setitem(sys.modules, f"graftwork.engine.experts.triton.{name}", interpreted[name])
    selftest, tried = interpreted["selftest"], list[Any]()

    def linear(kind: Codes, group: int) -> QuantizedLinear:
        made = QuantizedLinear([random_weight(kind, 32, 64, group)], None, FP32, StepKinds())
        made.take_kernels(interpreted["codes"].CodeProducts)
        return made

    layers = [
        RoutedWeights(Linear(torch.ones(16, 64)), None, (DenseWeights(linear(kind, group), linear(kind, group)),), None)
        for kind, group in ((Codes.INT4, 32), (Codes.INT4, 32), (Codes.FLOAT4, 32))
    ]
    layers.append(
        RoutedWeights(Linear(torch.ones(16, 64)), None, (DenseWeights(*[Linear(torch.ones(32, 64))] * 2),), None)
    )
    monkeypatch.setattr(selftest, "why_code_experts_fail", lambda form, *_, **__: tried.append(form.kind))
    monkeypatch.setattr(selftest, "why_expert_kernels_fail", lambda *_: tried.append("plain"))

    assert choose_experts("triton", layers, CPU, FP32) is interpreted["backend"].TritonExperts
    assert tried == ["plain", Codes.INT4, Codes.FLOAT4]
    monkeypatch.setattr(selftest, "why_code_experts_fail", lambda form, *_, **__: f"{form.kind.value} is wrong")
    with pytest.raises(InvalidRequest, match="int4 is wrong"):
        choose_experts("triton", layers, CPU, FP32)
