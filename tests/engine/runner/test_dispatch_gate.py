"""The dispatch gate: what one decode step of Llama-3.1-8B's shape, with 32 rows and 16 adapters, asks of a GPU.

No GPU takes part (see device_gate.py). The bounds hold for every step after a request's first.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from graftwork.engine.core.expert_shapes import ExpertShapes
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.experts import ClampedSwiGlu, ExpertsConfig, RouterScore, RouterSpec

pytest.importorskip("triton", reason="the kernels extra is not installed")

from graftwork.engine.kv.transfer.plan import LayerGate, LoadFailed
from graftwork.engine.lora.triton.backend import StepOwners
from graftwork.engine.quantization.scheme import Method, Quantization, Scheme
from graftwork.engine.runner.graph_keys import EagerReason, GraphKey
from tests.engine.runner.device_gate import StepCounts, counted
from tests.engine.runner.llama_step import (
    DTYPE,
    LLAMA,
    LlamaRunner,
    adapter,
    decode_plan,
    llama,
    mixed_plan,
    penalty_specs,
    plain_specs,
    rolling,
)

ROWS, MOST_LAUNCHES = 32, 620


class FirstTokens:
    """A grammar that allows the first 32 tokens."""

    def fill(self, words: NDArray[np.int32]) -> None:
        words[0] = -1


def constrained_specs(num_rows: int) -> list[SampleSpec]:
    return [replace(spec, mask=FirstTokens()) for spec in plain_specs(num_rows)]


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaRunner]:
    made = llama()
    yield made
    made.masks.close()


def step(model: LlamaRunner, specs: list[SampleSpec], **options: Any) -> StepCounts:
    """What the second of two equal steps asks for. The first one brings the penalties' counts to the device."""
    runner, plan = model.runner, decode_plan(specs, **options)
    with counted(model.pinned):
        runner.launch(decode_plan(specs)).sample()
    with counted(model.pinned) as counts:
        runner.launch(plan).sample()
    return counts


def constrained_penalty_specs(num_rows: int) -> list[SampleSpec]:
    return [replace(spec, mask=FirstTokens()) for spec in penalty_specs(num_rows)]


