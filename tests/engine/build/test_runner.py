"""The choice of the forward pass: who captures graphs, and what is reported where kernels are missing."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from graftwork.engine.build.graphs import wants_cuda_graphs
from graftwork.engine.build.kv import overlaps_loads
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.stats import EngineStats
from graftwork.engine.runner.forward import StepPaths
from graftwork.engine.runner.graph_keys import EagerReason
from graftwork.platform.errors import InvalidRequest
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


def test_graphs_are_for_one_gpu_and_can_be_turned_off(models: RandomModels) -> None:
    """Graphs are captured on CUDA by one rank, unless `cuda_graphs` is off; another word is refused on any device."""
    config = EngineConfig(models.base)
    off, many = EngineConfig(models.base, cuda_graphs="off"), EngineConfig(models.base, tensor_parallel=2)

    assert wants_cuda_graphs(config, GPU)
    assert not any(wants_cuda_graphs(*given) for given in ((config, CPU), (off, GPU), (many, GPU)))
    with pytest.raises(InvalidRequest, match="choose one of auto, windows, off") as refusal:
        wants_cuda_graphs(EngineConfig(models.base, cuda_graphs="on"), CPU)
    assert refusal.value.param == "cuda_graphs"


def test_steps_overlap_loads_where_graphs_do_not_wait_for_all_of_them(models: RandomModels) -> None:
    """By default a step reads KV that is still on its way only on CUDA without graphs; a setting decides otherwise."""
    config, off = EngineConfig(models.base), EngineConfig(models.base, cuda_graphs="off")

    assert [overlaps_loads(*given) for given in ((config, CPU), (config, GPU), (off, GPU))] == [False, False, True]
    assert all(overlaps_loads(EngineConfig(models.base, overlap_loads=True), device) for device in (CPU, GPU))
    assert not overlaps_loads(EngineConfig(models.base, overlap_loads=False, cuda_graphs="off"), GPU)


def test_an_engine_reports_how_its_steps_were_computed(make_engine: Callable[..., EngineDriver]) -> None:
    """On a CPU every step is eager, because there are no graphs, and no kernel is missing."""
    driver = make_engine(lora_kernels="torch")
    before = driver.loop.stats()
    driver.submit([5, 6, 7], max_tokens=4)
    driver.finish()

    stats = driver.loop.stats()

    assert stats.eager_steps - before.eager_steps == stats.steps - before.steps == 4
    others = [name for name in StepPaths.__dataclass_fields__ if name != "eager_steps"]
    assert {name: getattr(stats, name) for name in others} == dict.fromkeys(others, 0)


def test_each_reason_has_a_figure() -> None:
    """Each reason for an eager step is a count, and each count is a figure of the engine."""
    counts = {field.name for field in fields(StepPaths)}

    assert counts >= set(EagerReason)
    assert {field.name for field in fields(EngineStats)} >= counts
