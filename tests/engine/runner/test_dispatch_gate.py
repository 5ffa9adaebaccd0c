"""The dispatch gate: what one decode step of Llama-3.1-8B's shape, with 32 rows and 16 adapters, asks of a GPU.

No GPU takes part (see device_gate.py). The bounds hold for every step after a request's first.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from graftwork.engine.core.step import SampleSpec

pytest.importorskip("triton", reason="the kernels extra is not installed")

from graftwork.engine.kv.transfer.plan import LayerGate, LoadFailed
from graftwork.engine.lora.triton.backend import StepOwners
from graftwork.engine.runner.graph_keys import EagerReason, GraphKey
from tests.engine.runner.device_gate import counted
from tests.engine.runner.gated_step import step
from tests.engine.runner.llama_step import (
    LLAMA,
    LlamaRunner,
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
