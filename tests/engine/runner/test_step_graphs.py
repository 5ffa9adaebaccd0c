"""Tests of the contract of CUDA graphs: no launch in a graph depends on the step. Interpreted kernels take the part of
the GPU, and a recorder runs what was captured and looks at its launches.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.kernels.launch import Launch
from graftwork.engine.kernels.step_inputs import PinnedMemory
from graftwork.engine.lora.triton.launch_plan import GROUPED_TILE_ROWS, ROW_WISE, LaunchBounds, StepShape, tile_rows_for
from graftwork.engine.runner.graph_keys import GraphKeys
from tests.engine.lora.test_lifecycle import CountingAdapterSource
from tests.engine.lora.triton.engine_runs import Request, engine_of, run, weights
from tests.engine.random_models import make_base

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("rules_of_a_gpu"),
]

TRITON = dict.fromkeys(("attention_backend", "row_kernels", "lora_kernels"), "triton")
TORCH = dict.fromkeys(TRITON, "torch")
TEMPORARIES = {
    *("hidden", "delta", "normed", "qkv", "query", "output", "gate_up", "inner", "x", "y", "planes"),
    *("chosen", "counts", "tokens", "places", "tile_expert", "tile_start", "tile_length", "sums"),
}
"""Arguments of kernels that a graph keeps in its own memory, which the recorder has not."""
ROLLING_TEMPORARIES = {"row_cosines", "row_sines", "cosines", "sines", "positions"}
"""The same in steps with rolling windows, which compute the angles of their rows."""
RANKS = {"a": 12, "b": 4, "c": 16, "d": 8, "e": 20}


class Recorder:
    """Runs what was captured whenever it is replayed, and describes its launches."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.temporaries = TEMPORARIES
        self.replays: dict[int, list[list[Any]]] = {}
        """By graph: what each replay launched."""

    def capture(self, work: Callable[[], None]) -> "RecordedGraph":
        return RecordedGraph(self, work)

    def note(self, launch: Launch) -> None:
        tensors = {name: one for name, one in launch.arguments.items() if isinstance(one, torch.Tensor)}
        temporary = {one.data_ptr() for name, one in tensors.items() if name in self.temporaries}
        described = dict(launch.arguments) | {
            # An argument that a kernel does not read may stand for a temporary one.
            name: (None if one.data_ptr() in temporary else one.data_ptr(), one.shape, one.stride())
            for name, one in tensors.items()
        }
        self.launches.append((launch.kernel.__name__, launch.grid, described))


def differences(one: list[Any], other: list[Any]) -> Iterator[tuple[Any, ...]]:
    """What differs between the launches of two replays."""
    for (kernel, grid, first), (name, cells, second) in zip(one, other, strict=True):
        if (kernel, grid) != (name, cells):
            yield kernel, grid, name, cells
        yield from ((kernel, key, first[key], second[key]) for key in first if first[key] != second.get(key))


class RecordedGraph:
    def __init__(self, recorder: Recorder, work: Callable[[], None]) -> None:
        self._recorder, self._work = recorder, work

    def replay(self) -> None:
        self._recorder.launches = []
        self._work()
        self._recorder.replays.setdefault(id(self), []).append(self._recorder.launches)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder, run_launch = Recorder(), Launch.run

    def noted(launch: Launch) -> None:
        recorder.note(launch)
        run_launch(launch)

    monkeypatch.setattr(Launch, "run", noted)
    return recorder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_base(tmp_path_factory.mktemp("graphs") / "base", num_layers=1)


def engine(base: Path, **options: Any) -> Any:
    made = [weights(name, rank, seed) for seed, (name, rank) in enumerate(RANKS.items())]
    source = CountingAdapterSource({one.digest: one for one in made})
    return engine_of(base, source, max_running=8, max_draft_tokens=0, **options)


