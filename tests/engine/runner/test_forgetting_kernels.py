"""Tests of whole engines with interpreted kernels whose requests forget: rolling windows and budgets of KV, against the
references and beside exact requests."""

import logging
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.attention.streaming_llama import StreamingLlama
from tests.engine.engine_driver import EngineDriver
from tests.engine.kv.snapkv_llama import SnapKvLlama
from tests.engine.lora.test_lifecycle import CountingAdapterSource
from tests.engine.lora.triton.engine_runs import engine_of
from tests.engine.random_models import make_base, reference_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("engine_interprets_all"),
]
TRITON: dict[str, Any] = dict.fromkeys(("attention_backend", "row_kernels", "lora_kernels"), "triton")
BUDGET, SINKS, WINDOW = 64, 2, 11


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_base(tmp_path_factory.mktemp("forgetting") / "base", num_layers=1)


def engine(base: Path, **options: Any) -> EngineDriver:
    sizes: dict[str, Any] = {"max_batch_tokens": 48, "max_running": 4, "max_draft_tokens": 0, "host_kv_bytes": 2**17}
    driver: EngineDriver = engine_of(base, CountingAdapterSource({}), **sizes | TRITON | options)
    return driver


def prompt_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(2, 97) for _ in range(length)]


@pytest.mark.parametrize("overlap_steps", [False, True])
def test_rows_that_forget_stand_beside_exact_ones(base: Path, overlap_steps: bool) -> None:
    """In packed steps of prompts and decoding rows, a request with a window has the tokens of StreamingLLM, one with a budget
    those of SnapKV, and an exact one the log-probabilities that it has alone, bit for bit."""
    prompts = [prompt_of(seed, length) for seed, length in enumerate((40, 70, 30))]
    options: list[dict[str, Any]] = [{"attention_window": WINDOW, "attention_sinks": SINKS}, {"kv_budget": BUDGET}, {}]
    driver = engine(base, overlap_steps=overlap_steps)
    asked: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "logprobs": 0}

    found = [driver.submit(one, **asked, **more) for one, more in zip(prompts, options, strict=True)]
    driver.finish()
    alone = engine(base, overlap_steps=overlap_steps).run(prompts[2], **asked)

    model = reference_model(base, None)
    text = [*prompts[0], *found[0].token_ids]
    streamed = StreamingLlama(model, SINKS, WINDOW).logits(text)[len(prompts[0]) - 1 : -1]
    assert type(driver.engine.runner).__name__ == "ModelRunner"
    assert type(driver.engine.runner.forward).__name__ == "PackedForward"
    assert found[0].token_ids == streamed.argmax(-1).tolist()
    assert found[1].token_ids == SnapKvLlama(model, BUDGET, driver.engine.kv_cache.page_tokens).answer(prompts[1], 6)
    assert found[2].token_ids == alone.token_ids
    assert [one.logprob for one in found[2].logprobs] == [one.logprob for one in alone.logprobs]
    driver.engine.scheduler.check_integrity()


def test_without_kernels_for_windows_torch_computes_such_rows(
    base: Path,
    interpreted_engine: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where queries are turned back wrongly, the trial at start finds it, says so, and leaves the other kernels in use: a
    request with a window has the tokens of StreamingLLM, and one without the log-probabilities that it has beside kernels."""
    prompts = [prompt_of(seed, 40) for seed in range(2)]
    asked: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "logprobs": 0}
    whole = engine(base).run(prompts[1], **asked)
    module = interpreted_engine["graftwork.engine.attention.triton_attention"]
    monkeypatch.setattr(module, "turn_distances", lambda placed, num_rows: np.zeros(num_rows, np.int32))

    with caplog.at_level(logging.WARNING):
        driver = engine(base)
    options: list[dict[str, Any]] = [{"attention_window": WINDOW, "attention_sinks": SINKS}, {}]
    found = [driver.submit(one, **asked, **more) for one, more in zip(prompts, options, strict=True)]
    driver.finish()

    assert [one.message for one in caplog.records] == ["window_kernels_unavailable"]
    text = [*prompts[0], *found[0].token_ids]
    streamed = StreamingLlama(reference_model(base, None), SINKS, WINDOW).logits(text)[len(prompts[0]) - 1 : -1]
    assert found[0].token_ids == streamed.argmax(-1).tolist()
    assert [one.logprob for one in found[1].logprobs] == [one.logprob for one in whole.logprobs]
    assert type(driver.engine.runner.forward).__name__ == "PackedForward"


def test_texts_are_longer_than_the_context(base: Path) -> None:
    """A text over the border of a context of 256 tokens and one behind it have the tokens of StreamingLLM, and a plain one
    beside them the log-probabilities that it has alone, bit for bit."""
    driver = engine(base, max_running=3)
    prompts = [prompt_of(seed, length) for seed, length in enumerate((250, 300, 20))]
    asked: dict[str, Any] = {"ignore_eos": True, "logprobs": 0}
    windows: dict[str, Any] = {"attention_window": WINDOW, "attention_sinks": SINKS}

    found = [driver.submit(prompt, max_tokens=12, **asked, **windows) for prompt in prompts[:2]]
    found.append(driver.submit(prompts[2], max_tokens=14, **asked))
    driver.finish()
    alone = engine(base, max_running=3).run(prompts[2], max_tokens=14, **asked)

    model = reference_model(base, None)
    for prompt, one in zip(prompts[:2], found[:2], strict=True):
        streamed = StreamingLlama(model, SINKS, WINDOW).logits([*prompt, *one.token_ids])[len(prompt) - 1 : -1]
        assert one.token_ids == streamed.argmax(-1).tolist()
        chosen = streamed.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.tensor([item.logprob for item in one.logprobs]), chosen, atol=2e-4, rtol=0)
    assert [item.logprob for item in found[2].logprobs] == [item.logprob for item in alone.logprobs]
