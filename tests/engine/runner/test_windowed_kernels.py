"""Tests of engines whose layers have page tables of their own, with interpreted kernels and graphs, against torch."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3nTextConfig

pytest.importorskip("triton", reason="the kernels extra is not installed")

from graftwork.engine.build.graphs import GraphBuild
from graftwork.engine.scheduler.validation import SchedulerLimits
from tests.engine.engine_driver import EngineDriver
from tests.engine.families import ALTERNATING, GEMMA3N, KINDS, make_family
from tests.engine.lora.test_lifecycle import CountingAdapterSource
from tests.engine.lora.triton.engine_runs import engine_of
from tests.engine.random_models import make_base
from tests.engine.runner.graph_scenarios import check_graphs
from tests.engine.runner.test_graph_scenarios import MemoryMeter, RepeatedWork
from tests.engine.runner.test_model_families import check_rows, recorded

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("engine_interprets_all"),
]
TRITON = dict.fromkeys(("attention_backend", "row_kernels", "lora_kernels"), "triton")
TORCH = dict.fromkeys(TRITON, "torch")
LIMITS = SchedulerLimits(4, 16, 2, 8, 256, 97, frozenset())
PROMPTS = [[5 + (7 * number + place) % 60 for place in range(18 + 7 * number)] for number in range(2)]


STREAMS = Gemma3nTextConfig(
    **GEMMA3N | {"num_hidden_layers": 3, "layer_types": ALTERNATING, "max_position_embeddings": 256},
    sliding_window=9,
    num_kv_shared_layers=1,
    altup_num_inputs=2,
    activation_sparsity_pattern=[0.5, 0.0, 0.0],
)


@pytest.fixture(scope="module", params=["windows", pytest.param("streams", marks=pytest.mark.slow)])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers that see nine tokens, of which one keeps the whole context; and one with several streams,
    whose last layer reads the keys of the first.
    """
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("windowed")
    if request.param == "streams":
        return make_family(STREAMS, folder, ()).folder
    base = make_base(folder / "base", num_layers=3)
    folder = base.with_name("windowed")
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine(model: Path, **options: Any) -> EngineDriver:
    sizes = {"max_batch_tokens": 16, "max_running": 2, "max_draft_tokens": 0, "device_bytes": 2**17}
    return engine_of(model, CountingAdapterSource({}), **{**sizes, "host_kv_bytes": 0, **options})


def answers(driver: EngineDriver) -> list[list[int]]:
    """The answers to two prompts at once, and then to the first one again, which is cached."""
    outcomes = [driver.submit(prompt, max_tokens=12, ignore_eos=True) for prompt in PROMPTS]
    while not all(outcome.is_over for outcome in outcomes):
        driver.poison_unused_pages()
        driver.step()
        driver.engine.scheduler.check_integrity()
    outcomes.append(driver.run(PROMPTS[0], max_tokens=4, ignore_eos=True))
    assert outcomes[-1].cache is not None
    assert outcomes[-1].cache.cached_tokens == 16
    return [outcome.token_ids for outcome in outcomes]


@pytest.mark.parametrize(
    ("overlap_steps", "kv_dtype"),
    [
        (False, "auto"),
        (True, "auto"),
        pytest.param(True, "int8", marks=pytest.mark.slow),
        pytest.param(False, "fp8", marks=pytest.mark.slow),
    ],
)
def test_kernels_and_graphs_read_the_pages_of_each_group(windowed: Path, overlap_steps: bool, kv_dtype: str) -> None:
    """Chunks, decoding rows and graphs have the tokens of torch with one group, while windows move on and pages that
    nobody holds are NaN; so they have with KV in bytes."""
    driver = engine(windowed, **TRITON, overlap_steps=overlap_steps, kv_dtype=kv_dtype)
    forward: Any = driver.engine.runner.forward
    windows = driver.engine.kv_cache.page_store.sizes.windows
    build = GraphBuild(forward.parts, driver.engine.cache.gates, LIMITS, windows)
    forward.graphs = build.capture(lambda: RepeatedWork(), MemoryMeter(9000, 5000))
    graphs = check_graphs(driver)

    ours = answers(driver)

    assert len(driver.engine.cache.groups.groups) == (2 if windowed.name == "base" else 3)
    assert graphs.steps.total() > 10
    assert ours == answers(engine(windowed, **TORCH, window_groups=False, kv_dtype=kv_dtype))


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
def test_rolling_windows_stand_beside_windows_of_layers(windowed: Path, kv_dtype: str) -> None:
    """Layers with a window of their own keep it in graphs of requests with a rolling window: the tokens are torch's, also of a
    request without one beside them, while pages that nobody holds are NaN."""
    options: list[dict[str, Any]] = [{"attention_window": 13, "attention_sinks": 5}, {}]

    def served(driver: EngineDriver) -> list[list[int]]:
        pairs = zip(PROMPTS, options, strict=True)
        outcomes = [driver.submit(prompt, max_tokens=10, ignore_eos=True, **more) for prompt, more in pairs]
        while not all(outcome.is_over for outcome in outcomes):
            driver.poison_unused_pages()
            driver.step()
            driver.engine.scheduler.check_integrity()
        return [outcome.token_ids for outcome in outcomes]

    driver = engine(windowed, **TRITON, kv_dtype=kv_dtype)
    forward: Any = driver.engine.runner.forward
    windows = driver.engine.kv_cache.page_store.sizes.windows
    build = GraphBuild(forward.parts, driver.engine.cache.gates, LIMITS, windows, serves_rolling=True)
    forward.graphs = build.capture(lambda: RepeatedWork(), MemoryMeter(9000, 5000))
    graphs = check_graphs(driver)

    ours = served(driver)

    assert sum(steps for key, steps in graphs.steps.items() if key.has_rolling) > 5
    assert graphs.steps.total() == driver.loop.stats().steps
    assert ours == served(engine(windowed, **TORCH, window_groups=False, kv_dtype=kv_dtype))


def test_kernels_apply_adapters_to_all_linear_layers_of_several_streams(tmp_path: Path) -> None:
    """In one batch LoRA, DoRA and biases of lora_B on all linear layers, LoRA on the table of inputs, and none, have peft's
    logits by the kernels: also on queries without keys, on what mixes streams and beside the layers."""
    torch.set_num_threads(1)
    kinds = ("lora", "dora", "lora-bias", "inputs")
    inputs = {"r": 3, "target_modules": ["embed_tokens_per_layer", "altup_projections.0"]}
    options: dict[str, dict[str, Any]] = {**KINDS, "inputs": inputs}
    family = make_family(STREAMS, tmp_path, kinds, options)
    driver = family.engine(lora_kernels="triton", max_lora_rank=16, max_running=5)
    driver.warm(*kinds)
    before, asked = driver.loop.stats().lora_kernel_rows, dict[Any, Any]()
    recorder = recorded(driver)

    for number, use in enumerate((*kinds, None)):
        prompt = PROMPTS[0][number : 5 + 2 * number]
        driver.submit(prompt, adapter=use, max_tokens=2, ignore_eos=True)
        asked[[*driver.outcomes][-1]] = (prompt, use)
    driver.finish()

    assert len(recorder.rows) == 10
    check_rows(recorder, driver, family, asked)
    assert driver.loop.stats().lora_kernel_rows - before == 5 + 6 + 7 + 8 + 4
