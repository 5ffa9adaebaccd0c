"""The dispatch gate of models whose weights, experts or KV are codes: what their steps ask of a GPU (see test_dispatch_gate.py)."""

from dataclasses import replace

import pytest

from graftwork.engine.core.expert_shapes import ExpertShapes
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.experts import ClampedSwiGlu, ExpertsConfig, RouterScore, RouterSpec

pytest.importorskip("triton", reason="the kernels extra is not installed")

from graftwork.engine.quantization.scheme import Method, Quantization, Scheme
from tests.engine.runner.device_gate import StepCounts, counted
from tests.engine.runner.gated_step import step
from tests.engine.runner.llama_step import DTYPE, LLAMA, LlamaRunner, adapter, mixed_plan, plain_specs

ROWS = 32


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_a_quantised_model_launches_products_of_codes(is_symmetric: bool) -> None:
    """A step on int4 weights reads their codes by one kernel for each layer, one that adds spans where few programs have the
    whole layer, and one that sums x for zero points. It waits for nothing, and a graph of it allocates nothing."""
    scheme = Scheme(Method.AWQ, 4, 128, is_symmetric=is_symmetric)
    model = replace(LLAMA, num_layers=2, ropes=LLAMA.ropes[:2], windows=LLAMA.windows[:2])
    model = replace(model, quantization=Quantization(scheme, ("lm_head",)))
    made = LlamaRunner([adapter(str(number), 16, model, DTYPE) for number in range(16)], model)

    eager = step(made, plain_specs(ROWS))
    made.forward.graphs = made.graphs
    replayed = step(made, plain_specs(ROWS))
    assert made.recorder.work is not None
    with counted(made.pinned) as captured:
        made.recorder.work()
    made.masks.close()

    assert eager.faults == replayed.faults == captured.faults == []
    assert eager.operations == {"aten::linear": 1, "aten::embedding": 1, "aten::add": 1}
    for counts in (eager, captured):
        products = {name: counts.kernels[f"{name}_kernel"] for name in ("multiply_codes", "add_spans", "sum_parts")}
        assert products == {"multiply_codes": 8, "add_spans": 6, "sum_parts": 0 if is_symmetric else 8}
    assert (eager.copies_in, eager.copies_out) == (replayed.copies_in, replayed.copies_out) == (1, 1)
    assert (replayed.operations.total(), replayed.allocations) == (0, 0)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_kv_in_bytes_launches_what_plain_kv_does(kv_dtype: str) -> None:
    """Steps over KV in bytes, with a prompt and without, launch the kernels of plain KV and wait for nothing; a graph of them
    allocates nothing, and only the kernels that read or write pages are other variants."""
    model = replace(LLAMA, num_layers=2, ropes=LLAMA.ropes[:2], windows=LLAMA.windows[:2])
    adapters = [adapter(str(number), 16, model, DTYPE) for number in range(16)]
    plain, coded = (LlamaRunner(adapters, model, kv_dtype=name) for name in ("auto", kv_dtype))
    found: dict[LlamaRunner, list[StepCounts]] = {}

    for made in (plain, coded):
        with counted(made.pinned) as mixed:
            made.runner.launch(mixed_plan(plain_specs(ROWS), 40)).sample()
        found[made] = [step(made, plain_specs(ROWS)), mixed]
        made.forward.graphs = made.graphs
        replayed = step(made, plain_specs(ROWS))
        assert (replayed.faults, replayed.operations.total(), replayed.allocations) == ([], 0, 0)
        assert (replayed.copies_in, replayed.copies_out) == (1, 1)
        assert made.recorder.work is not None
        with counted(made.pinned) as captured:
            made.recorder.work()
        found[made].append(captured)
        made.masks.close()

    for expected, counts in zip(found[plain], found[coded], strict=True):
        assert counts.faults == []
        assert (counts.kernels, counts.operations) == (expected.kernels, expected.operations)
        assert (counts.copies_in, counts.copies_out) == (expected.copies_in, expected.copies_out)
        assert counts.variants != expected.variants


def routed_model(*, is_mxfp4: bool) -> ModelConfig:
    """Two layers of gpt-oss-20b, whose experts are codes: MXFP4, or int4 with zero points as AWQ has them."""
    shapes = ExpertShapes(num_experts=32, hidden_size=2880, intermediate_size=2880, layers=(0, 1))
    router = RouterSpec(RouterScore.SOFTMAX_OF_CHOSEN, num_chosen=4)
    experts = ExpertsConfig(shapes, router, has_biases=True, clamped=ClampedSwiGlu(1.702, 7.0), is_mxfp4=is_mxfp4)
    quantization = Quantization(Scheme(Method.AWQ, 4, 128, is_symmetric=False), ("self_attn", "lm_head"))
    return replace(
        LLAMA,
        num_layers=2,
        hidden_size=2880,
        num_heads=64,
        head_dim=64,
        ropes=LLAMA.ropes[:2],
        windows=LLAMA.windows[:2],
        experts=experts,
        quantization=None if is_mxfp4 else quantization,
    )


@pytest.mark.parametrize("is_mxfp4", [True, False])
def test_a_step_with_experts_of_codes_waits_for_no_router(is_mxfp4: bool) -> None:
    """Whatever its router chooses, a layer with experts of codes launches two kernels that arrange rows and one for each of two
    products, and with zero points one more that sums x for each. The host waits for nothing, reads no choice, and a graph of
    the step allocates nothing."""
    model = routed_model(is_mxfp4=is_mxfp4)
    made = LlamaRunner([adapter(str(number), 16, model, DTYPE) for number in range(16)], model)

    eager = step(made, plain_specs(ROWS))
    made.forward.graphs = made.graphs
    replayed = step(made, plain_specs(ROWS))
    assert made.recorder.work is not None
    with counted(made.pinned) as captured:
        made.recorder.work()
    made.masks.close()

    layers = 2
    assert eager.faults == replayed.faults == captured.faults == []
    for counts in (eager, captured):
        experts = {
            name: counts.kernels[f"{name}_kernel"] for name in ("count_rows", "arrange_rows", "multiply_code_tiles")
        }
        assert experts == {"count_rows": layers, "arrange_rows": layers, "multiply_code_tiles": 2 * layers}
        assert counts.kernels["multiply_tiles_kernel"] == 0
        assert counts.num_launches <= layers * 90
    assert (eager.copies_in, eager.copies_out) == (replayed.copies_in, replayed.copies_out) == (1, 1)
    assert (replayed.operations.total(), replayed.allocations) == (0, 0)