def with_graphs(
    driver: Any, graphs: ModuleType, recorder: Recorder, max_mixed_rows: int = 32, *, serves_rolling: bool = False
) -> Any:
    """Lets the engine compute steps by graphs, which are captured before it has any adapter."""
    forward = driver.engine.runner.forward
    rank = forward.parts.lora.max_rank
    keys = GraphKeys(8, rank, min_rows=4, max_mixed_rows=max_mixed_rows, serves_rolling=serves_rolling)
    limits = graphs.GraphLimits(keys, context_tokens=64, page_tokens=4)
    device = torch.device("cpu")
    forward.graphs = graphs.StepGraphs(forward.parts, driver.engine.cache.gates, PinnedMemory(device), limits)
    forward.graphs.capture(recorder)
    return driver


@pytest.mark.usefixtures("engine_interprets_all")
def test_two_steps_of_a_graph_launch_the_same_and_compute_what_torch_computes(
    base: Path, interpreted_engine: dict[str, ModuleType], recorder: Recorder
) -> None:
    """Steps with other rows, lengths and adapters, more of them than when the graph was captured, have the same grids,
    numbers and addresses in every launch of a graph, and torch's tokens and logits. So have steps with prompts."""
    rounds = [
        [Request(3, (AdapterUse("a"),)), Request(9), Request(2, (AdapterUse("b"),)), Request(5, (AdapterUse("c"),))],
        [Request(14, (AdapterUse("e"),)), Request(1), Request(3)],
    ]
    module = interpreted_engine["graftwork.engine.runner.step_graphs"]
    ours, theirs = with_graphs(engine(base, **TRITON), module, recorder), engine(base, **TORCH)

    for requests in rounds:
        of_graphs = run(ours, list(RANKS), requests, max_tokens=3)
        of_torch = run(theirs, list(RANKS), requests, max_tokens=3)

        assert of_graphs.token_ids == of_torch.token_ids
        torch.testing.assert_close(of_graphs.logits, of_torch.logits, atol=1e-4, rtol=1e-4)
    stats = ours.loop.stats()
    assert stats.graph_steps + stats.graph_prompt_steps == stats.steps == sum(map(len, recorder.replays.values()))
    mixed = [replays for replays in recorder.replays.values() if any("attend_tiles" in one[0] for one in replays[0])]
    assert max(map(len, mixed)) > 1
    several = [replays for replays in recorder.replays.values() if len(replays) > 1]
    assert several
    for first, *others in several:
        assert len(first) > 8
        for other in others:
            assert list(differences(first, other)) == []


@pytest.mark.usefixtures("engine_interprets_all")
def test_rolling_windows_are_steps_of_a_graph(
    base: Path, interpreted_engine: dict[str, ModuleType], recorder: Recorder
) -> None:
    """Steps with other rows, windows, sinks and lengths, up to texts longer than the context, have the same grids, numbers and
    addresses in every launch of a graph, and torch's tokens and logits; no step is eager."""
    rounds = [
        [
            Request(50, (AdapterUse("a"),), RollingWindow(3, 9)),
            Request(9),
            Request(5, (AdapterUse("b"),), RollingWindow(0, 4)),
        ],
        [
            Request(60, (), RollingWindow(1, 5)),
            Request(7, (AdapterUse("a", 0.5), AdapterUse("b", -1.0)), RollingWindow(5, 6)),
            Request(2, (AdapterUse("c"),)),
        ],
    ]
    sizes: dict[str, Any] = {"max_batch_tokens": 16, "max_context_tokens": 64}
    module = interpreted_engine["graftwork.engine.runner.step_graphs"]
    ours = with_graphs(engine(base, **sizes, **TRITON), module, recorder, 16, serves_rolling=True)
    theirs = engine(base, **sizes, **TORCH)
    recorder.temporaries = TEMPORARIES | ROLLING_TEMPORARIES

    for requests in rounds:
        of_graphs = run(ours, list(RANKS), requests, max_tokens=5)
        of_torch = run(theirs, list(RANKS), requests, max_tokens=5)

        assert of_graphs.token_ids == of_torch.token_ids
        torch.testing.assert_close(of_graphs.logits, of_torch.logits, atol=1e-4, rtol=1e-4)
    stats = ours.loop.stats()
    assert stats.graph_steps + stats.graph_prompt_steps == stats.steps
    several = [replays for replays in recorder.replays.values() if len(replays) > 1]
    assert {name for replays in several for name, _, _ in replays[0]} >= {
        *("attend_rolling_splits_kernel", "attend_rolling_tiles_kernel", "step_angles_kernel"),
        *("attend_splits_kernel", "attend_tiles_kernel"),
    }
    for first, *others in several:
        for other in others:
            assert list(differences(first, other)) == []


