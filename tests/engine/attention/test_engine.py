"""Tests of the whole engine with interpreted attention kernels, against the same engine with torch."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3nTextConfig

from tests.engine.families import GEMMA3N, make_family
from tests.engine.lora.test_lifecycle import CountingAdapterSource
from tests.engine.lora.triton.engine_runs import Request, Run, engine_of, run
from tests.engine.random_models import make_base

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("engine_interprets"),
]
REQUESTS = [Request(1), Request(17), Request(30), Request(3)]
"""With 20 tokens a step, the long prompt is computed in chunks beside rows that decode."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_base(tmp_path_factory.mktemp("attention") / "base", num_layers=1)


@pytest.fixture(scope="module")
def windowed(base: Path) -> Path:
    """The same weights as a model whose layers see nine tokens."""
    folder = base.with_name("windowed")
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose last two layers read the keys of those before, with a window of nine tokens and with none."""
    config = Gemma3nTextConfig(
        **GEMMA3N | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
        sliding_window=9,
        num_kv_shared_layers=2,
    )
    return make_family(config, tmp_path_factory.mktemp("sharing"), ()).folder


def both(base: Path, **options: Any) -> tuple[Run, Run]:
    """What the kernels and what torch make of the same requests."""
    of_kernels, of_torch = (
        run(engine_of(base, CountingAdapterSource({}), attention_backend=name, **options), [], REQUESTS, max_tokens=3)
        for name in ("triton", "torch")
    )
    return of_kernels, of_torch


@pytest.mark.parametrize("model", ["base", "windowed", "sharing"])
def test_kernels_make_the_tokens_of_torch(model: str, request: pytest.FixtureRequest) -> None:
    """Prompts, chunks and decoding rows have the tokens and the logits of torch, with and without a window."""
    kernels, plain = both(request.getfixturevalue(model), max_batch_tokens=20)

    assert kernels.token_ids == plain.token_ids
    torch.testing.assert_close(kernels.logits, plain.logits, atol=1e-4, rtol=1e-4)


def test_drafts_change_no_token(base: Path) -> None:
    """A prompt that repeats itself has the same tokens with drafts and without, though drafts were computed."""
    drafting, plain = (
        engine_of(base, CountingAdapterSource({}), attention_backend="triton", max_draft_tokens=most) for most in (6, 0)
    )
    prompt = [5, 6, 7, 8] * 5
    answers = [driver.run(prompt, max_tokens=10, ignore_eos=True) for driver in (drafting, plain)]

    assert answers[0].token_ids == answers[1].token_ids
    assert drafting.loop.stats().drafted_tokens > 0
