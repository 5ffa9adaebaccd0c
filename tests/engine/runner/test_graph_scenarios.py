"""Tests of engines whose steps are graphs, on a CPU: interpreted kernels, and a recorder that takes the part of
CUDA graphs. tests/gpu/test_step_graphs.py runs the same scenarios with real graphs.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels extra is not installed")

from graftwork.engine.build.graphs import GraphBuild
from graftwork.engine.scheduler.validation import SchedulerLimits
from tests.engine.engine_driver import EngineDriver
from tests.engine.lora.test_lifecycle import CountingAdapterSource
from tests.engine.lora.triton.engine_runs import engine_of
from tests.engine.random_models import make_base
from tests.engine.runner.graph_scenarios import (
    LEAVING,
    adapters,
    adapters_come_and_go,
    replays_have_the_bits_of_their_launches,
    serve,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("engine_interprets_all"),
]

TRITON = dict.fromkeys(("attention_backend", "row_kernels", "lora_kernels"), "triton")
TORCH = dict.fromkeys(TRITON, "torch")
LIMITS = SchedulerLimits(4, 32, 8, 8, 64, 97, frozenset())


class RepeatedWork:
    """A recorder whose graphs run their work again at each replay. `fails_at` is the number of a capture that fails."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.num_captures = 0
        self._fails_at = fails_at

    def capture(self, work: Callable[[], None]) -> "RepeatedWorkGraph":
        self.num_captures += 1
        if self.num_captures == self._fails_at:
            raise torch.OutOfMemoryError("no memory is left for a graph")
        return RepeatedWorkGraph(work)


class RepeatedWorkGraph:
    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


class MemoryMeter:
    """The memory of a device: what is free each time that somebody asks."""

    device = torch.device("cpu")

    def __init__(self, *free: int) -> None:
        self._free = list(free)

    def peak_of(self, act: Callable[[], None]) -> int:
        raise AssertionError("graphs are measured by what they keep")

    def free_bytes(self) -> int:
        return self._free.pop(0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_base(tmp_path_factory.mktemp("scenarios") / "base", num_layers=1)


def engine(base: Path, **options: Any) -> tuple[EngineDriver, CountingAdapterSource]:
    source = CountingAdapterSource(adapters(num_layers=1))
    driver = engine_of(base, source, max_running=8, max_draft_tokens=0, max_lora_rank=64, **options)
    return driver, source


def build_of(driver: EngineDriver) -> GraphBuild:
    forward: Any = driver.engine.runner.forward
    return GraphBuild(forward.parts, driver.engine.cache.gates, LIMITS)


def capture(driver: EngineDriver, recorder: RepeatedWork) -> None:
    forward: Any = driver.engine.runner.forward
    forward.graphs = build_of(driver).capture(lambda: recorder, MemoryMeter(9000, 5000))


@pytest.mark.parametrize(
    "kv_dtype", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "fp8"))]
)
def test_replays_have_the_bits_of_their_launches(base: Path, kv_dtype: str) -> None:
    """Graphs compute all steps of a round, and the tokens are torch's, also with KV in bytes."""
    driver, _ = engine(base, **TRITON, kv_dtype=kv_dtype)
    capture(driver, RepeatedWork())

    outcomes, _ = replays_have_the_bits_of_their_launches(driver, LEAVING, max_tokens=2)

    expected = serve(engine(base, **TORCH, kv_dtype=kv_dtype)[0], LEAVING, max_tokens=2)
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in expected]


def test_adapters_come_and_go_without_a_capture(base: Path) -> None:
    """Adapters that are evicted and loaded again are served by the graphs of the start."""
    driver, source = engine(base, **TRITON, lora_pool_bytes=40_000, lora_host_bytes=40_000)
    recorder = RepeatedWork()
    capture(driver, recorder)
    at_start = recorder.num_captures

    adapters_come_and_go(driver, source.loads, "aca", max_tokens=2)

    assert recorder.num_captures == at_start


def test_a_capture_without_memory_leaves_an_engine_that_serves(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a capture fails, the log has the reason and what it costs, and the engine decodes without graphs."""
    driver, _ = engine(base, **TRITON)

    with caplog.at_level(logging.WARNING):
        capture(driver, RepeatedWork(fails_at=3))

    (record,) = [one for one in caplog.records if one.message == "cuda_graphs_unavailable"]
    assert record.exc_info is not None
    assert record.exc_info[0] is torch.OutOfMemoryError
    assert "one by one" in record.__dict__["loss"]
    serve(driver, [(("a",), ())], max_tokens=2)
    assert driver.loop.stats().graph_steps == 0


def test_the_memory_of_all_graphs_follows_from_a_few(base: Path) -> None:
    """The first graph counts once, with the memory that all share. Eight more took 800 bytes, so each of the others
    counts as 100; kernels that the first captures load do not count."""
    build = build_of(engine(base, **TRITON)[0])
    recorders: list[RepeatedWork] = []

    def recorder() -> RepeatedWork:
        recorders.append(RepeatedWork())
        return recorders[-1]

    num_bytes = build.measure(recorder, MemoryMeter(50_000, 40_000, 39_200))

    counted = RepeatedWork()
    build.capture(lambda: counted, MemoryMeter(1, 0))
    assert [one.num_captures for one in recorders] == [9, 9]
    assert num_bytes == 10_000 + 100 * (counted.num_captures - 1)


def test_graphs_that_cannot_be_measured_take_no_memory(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a capture fails while it is measured, nothing is kept free for graphs, and the log says so."""
    build = build_of(engine(base, **TRITON)[0])

    assert build.measure(lambda: RepeatedWork(fails_at=2), MemoryMeter()) == 0
    assert "cuda_graphs_unmeasured" in caplog.messages