@pytest.mark.usefixtures("engine_interprets_all")
@pytest.mark.parametrize("kind", ["base", "mixture"])
def test_graphs_serve_the_base_model_and_mixtures(
    base: Path, interpreted_engine: dict[str, ModuleType], recorder: Recorder, kind: str
) -> None:
    """A graph of the base model launches nothing of LoRA; a mixture is served by a graph too; both compute what torch
    computes."""
    uses = {"base": (), "mixture": (AdapterUse("a", 0.5), AdapterUse("b", -1.0))}[kind]
    adapters, requests = [use.digest for use in uses], [Request(3, uses), Request(7)]
    module = interpreted_engine["graftwork.engine.runner.step_graphs"]

    ours = run(with_graphs(engine(base, **TRITON), module, recorder), adapters, requests, max_tokens=3)
    plain = run(engine(base, **TORCH), adapters, requests, max_tokens=3)

    assert ours.token_ids == plain.token_ids
    torch.testing.assert_close(ours.logits, plain.logits, atol=1e-4, rtol=1e-4)
    kernels = {name for replays in recorder.replays.values() for launches in replays for name, _, _ in launches}
    assert "attend_splits_kernel" in kernels
    assert ("expand_rows_kernel" in kernels) == (kind == "mixture")


@pytest.mark.usefixtures("engine_interprets_all")
def test_a_step_that_no_graph_has_room_for_is_eager(
    base: Path, interpreted_engine: dict[str, ModuleType], recorder: Recorder
) -> None:
    """A prompt of more rows than the largest graph is computed eagerly, and counted; the decode steps are graphs."""
    module = interpreted_engine["graftwork.engine.runner.step_graphs"]
    ours = with_graphs(engine(base, **TRITON), module, recorder, max_mixed_rows=16)
    requests = [Request(17)]

    of_graphs = run(ours, [], requests, max_tokens=3)

    stats = ours.loop.stats()
    assert (stats.eager_chunk_steps, stats.graph_steps) == (1, 2)
    assert of_graphs.token_ids == run(engine(base, **TORCH), [], requests, max_tokens=3).token_ids


