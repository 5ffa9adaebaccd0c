"""Tests of the trial of the kernels at an engine's start."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from graftwork.engine.model.config import read_model_config
from tests.engine.attention.cases import CPU
from tests.engine.conftest import RandomModels


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "int8"), (torch.float16, "fp8")],
)
def test_kernels_that_work_pass(
    interpreted: dict[str, ModuleType], models: RandomModels, dtype: torch.dtype, kv_dtype: str, rolling: bool
) -> None:
    """The trials find nothing wrong with the kernels, for a model with full layers and layers with a window."""
    model = replace(read_model_config(models.base), windows=(None, 50))
    tried = interpreted["selftest"].why_attention_fails(model, 16, CPU, dtype, kv_dtype=kv_dtype, rolling=rolling)

    assert tried is None


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_scales_that_are_not_read_are_found(
    interpreted: dict[str, ModuleType], models: RandomModels, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    """If the scales of a token's neighbour are taken for its own, the trial says so."""
    pages = interpreted["launch"].LayerPages

    def shifted(keys: torch.Tensor, values: torch.Tensor, *scales: torch.Tensor) -> Any:
        rolled = [torch.empty_like(one).copy_(one.roll(1, 1)) for one in scales]
        return pages(keys, values, *rolled)

    monkeypatch.setattr(interpreted["triton_attention"], "LayerPages", shifted)
    selftest = interpreted["selftest"]

    reason = selftest.why_attention_fails(read_model_config(models.base), 16, CPU, torch.float32, kv_dtype=kv_dtype)

    assert reason is not None
    assert "differ from fp64" in reason


def test_wrong_results_are_found(
    interpreted: dict[str, ModuleType], models: RandomModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If scores are scaled wrongly, the trial says how wrong the results are."""
    rules = interpreted["launch"].ScoreRules
    monkeypatch.setattr(interpreted["triton_attention"], "ScoreRules", lambda scale, *rest: rules(1.1 * scale, *rest))

    reason = interpreted["selftest"].why_attention_fails(read_model_config(models.base), 16, CPU, torch.float32)

    assert reason is not None
    assert "differ from fp64" in reason


def test_a_model_that_the_kernels_do_not_serve_is_told(
    interpreted: dict[str, ModuleType], models: RandomModels
) -> None:
    """For too many query heads over one KV head, the trial returns the reason and does not raise."""
    wide = replace(read_model_config(models.base), num_heads=512, num_kv_heads=2)

    reason = interpreted["selftest"].why_attention_fails(wide, 16, CPU, torch.float32)

    assert reason is not None
    assert "256 query heads" in reason
