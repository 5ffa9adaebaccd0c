"""Models with experts where Triton computes all but the experts, with interpreted kernels, against transformers and peft."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, PreTrainedConfig, Qwen2MoeConfig

from graftwork.platform.ids import RequestId
from tests.engine.expert_families import CHOICE, EXPERT_KINDS, EXPERTS, GPT_OSS
from tests.engine.families import ONE_LAYER, make_family
from tests.engine.runner.test_decoder_parity import random_prompt
from tests.engine.runner.test_model_families import check_rows, recorded

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("engine_interprets_all"),
]
TRITON = dict.fromkeys(("attention_backend", "row_kernels", "lora_kernels"), "triton")
MODELS: dict[str, PreTrainedConfig] = {
    "gpt-oss": GptOssConfig(**ONE_LAYER, **GPT_OSS),
    "qwen2-moe": Qwen2MoeConfig(
        **ONE_LAYER | {"sliding_window": None}, **CHOICE, num_experts=6, shared_expert_intermediate_size=40
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_kernels_around_experts_equal_peft(tmp_path: Path, name: str) -> None:
    """Sinks, routers, shared experts and their adapters go through the kernels; torch adds what experts get."""
    torch.set_num_threads(1)
    kind = {EXPERTS: EXPERT_KINDS[name][EXPERTS]}
    family = make_family(MODELS[name], tmp_path, (EXPERTS,), kind)
    driver = family.engine(max_batch_tokens=8, max_running=3, **TRITON)
    driver.warm(EXPERTS)
    recorder, asked = recorded(driver), dict[RequestId, Any]()

    for number, adapter in enumerate([EXPERTS, None, EXPERTS]):
        prompt = random_prompt(Random(number), 2 + 4 * number)
        driver.submit(prompt, adapter=adapter, max_tokens=2, ignore_eos=True)
        asked[list(driver.outcomes)[-1]] = (prompt, adapter)
    driver.finish()

    assert type(driver.engine.runner.forward).__name__ == "PackedForward"
    assert len(recorder.rows) == 6
    check_rows(recorder, driver, family, asked)
