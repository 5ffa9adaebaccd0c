"""Models with experts computed by Triton, with interpreted kernels, against transformers and peft."""

from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, PreTrainedConfig, Qwen2MoeConfig

from graftwork.platform.ids import RequestId
from tests.engine.expert_families import CHOICE, EXPERT_KINDS, EXPERTS, GPT_OSS
from tests.engine.families import ONE_LAYER, make_family
from tests.engine.runner.test_decoder_parity import random_prompt
from tests.engine.runner.test_model_families import check_rows, recorded
from tests.engine.runner.test_step_graphs import Recorder, differences, recorder, with_graphs

__all__ = ["recorder"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("engine_interprets_all"),
]
TRITON = dict.fromkeys(("attention_backend", "row_kernels", "lora_kernels"), "triton")
EXPERT_PATHS = {"triton": "expert_kernel_rows", "torch": "expert_torch_rows"}
MODELS: dict[str, PreTrainedConfig] = {
    "gpt-oss": GptOssConfig(**ONE_LAYER, **GPT_OSS),
    "qwen2-moe": Qwen2MoeConfig(
        **ONE_LAYER | {"sliding_window": None}, **CHOICE, num_experts=6, shared_expert_intermediate_size=40
    ),
}


@pytest.mark.parametrize("experts", EXPERT_PATHS)
@pytest.mark.parametrize("name", MODELS)
def test_kernels_of_experts_and_around_them_equal_peft(tmp_path: Path, name: str, experts: str) -> None:
    """Sinks, routers, shared experts and their adapters go through the kernels, and so do experts or the loop over them;
    torch adds what adapters give to experts. Each token is counted by what computed its experts."""
    torch.set_num_threads(1)
    kind = {EXPERTS: EXPERT_KINDS[name][EXPERTS]}
    family = make_family(MODELS[name], tmp_path, (EXPERTS,), kind)
    driver = family.engine(max_batch_tokens=8, max_running=3, expert_kernels=experts, **TRITON)
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
    stats = driver.loop.stats()
    counted = {path: getattr(stats, path) for path in EXPERT_PATHS.values()}
    assert counted[EXPERT_PATHS[experts]] >= 2 + 6 + 10 + 3
    assert sum(counted.values()) == counted[EXPERT_PATHS[experts]]


@pytest.mark.usefixtures("rules_of_a_gpu")
def test_a_graph_of_experts_does_not_depend_on_the_choice(
    tmp_path: Path, interpreted_engine: dict[str, ModuleType], recorder: Recorder
) -> None:
    """Steps with other tokens, and so with other experts, have the same grids, numbers and addresses in every launch of a
    graph, among them those of experts, and torch's tokens."""
    torch.set_num_threads(1)
    family = make_family(MODELS["qwen2-moe"], tmp_path, ())
    prompts = [random_prompt(Random(number), 2 + 3 * number) for number in range(3)]
    engines = [
        family.engine(max_running=4, max_draft_tokens=0, expert_kernels=one, **TRITON) for one in ("triton", "torch")
    ]
    with_graphs(engines[0], interpreted_engine["graftwork.engine.runner.step_graphs"], recorder)
    tokens = []

    for driver in engines:
        outcomes = [driver.submit(prompt, max_tokens=4, ignore_eos=True) for prompt in prompts]
        driver.finish()
        recorder.launches = []  # what the other engine launches belongs to no graph
        tokens.append([outcome.token_ids for outcome in outcomes])

    assert tokens[0] == tokens[1]
    assert engines[0].loop.stats().graph_steps > 0
    several = [replays for replays in recorder.replays.values() if len(replays) > 1]
    assert several
    for first, *others in several:
        assert {"count_rows_kernel", "arrange_rows_kernel", "multiply_tiles_kernel"} <= {name for name, *_ in first}
        for other in others:
            assert list(differences(first, other)) == []
