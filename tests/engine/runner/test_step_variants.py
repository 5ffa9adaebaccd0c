"""Tests that all kernels of a serving engine can be compiled before it serves: the graphs enumerate them.

The engine captures one graph for each key at its start, and each capture compiles what it launches. The same keys give
the variants here, without a GPU. The model has the shape of Llama-3.1-8B. That the variants compile and fit is tested
with the list of all variants (tests/engine/build/test_compile_kernels.py).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels extra is not installed")

from graftwork.engine.kernels.compile_ahead import KernelVariant, variant_of
from graftwork.engine.kernels.launch import Launch
from graftwork.engine.runner.graph_keys import GraphKey, GraphKeys
from tests.engine.runner.device_gate import counted
from tests.engine.runner.llama_step import LlamaRunner, decode_plan, llama, mixed_plan, plain_specs, rolling

Variants = dict[Any, KernelVariant]


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Variants:
    """The variants of all kernels that are launched in the test."""
    found: Variants = {}

    def noted(launch: Launch) -> None:
        variant = variant_of(launch.kernel.__name__, launch)
        found.setdefault(variant.key, variant)

    monkeypatch.setattr(Launch, "run", noted)
    return found


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaRunner]:
    made = llama()
    yield made
    made.forward.graphs = None


def run_graphs(model: LlamaRunner, keys: Iterable[GraphKey]) -> None:
    """Launches what the graphs of these keys hold."""
    for key in keys:
        with counted(model.pinned):
            model.graphs.work_of(key)()


def run_step(model: LlamaRunner, num_rows: int, num_adapters: int, num_keys: int, *, has_windows: bool = False) -> None:
    with counted(model.pinned):
        plan = decode_plan(plain_specs(num_rows), num_keys, num_adapters=num_adapters)
        model.runner.launch(rolling(plan, every=2, num_given_up=900) if has_windows else plan).sample()


def test_no_step_meets_a_kernel_that_the_enumeration_lacks(model: LlamaRunner, variants: Variants) -> None:
    """Decode steps of any number of rows, adapters and keys, with rolling windows and without, launch only kernels that the
    graphs of up to 8 rows, with the kernels of sampling, have launched at start."""
    run_graphs(model, GraphKeys(8, 16, model.keys.min_rows))
    run_graphs(model, (key for key in model.keys if key.has_rolling and not key.is_mixed and key.num_rows <= 8))
    run_step(model, 1, 0, 5)
    at_start = set(variants)
    model.forward.graphs = model.graphs

    for num_rows, num_adapters, num_keys in ((1, 1, 1), (3, 0, 100), (5, 2, 17), (8, 8, 2047), (8, 1, 4000)):
        run_step(model, num_rows, num_adapters, num_keys, has_windows=num_rows % 2 == 1)
        assert model.recorder.work is not None
        with counted(model.pinned):
            model.recorder.work()

    assert set(variants) == at_start


def test_no_step_with_a_prompt_meets_a_kernel_that_the_enumeration_lacks(
    model: LlamaRunner, variants: Variants
) -> None:
    """Steps with prompts of any length beside decoding rows launch only kernels that the graphs of mixed steps of up to 64
    rows, with the kernels of sampling, have launched at start."""
    keys = GraphKeys(8, model.keys.max_rank, model.keys.min_rows, max_mixed_rows=64, serves_rolling=True)
    run_graphs(model, [key for key in keys if key.is_mixed])
    run_step(model, 1, 0, 5)
    at_start = set(variants)
    model.forward.graphs = model.graphs

    for num_rows, num_prompt_tokens in ((1, 2), (1, 64), (5, 17), (20, 33)):
        plan = mixed_plan(plain_specs(num_rows), num_prompt_tokens)
        with counted(model.pinned):
            model.runner.launch(rolling(plan, every=2) if num_rows > 1 else plan).sample()
        assert model.recorder.work is not None
        with counted(model.pinned):
            model.recorder.work()

    assert set(variants) == at_start
