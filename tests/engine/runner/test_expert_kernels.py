"""Models with experts computed by Triton, with interpreted kernels, against transformers and peft."""

from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from graftwork.engine.quantization.linear import QuantizedLinear
from graftwork.platform.ids import RequestId
from tests.engine.expert_families import CHOICE, EXPERT_KINDS, EXPERTS, GPT_OSS
from tests.engine.families import ONE_LAYER, Family, load_model, make_adapter, make_family
from tests.engine.mxfp4_checkpoints import make_mxfp4
from tests.engine.quantization.checkpoints import FORMS, write
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


CODES = TRITON | dict.fromkeys(("weight_kernels", "expert_kernels"), "triton")
OF_WHOLE_GROUPS = ONE_LAYER | {"hidden_size": 64, "intermediate_size": 64}
QWEN = Qwen3MoeConfig(
    **OF_WHOLE_GROUPS | {"sliding_window": None},
    **CHOICE | {"moe_intermediate_size": 32, "head_dim": 16},
    num_experts=6,
    norm_topk_prob=True,
)


def family_of_codes(form: str, folder: Path) -> Family:
    """A checkpoint of one layer whose experts are codes, with an adapter on experts, and its dense weights in peft."""
    torch.set_num_threads(1)
    name = "gpt-oss" if form == "mxfp4" else "qwen3-moe"
    if form == "mxfp4":
        config = GptOssConfig(**OF_WHOLE_GROUPS, **GPT_OSS)
        dense, packed = make_mxfp4(folder, config, least_power=117)
    else:
        torch.manual_seed(3)
        model: Any = AutoModelForCausalLM.from_config(QWEN, dtype=torch.float32)  # type: ignore[no-untyped-call]
        model.save_pretrained(folder / "model")
        made = write(FORMS[form], folder / "model", folder)
        dense, packed = made.dense_folder, made.folder
    references: dict[str | None, torch.nn.Module] = {None: load_model(dense).requires_grad_(False).train(False)}
    references[EXPERTS] = make_adapter(dense, folder / "adapters" / EXPERTS, **EXPERT_KINDS[name][EXPERTS])
    return Family(packed, references)


@pytest.mark.parametrize("form", ["mxfp4", "fp8 blocks"])
def test_kernels_of_experts_with_codes_equal_peft(tmp_path: Path, form: str) -> None:
    """Experts in MXFP4 and in fp8, with biases and clamped activations where the model has them, give peft's logits on the dense
    weights, with adapters of experts on top. All experts are held as codes, and no token goes through the loop."""
    family = family_of_codes(form, tmp_path)
    driver = family.engine(max_batch_tokens=8, max_running=2, **CODES)
    driver.warm(EXPERTS)
    recorder, asked = recorded(driver), dict[RequestId, Any]()

    for number, adapter in enumerate([EXPERTS, None]):
        prompt = random_prompt(Random(number), 3 + 7 * number)
        driver.submit(prompt, adapter=adapter, max_tokens=2, ignore_eos=True)
        asked[list(driver.outcomes)[-1]] = (prompt, adapter)
    driver.finish()

    forward: Any = driver.engine.runner.forward
    routed = forward.parts.decoder.weights.layers[0].mlp
    assert all(isinstance(linear, QuantizedLinear) for expert in routed.experts for linear in expert.linears)
    assert len(recorder.rows) == 4
    check_rows(recorder, driver, family, asked)
    stats = driver.loop.stats()
    assert (stats.expert_torch_rows, stats.fallback_experts, stats.fallback_weights) == (0, 0, 0)
    assert stats.expert_kernel_rows >= 3 + 10 + 2


@pytest.mark.usefixtures("rules_of_a_gpu")
def test_a_graph_of_experts_with_codes_does_not_depend_on_the_choice(
    tmp_path: Path, interpreted_engine: dict[str, ModuleType], recorder: Recorder
) -> None:
    """Steps with other tokens, and so with other experts, have the same grids, numbers and addresses in every launch of a
    graph on codes, whose gates and ups have orders and zero points of their own."""
    family = family_of_codes("gptq desc_act", tmp_path)
    driver = family.engine(max_batch_tokens=8, max_running=2, max_draft_tokens=0, **CODES)
    with_graphs(driver, interpreted_engine["graftwork.engine.runner.step_graphs"], recorder, max_mixed_rows=4)

    driver.submit(random_prompt(Random(1), 2), max_tokens=3, ignore_eos=True)
    driver.finish()

    assert driver.loop.stats().graph_steps > 0
    several = [replays for replays in recorder.replays.values() if len(replays) > 1]
    assert several
    names = ("count_rows", "arrange_rows", "sort_features", "sum_parts", "multiply_code_tiles")
    wanted = {f"{name}_kernel" for name in names}
    for first, *others in several:
        assert wanted <= {name for name, *_ in first}
        for other in others:
            assert list(differences(first, other)) == []