@given(
    st.integers(1, 70),
    st.lists(st.integers(1, 16), min_size=1, max_size=70),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_every_small_step_has_a_graph_that_serves_it(
    num_rows: int, pages_of_ranks: list[int], has_mixtures: bool, has_columns: bool, has_rolling: bool
) -> None:
    """Any step of up to 70 rows with adapters of up to 128 ranks finds a graph in the enumeration, whose rows, rank,
    tiles, kinds of adapters and windows cover it."""
    from graftwork.engine.lora.triton.fused_lora import LoraNeeds

    ranks = [8 * pages for pages in pages_of_ranks[:num_rows]]
    tile_rows = tile_rows_for(StepShape(num_rows, len(ranks), sum(ranks)))
    keys = GraphKeys(70, 128, serves_rolling=has_rolling)
    slots = frozenset(range(len(ranks)))
    needs = LoraNeeds(tile_rows, LaunchBounds(max(ranks), has_columns), has_mixtures, slots)

    key = keys.find(num_rows, needs, has_rolling=has_rolling)

    assert key in list(keys)
    assert key is not None
    assert key.lora is not None
    assert num_rows <= key.num_rows < 2 * num_rows
    assert max(ranks) <= key.lora.rank <= (128 if has_rolling else max(16, 2 * max(ranks)))
    assert key.has_rolling == has_rolling
    assert (key.lora.tile_rows == ROW_WISE) == (tile_rows == ROW_WISE)
    assert key.lora.tile_rows in (ROW_WISE, GROUPED_TILE_ROWS[0])
    assert key.lora.is_general >= (has_mixtures or has_columns)


@given(st.integers(1, 3000), st.integers(0, 1100), st.integers(0, 128), st.booleans(), st.booleans(), st.booleans())
def test_every_mixed_step_has_a_graph_that_serves_it(
    num_rows: int, max_mixed_rows: int, rank: int, has_mixtures: bool, has_columns: bool, has_rolling: bool
) -> None:
    """A step with prompts of up to as many rows as the largest graph finds one in the enumeration. Its rows are less than
    twice as many, and less than 1.25 times where there are more than 256."""
    from graftwork.engine.lora.triton.fused_lora import LoraNeeds

    keys = GraphKeys(70, 128, max_mixed_rows=max_mixed_rows, serves_rolling=has_rolling)
    needs = LoraNeeds(16, LaunchBounds(rank, has_columns), has_mixtures, frozenset({0} if rank else ()))

    key = keys.find(num_rows, needs, is_mixed=True, has_rolling=has_rolling)

    assert (key is not None) == (num_rows <= max_mixed_rows)
    if key is None:
        return
    assert key in list(keys)
    assert key.has_rolling == has_rolling
    assert num_rows <= key.num_rows < max(16, num_rows * (1.25 if num_rows > 256 else 2)) + 1
    assert (key.lora is None) == (rank == 0)
    if key.lora is not None:
        assert rank <= key.lora.rank
        assert key.lora.is_general >= (has_mixtures or has_columns)


def test_rolling_windows_add_two_graphs_of_mixed_steps_and_three_of_decode_steps_to_each_number_of_rows() -> None:
    """The kinds of adapters, tiles and ranks do not multiply: an engine of 256 requests has fewer than a third more graphs."""
    without, with_windows = (
        list(GraphKeys(256, 128, max_mixed_rows=1024, serves_rolling=serves_rolling))
        for serves_rolling in (False, True)
    )

    added = [key for key in with_windows if key.has_rolling]
    assert set(with_windows) - set(added) == set(without)
    assert len(with_windows) == len(set(with_windows))
    assert sum(key.is_mixed for key in added) == 2 * len(GraphKeys(256, 128, max_mixed_rows=1024).mixed_row_counts)
    assert sum(not key.is_mixed for key in added) <= 3 * 9
    assert len(added) < len(without) / 3


@pytest.mark.usefixtures("engine_interprets_all")
def test_without_graphs_for_windows_such_steps_are_eager(
    base: Path, interpreted_engine: dict[str, ModuleType], recorder: Recorder
) -> None:
    """Steps with a rolling window are counted by their reason, those without one stay graphs, and the answers are torch's."""
    rounds = [[Request(30, (), RollingWindow(2, 7)), Request(9)], [Request(9), Request(12)]]
    sizes: dict[str, Any] = {"max_batch_tokens": 16, "max_context_tokens": 64}
    module = interpreted_engine["graftwork.engine.runner.step_graphs"]
    ours = with_graphs(engine(base, **sizes, **TRITON), module, recorder, 16)
    theirs = engine(base, **sizes, **TORCH)

    for requests in rounds:
        of_graphs, of_torch = (run(one, list(RANKS), requests, max_tokens=5) for one in (ours, theirs))
        assert of_graphs.token_ids == of_torch.token_ids
    stats = ours.loop.stats()
    assert stats.eager_window_steps > 5
    assert stats.graph_steps > 2
    assert stats.graph_steps + stats.graph_prompt_steps + stats.eager_window_steps == stats.steps


def test_a_step_with_too_many_rows_has_no_graph() -> None:
    """A step with more rows than the largest graph is computed without one."""
    from graftwork.engine.lora.triton.fused_lora import LoraNeeds

    needs = LoraNeeds(ROW_WISE, LaunchBounds(0, has_columns=False), has_mixtures=False, slots=frozenset())

    assert GraphKeys(8, 128).find(9, needs) is None
    assert GraphKeys(8, 128).find(8, needs) in list(GraphKeys(8, 128))