KINDS: dict[str, Callable[[int], list[SampleSpec]]] = {
    "plain": plain_specs,
    "penalties": penalty_specs,
    "constrained": constrained_specs,
    "constrained penalties": constrained_penalty_specs,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_stays_within_its_bounds(model: LlamaRunner, kind: str) -> None:
    """A step launches at most 620 kernels, never waits for the device, and copies only from and to pinned memory, once in
    and once out, whatever its rows ask for."""
    counts = step(model, KINDS[kind](ROWS))

    assert counts.faults == []
    assert counts.num_launches <= MOST_LAUNCHES
    assert (counts.copies_in, counts.copies_out) == (1, 1)


def test_a_step_launches_what_its_layers_need_and_little_more(model: LlamaRunner) -> None:
    """A layer launches four products, four row kernels, two kernels of attention and eight of LoRA; the step adds the
    embedding, the sum and the norm before the head, the head, and the four kernels of sampling."""
    counts = step(model, plain_specs(ROWS))

    layers = 32
    assert counts.operations == {"aten::linear": 4 * layers + 1, "aten::embedding": 1, "aten::add": 1}
    assert counts.kernels == {
        "add_norm_kernel": 2 * layers + 1,
        "rotate_and_store_kernel": layers,
        "activate_kernel": layers,
        "attend_splits_kernel": layers,
        "merge_splits_kernel": layers,
        "shrink_tiles_kernel": 4 * layers,
        "expand_tiles_kernel": 4 * layers,
        "edit_kernel": 1,
        "weigh_kernel": 1,
        "gather_kernel": 1,
        "choose_kernel": 1,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_the_tokens_of_the_step_before_by_one_kernel(model: LlamaRunner, kind: str) -> None:
    """A step that was planned before its tokens were known takes them on the device by one more launch, and by no copy.
    For each row with penalties the one copy has one word more: where the awaited token is."""
    known, awaited = step(model, KINDS[kind](ROWS)), step(model, KINDS[kind](ROWS), awaits=True)

    assert awaited.faults == []
    assert awaited.kernels - known.kernels == {"take_tokens_kernel": 1}
    assert known.kernels - awaited.kernels == {}
    assert (awaited.copies_in, awaited.copies_out) == (1, 1)
    assert awaited.words_in[0] - known.words_in[0] == (ROWS if "penalties" in kind else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("awaits", [False, True])
def test_grammar_masks_are_read_where_they_were_filled(model: LlamaRunner, kind: str, awaits: bool) -> None:
    """One kernel reads the masks from pinned host memory, one bit for each token of a constrained row. No copy has them."""
    counts = step(model, KINDS[kind](ROWS), awaits=awaits)

    mask_words = ROWS * LLAMA.vocab_size // 32 if kind.startswith("constrained") else 0
    assert counts.words_read == mask_words
    assert sum(counts.words_in) < ROWS * LLAMA.vocab_size // 32


def test_longer_contexts_and_other_adapters_launch_the_same_kernels(model: LlamaRunner) -> None:
    """The kernels of a step, and what they are compiled for, do not depend on lengths or on which adapters it uses."""
    first = step(model, plain_specs(ROWS))
    second = step(model, plain_specs(ROWS), num_keys=2047, num_adapters=15)

    assert second.variants == first.variants
    assert second.num_launches == first.num_launches


@pytest.fixture
def graphs(model: LlamaRunner) -> Iterator[LlamaRunner]:
    """The model with graphs for decoding."""
    model.forward.graphs = model.graphs
    yield model
    model.forward.graphs = None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("awaits", [False, True])
def test_a_step_by_a_graph_leaves_the_host_almost_nothing(graphs: LlamaRunner, kind: str, awaits: bool) -> None:
    """Besides one graph, a step launches the four kernels of sampling, and one for awaited tokens. It allocates nothing,
    and copies as without a graph."""
    before = graphs.recorder.num_replays
    counts = step(graphs, KINDS[kind](ROWS), awaits=awaits)

    assert graphs.recorder.num_replays == before + 2
    assert counts.faults == []
    assert (counts.operations.total(), counts.allocations) == (0, 0)
    sampling = dict.fromkeys(("edit_kernel", "weigh_kernel", "gather_kernel", "choose_kernel"), 1)
    assert counts.kernels == sampling | ({"take_tokens_kernel": 1} if awaits else {})
    assert (counts.copies_in, counts.copies_out) == (1, 1)


@pytest.mark.parametrize("num_rows", [1, 3, 32])
def test_a_graph_holds_the_launches_of_the_step(graphs: LlamaRunner, num_rows: int) -> None:
    """A graph launches no more kernels than a step without a graph, and one copy of logits; nothing in it waits."""
    step(graphs, plain_specs(num_rows))
    assert graphs.recorder.work is not None

    with counted(graphs.pinned) as counts:
        graphs.recorder.work()

    assert counts.faults == []
    assert (counts.copies_in, counts.copies_out) == (0, 0)
    assert counts.operations == {"aten::linear": 129, "aten::embedding": 1, "aten::add": 1, "aten::copy_": 1}
    assert counts.num_launches <= MOST_LAUNCHES - 4
    way = "tiles" if num_rows == ROWS else "rows"  # in 32 rows two share an adapter
    assert counts.kernels[f"shrink_{way}_kernel"] == counts.kernels[f"expand_{way}_kernel"] == 128


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_beside_decoding_rows_is_one_graph(graphs: LlamaRunner, kind: str) -> None:
    """A step with 40 tokens of a prompt is a graph too, with the copies of a decode step; other lengths and kinds of rows
    replay the same graph."""
    works = set()
    for num_rows, num_prompt_tokens in ((ROWS, 40), (ROWS - 8, 90)):
        before, specs = graphs.recorder.num_replays, KINDS[kind](num_rows)
        with counted(graphs.pinned):
            graphs.runner.launch(mixed_plan(specs, num_prompt_tokens)).sample()

        with counted(graphs.pinned) as counts:
            graphs.runner.launch(mixed_plan(specs, num_prompt_tokens)).sample()

        assert graphs.recorder.num_replays == before + 2
        assert counts.faults == []
        assert (counts.operations.total(), counts.allocations) == (0, 0)
        assert (counts.copies_in, counts.copies_out) == (1, 1)
        works.add(id(graphs.recorder.work))
    assert len(works) == 1


def test_a_graph_of_a_mixed_step_holds_its_launches(graphs: LlamaRunner) -> None:
    """Beside the launches of a decode step, a mixed step has one of attention in each layer, and one that gathers the
    sampled rows; nothing in it waits."""
    with counted(graphs.pinned):
        graphs.runner.launch(mixed_plan(plain_specs(ROWS), 40)).sample()
    assert graphs.recorder.work is not None

    with counted(graphs.pinned) as counts:
        graphs.recorder.work()

    assert counts.faults == []
    assert (counts.copies_in, counts.copies_out) == (0, 0)
    gathers = {"aten::index_select": 1, "aten::copy_": 1}
    assert counts.operations == {"aten::linear": 129, "aten::embedding": 1, "aten::add": 1} | gathers
    assert counts.kernels["attend_tiles_kernel"] == counts.kernels["attend_splits_kernel"] == 32
    assert counts.kernels["shrink_tiles_kernel"] == counts.kernels["expand_tiles_kernel"] == 128
    assert counts.num_launches <= MOST_LAUNCHES - 4 + 33


@pytest.mark.parametrize("num_prompt_tokens", [0, 40])
def test_rolling_windows_beside_other_rows_are_one_graph(graphs: LlamaRunner, num_prompt_tokens: int) -> None:
    """A step whose rows have rolling windows, some of them behind the context, is a graph with the copies of any other; other
    windows, sinks, lengths and numbers of such rows replay the same graph."""
    works = set()
    options: list[dict[str, Any]] = [
        {},
        {"every": 3, "sinks": 0, "window": 17},
        {"every": 2, "sinks": 300, "window": 9, "num_given_up": 2000},
    ]
    for chosen in options:
        specs = plain_specs(ROWS)
        plan = rolling(mixed_plan(specs, num_prompt_tokens) if num_prompt_tokens else decode_plan(specs), **chosen)
        before = graphs.recorder.num_replays

        with counted(graphs.pinned) as counts:
            graphs.runner.launch(plan).sample()

        assert graphs.recorder.num_replays == before + 1
        assert counts.faults == []
        assert (counts.operations.total(), counts.allocations) == (0, 0)
        assert (counts.copies_in, counts.copies_out) == (1, 1)
        works.add(id(graphs.recorder.work))
    assert len(works) == 1


def test_a_graph_of_rolling_windows_launches_one_kernel_more_in_a_layer(graphs: LlamaRunner) -> None:
    """Beside the launches of a decode step, a graph with rolling windows has one of attention in each layer, two of angles, and
    one that numbers the rows; nothing in it waits. A step without such rows has none of them."""
    kernels = []
    for plan in (decode_plan(plain_specs(ROWS)), rolling(decode_plan(plain_specs(ROWS)), every=2)):
        with counted(graphs.pinned):
            graphs.runner.launch(plan).sample()
        assert graphs.recorder.work is not None
        with counted(graphs.pinned) as counts:
            graphs.recorder.work()
        assert counts.faults == []
        assert (counts.copies_in, counts.copies_out) == (0, 0)
        kernels.append(counts)

    plain, with_windows = kernels
    assert with_windows.kernels - plain.kernels == {"attend_rolling_splits_kernel": 32, "step_angles_kernel": 2}
    assert plain.kernels - with_windows.kernels == {}
    assert with_windows.operations - plain.operations == {"aten::arange": 1}


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


def test_a_step_by_a_graph_waits_for_whole_loads(graphs: LlamaRunner) -> None:
    """A graph is launched after its step has waited for the loads that it reads, once; if one of them fails, not at all."""
    gates, plan, waits = graphs.gates, decode_plan(plain_specs(4)), list[int]()
    good, bad = LayerGate(LLAMA.num_layers), LayerGate(LLAMA.num_layers)
    good.open_layers(LLAMA.num_layers, lambda: waits.append(graphs.recorder.num_replays))
    bad.open_layers(LLAMA.num_layers - 1, lambda: None)
    bad.fail()
    gates.add("good", good)
    gates.add("bad", bad)
    before = graphs.recorder.num_replays

    gates.select(["good"])
    with counted(graphs.pinned):
        graphs.runner.launch(plan).sample()
    gates.select(["bad"])
    with counted(graphs.pinned), pytest.raises(LoadFailed):
        graphs.runner.launch(plan)
    gates.select([])

    assert waits == [before]
    assert graphs.recorder.num_replays == before + 1


@pytest.mark.parametrize(("num_requests", "has_graph"), [(64, True), (65, False)])
def test_a_step_of_more_requests_than_an_engine_runs_has_no_graph(
    model: LlamaRunner, num_requests: int, has_graph: bool
) -> None:
    """A graph of mixed steps has room for as many requests as the engine runs, whatever the number of its rows."""
    rows = model.forward.arrange(mixed_plan(plain_specs(num_requests), 2))
    owners = StepOwners([None] * len(rows.token_ids), (), (), in_tiles=True)

    key = model.graphs.key_for(rows, owners)

    assert key == (GraphKey(128, None, is_mixed=True) if has_graph else EagerReason.CHUNKS)


def test_a_small_mixed_step_takes_the_kernels_of_its_graph(model: LlamaRunner) -> None:
    """A step with a prompt of two tokens applies LoRA in tiles without a graph too, so both give the same bits."""
    with counted(model.pinned) as counts:
        model.runner.launch(mixed_plan(plain_specs(1), 2)).sample()

    assert counts.kernels["shrink_tiles_kernel"] == counts.kernels["expand_tiles_kernel"] == 128
    assert counts.kernels["expand_rows_kernel"] == 0
