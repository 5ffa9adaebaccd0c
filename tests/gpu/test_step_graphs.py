"""Tests of steps by CUDA graphs on a GPU: a replay has the bits of its launches, whatever the step, and graphs
cost an engine nothing but the memory of its start. tests/engine/runner/test_graph_scenarios.py runs the same scenarios
on a CPU.
"""

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels extra is not installed")
pytest.importorskip("peft", reason="peft and transformers, which make the models of these tests, are not installed")
from graftwork.engine.build.devices import CudaMeter
from graftwork.engine.build.graphs import GraphBuild, cuda_recorder
from graftwork.engine.runner.step_graphs import CudaGraphs
from graftwork.engine.scheduler.validation import SchedulerLimits
from tests.engine.engine_driver import EngineDriver
from tests.engine.lora.test_lifecycle import CountingAdapterSource
from tests.engine.lora.triton.engine_runs import VOCAB, engine_of
from tests.engine.random_models import make_base
from tests.engine.runner.graph_scenarios import (
    LEAVING,
    MIXED,
    adapters,
    adapters_come_and_go,
    check_graphs,
    replays_have_the_bits_of_their_launches,
    serve,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MAX_RUNNING = 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("graphs") / "base")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each graph that was captured so far."""
    made, capture = list[None](), CudaGraphs.capture

    def counted(recorder: CudaGraphs, work: Callable[[], None]) -> Any:
        made.append(None)
        return capture(recorder, work)

    monkeypatch.setattr(CudaGraphs, "capture", counted)
    return made


def engine(base: Path, **options: Any) -> tuple[EngineDriver, CountingAdapterSource]:
    source = CountingAdapterSource(adapters(num_layers=2))
    settings = {"device": "cuda:0", "max_running": MAX_RUNNING, "max_draft_tokens": 0, "max_lora_rank": 64} | options
    return engine_of(base, source, **settings), source


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")])
def test_replays_have_the_bits_of_their_launches(base: Path, dtype: str, kv_dtype: str) -> None:
    """Over rounds of other rows, lengths and adapters, each replay equals its launches one by one, bit for bit. Graphs
    compute all steps, those with prompts too."""
    driver, _ = engine(base, dtype=dtype, kv_dtype=kv_dtype)

    _, checked = replays_have_the_bits_of_their_launches(driver, [*MIXED] * 3, max_tokens=6)

    assert checked.rows >= {1, 2, 3, 4, 5}
    assert max(checked.steps.values()) >= 6, "no graph was replayed with other steps"


def test_answers_are_those_without_graphs(base: Path) -> None:
    """In fp32 an engine with graphs gives the greedy tokens of one without."""
    rounds = [*MIXED] * 2

    outcomes = serve(engine(base)[0], rounds, max_tokens=6)

    expected = serve(engine(base, cuda_graphs="off")[0], rounds, max_tokens=6)
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in expected]


def test_adapters_come_and_go_without_a_capture(base: Path, captures: list[None]) -> None:
    """Adapters that are evicted and loaded again are served by the graphs of the start."""
    driver, source = engine(base, lora_pool_bytes=80_000, lora_host_bytes=80_000)
    at_start = len(captures)

    adapters_come_and_go(driver, source.loads, "acbdacbd", max_tokens=4)

    assert at_start > 0
    assert len(captures) == at_start


def test_all_graphs_are_there_before_the_first_request(base: Path, captures: list[None]) -> None:
    """An engine starts with a graph for each key, and the first step is one of them."""
    driver, _ = engine(base)
    forward: Any = driver.engine.runner.forward
    at_start = len(captures)
    keys = list(forward.graphs.keys)

    works = {id(forward.graphs.work_of(key)) for key in keys}
    serve(driver, LEAVING, max_tokens=2)

    assert len(works) == len(keys)
    assert len(captures) == at_start >= len(keys)
    assert driver.loop.stats().graph_steps >= 3


def test_steps_by_graphs_take_no_more_memory(base: Path) -> None:
    """After some rounds of requests, ten times as many take no memory, but for one more segment of torch's cache, of
    2 MiB."""
    driver, _ = engine(base)
    serve(driver, [*MIXED] * 2, max_tokens=6)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    free = torch.cuda.mem_get_info()[0]

    serve(driver, [*MIXED] * 20, max_tokens=6)

    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + 2**16
    assert torch.cuda.memory_reserved() <= reserved + 2**21
    assert torch.cuda.mem_get_info()[0] >= free - 2**21


def test_a_step_by_a_graph_waits_for_nothing(base: Path) -> None:
    """Torch waits for the device nowhere between the plan of a step and the launch of its graph."""
    driver, _ = engine(base)
    serve(driver, MIXED, max_tokens=6)
    checked = check_graphs(driver)
    compute = checked.inner.compute

    def strict(*arguments: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return compute(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    checked.inner.compute = strict  # type: ignore[method-assign, assignment]
    serve(driver, MIXED, max_tokens=6)

    assert checked.steps.total() >= 6


def test_prompts_whose_tokens_are_scored_have_no_graph(base: Path) -> None:
    """A prompt with scores is computed eagerly, and counted by its reason; the rest is graphs."""
    driver, _ = engine(base)
    before = driver.loop.stats()

    driver.run([5, 6, 7, 8], max_tokens=4, ignore_eos=True, prompt_logprobs=2)
    driver.run([9, 6, 7, 8], max_tokens=4, ignore_eos=True)

    stats = driver.loop.stats()
    assert stats.eager_score_steps - before.eager_score_steps == 1
    assert stats.eager_chunk_steps == before.eager_chunk_steps
    assert stats.graph_prompt_steps - before.graph_prompt_steps == 1
    assert stats.graph_steps - before.graph_steps == 6


def test_a_capture_without_memory_leaves_an_engine_that_serves(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the device has no memory left while a graph is captured, the log says why, the memory of all graphs is given
    back, and the engine gives the same answers without graphs, on the stream that it had before."""
    expected = serve(engine(base, cuda_graphs="off")[0], MIXED, max_tokens=4)
    stream, capture = torch.cuda.current_stream(), CudaGraphs.capture
    captures = Counter[CudaGraphs]()

    def fails(recorder: CudaGraphs, work: Callable[[], None]) -> Any:
        captures[recorder] += 1

        def too_much() -> None:
            work()
            if torch.cuda.is_current_stream_capturing():
                torch.empty(2**45, dtype=torch.uint8, device="cuda:0")

        return capture(recorder, too_much if captures[recorder] == 4 else work)

    monkeypatch.setattr(CudaGraphs, "capture", fails)
    with caplog.at_level(logging.WARNING):
        driver, _ = engine(base)

    (record,) = [one for one in caplog.records if one.message == "cuda_graphs_unavailable"]
    assert record.exc_info is not None
    assert record.exc_info[0] is torch.OutOfMemoryError
    assert set(captures.values()) == {4}
    assert torch.cuda.current_stream() == stream
    outcomes = serve(driver, MIXED, max_tokens=4)
    stats = driver.loop.stats()
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in expected]
    assert (stats.graph_steps, stats.fallback_graphs) == (0, 1)


def test_the_measured_memory_holds_all_graphs(base: Path) -> None:
    """What a few graphs predict is at least what all take, and at most 64 MiB and a half more."""
    driver, _ = engine(base, cuda_graphs="off")
    device, meter = torch.device("cuda:0"), CudaMeter(torch.device("cuda:0"))
    forward: Any = driver.engine.runner.forward
    limits = SchedulerLimits(4, 48, MAX_RUNNING, 8, 256, VOCAB, frozenset())
    build = GraphBuild(forward.parts, driver.engine.cache.gates, limits)
    predicted = build.measure(cuda_recorder(device), meter)
    free = meter.free_bytes()

    graphs = build.capture(cuda_recorder(device), meter)

    assert graphs is not None
    taken = free - meter.free_bytes()
    assert taken <= predicted + 8 * 2**20
    assert predicted <= 1.5 * taken + 64 * 2**20
