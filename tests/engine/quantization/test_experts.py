"""Experts whose weights are quantised: as transformers and peft compute their dense weights, row by row and bit by bit."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from graftwork.api.cli.plan.sizes import ModelSizes
from graftwork.engine.model.config import read_model_config
from graftwork.engine.model.mlp_weights import RoutedWeights
from graftwork.engine.model.weights import DecoderWeights, load_decoder_weights, open_weights
from graftwork.engine.quantization.linear import QuantizedLinear
from graftwork.engine.quantization.scheme import round_to_nearest
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import RequestId
from tests.engine.engine_driver import EngineDriver
from tests.engine.expert_families import EXPERT_KINDS
from tests.engine.families import Family, load_model, make_adapter
from tests.engine.quantization.checkpoints import FORMS, SIZES, Checkpoint, change_config, write
from tests.engine.runner.test_decoder_parity import random_prompt
from tests.engine.runner.test_model_families import check_rows, recorded

CHOICE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
HEADS: dict[str, Any] = {"head_dim": 16}
GPT_OSS: dict[str, Any] = SIZES | HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, PreTrainedConfig] = {
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **CHOICE, **HEADS, num_experts=6, norm_topk_prob=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES, **CHOICE, num_experts=5, shared_expert_intermediate_size=96, mlp_only_layers=[0]
    ),
    "glm4-moe": Glm4MoeConfig(**SIZES, **CHOICE, **HEADS, n_routed_experts=8, num_mtp_layers=0),
}
"""Models whose sizes are whole groups."""
EXACT = ("fp8 blocks", "fp8 tensor, static")
"""Forms with scales in fp32, of which no library rounds the product of a code and a scale."""
SERVED = [
    *(("qwen3-moe", form) for form in FORMS),
    ("mixtral", "awq"),
    ("qwen2-moe", "gptq"),
    ("qwen2-moe", "fp8 blocks"),
]
SERVED += [("glm4-moe", "fp8 channels"), ("mixtral", "fp8 blocks"), ("glm4-moe", "fp8 blocks")]
CPU = torch.device("cpu")
Make = Callable[[str, str], Checkpoint]
MakeFamily = Callable[[str, str], Family]


def make_routed(name: str, folder: Path, **options: Any) -> Path:
    """A random model of a family, as transformers writes it."""
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="session")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a function that writes the checkpoint of a family in a form, on first use."""
    plain = cache(lambda name: make_routed(name, tmp_path_factory.mktemp("plain")))
    return cache(lambda name, form: write(FORMS[form], plain(name), tmp_path_factory.mktemp("form")))


@pytest.fixture(scope="session")
def family_of(made_of: Make) -> MakeFamily:
    """Returns a function that makes peft's adapters on the dense weights of a quantised checkpoint, on first use."""
    torch.set_num_threads(1)

    def make(name: str, form: str) -> Family:
        made, kinds = made_of(name, form), EXPERT_KINDS[name]
        base, adapters = made.dense_folder, made.folder.parent / "adapters"
        references: dict[str | None, torch.nn.Module] = {None: load_model(base).requires_grad_(False).train(False)}
        references |= {kind: make_adapter(base, adapters / kind, **options) for kind, options in kinds.items()}
        return Family(made.folder, references)

    return cache(make)


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    config = read_model_config(folder)
    return load_decoder_weights(open_weights(folder, config), config, CPU, dtype)


def experts_of(weights: DecoderWeights, layer: int = 1) -> list[Any]:
    """The linear layers of all experts of a layer."""
    routed = weights.layers[layer].mlp
    assert isinstance(routed, RoutedWeights)
    return [linear for expert in routed.experts for linear in expert.linears]


def dense_experts(made: Checkpoint, layer: int = 1) -> Iterable[torch.Tensor]:
    """The dense weights of the experts of a layer, gate and up joined, as their library computes them."""
    is_mixtral = any(name.endswith("w1") for name in made.dense)
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    downs = [name for name in made.dense if f"layers.{layer}." in name and ".experts." in name and name.endswith(down)]
    for prefix in sorted((name.rpartition(".")[0] for name in downs), key=lambda name: int(name.rpartition(".")[2])):
        yield torch.cat([made.dense[f"{prefix}.{gate}"], made.dense[f"{prefix}.{up}"]])
        yield made.dense[f"{prefix}.{down}"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "form"), SERVED)
def test_dense_experts_are_those_of_the_library(name: str, form: str, dtype: torch.dtype, made_of: Make) -> None:
    """Every expert of every form becomes, bit by bit, the weights that its own library computes, and is held as codes."""
    made = made_of(name, form)
    found, dense = experts_of(loaded(made.folder, dtype)), list(dense_experts(made))

    assert len(found) == len(dense) > 0
    for linear, expected in zip(found, dense, strict=True):
        assert isinstance(linear, QuantizedLinear)
        assert torch.equal(linear.weight, expected.to(dtype))


@pytest.mark.parametrize(("name", "form"), SERVED)
def test_probabilities_are_those_of_the_dense_weights(name: str, form: str, made_of: Make) -> None:
    """Prompts, chunks, decoding and cached prefixes expect what transformers expects of the dense weights.

    Libraries round each weight to the dtype of its scale. Prompts have the same weights bit by bit; the kernel of decoding
    rows rounds nothing.
    """
    made = made_of(name, form)
    family = Family(made.folder, {None: load_model(made.dense_folder).requires_grad_(False).train(False)})
    driver = family.engine(max_batch_tokens=12 if form in EXACT else 256, max_running=4)
    recorder, asked = recorded(driver), dict[RequestId, Any]()
    prompts = [random_prompt(Random(length), length) for length in (19, 4, 23)]

    for prompt in prompts:
        driver.submit(prompt, max_tokens=5, ignore_eos=True)
    driver.finish()
    driver.run(prompts[2], max_tokens=2, ignore_eos=True)

    assert len(recorder.rows) == 3 * 5 + 2
    asked = {request: (prompt, None) for request, prompt in zip(driver.outcomes, [*prompts, prompts[2]], strict=True)}
    distances = _distances(recorder, driver, family, asked)
    assert len(distances[0]) == 4
    assert max(distances[0]) < 1e-4
    assert max(distances[1]) < (1e-4 if form in EXACT else 0.2)


def _distances(
    recorder: Any, driver: EngineDriver, family: Family, asked: dict[RequestId, Any]
) -> tuple[list[float], list[float]]:
    """The largest difference of a log probability in each row, of rows of prompts and of decoding rows."""
    found: tuple[list[float], list[float]] = ([], [])
    for piece, logits in recorder.rows:
        prompt, adapter = asked[piece.request_id]
        tokens = [*prompt, *driver.outcomes[piece.request_id].token_ids][: piece.end]
        with torch.inference_mode():
            expected = family.references[adapter](torch.tensor([tokens])).logits[0, -1]
        distance = (logits.log_softmax(0) - expected.log_softmax(0)).abs().max().item()
        found[piece.end > len(prompt)].append(distance)
    return found


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_adapters_on_quantised_experts_equal_peft(name: str, kernels: str, family_of: MakeFamily) -> None:
    """In one batch, rows of each adapter have peft's logits on the dense weights, in prefill, chunks and decode: LoRA on
    experts, on routers, on shared experts and their gates."""
    family, kinds = family_of(name, "fp8 blocks"), EXPERT_KINDS[name]
    driver = family.engine(
        max_batch_tokens=20, max_running=len(kinds) + 1, lora_kernels=kernels, device_bytes=8 * 2**20
    )
    driver.warm(*kinds)
    recorder, asked = recorded(driver), dict[RequestId, Any]()

    for number, adapter in enumerate([None, *kinds]):
        prompt = random_prompt(Random(number), 5 + 4 * number)
        driver.submit(prompt, adapter=adapter, max_tokens=3, ignore_eos=True)
        asked[list(driver.outcomes)[-1]] = (prompt, adapter)
    driver.finish()

    assert len(recorder.rows) == 3 * (len(kinds) + 1)
    check_rows(recorder, driver, family, asked)


@pytest.mark.parametrize("form", ["fp8 blocks", "gptq desc_act", "packed int4 with zero points", "int8 W8A8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_do_not_change_a_bit(dtype: str, form: str, made_of: Make) -> None:
    """A row has the same bits alone and in a batch whose prompts and decoding rows choose the same experts."""
    family, prompt = Family(made_of("qwen3-moe", form).folder, {}), random_prompt(Random(5), 17)

    def rows(crowd: int) -> list[torch.Tensor]:
        driver = family.engine(max_running=8, dtype=dtype)
        recorder = recorded(driver)
        for number in range(crowd):
            driver.submit(random_prompt(Random(number), 3 + 7 * number), max_tokens=6, ignore_eos=True)
        driver.submit(prompt, max_tokens=6, ignore_eos=True)
        subject = list(driver.outcomes)[-1]
        driver.finish()
        return [logits for piece, logits in recorder.rows if piece.request_id == subject]

    alone, crowded = rows(0), rows(5)

    assert len(alone) == 6
    assert all(torch.equal(one, other) for one, other in zip(alone, crowded, strict=True))


def rounded_values(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """A weight rounded to the nearest code of a symmetric range, in groups of input features; zeros stay zeros."""
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    parts = weight.view(len(weight), -1, group)
    scales = parts.abs().amax(dim=2, keepdim=True) / ((highest - lowest) / 2)
    values: torch.Tensor = ((parts / scales).round().clamp(lowest, highest) * scales).view_as(weight)
    return values


@pytest.mark.parametrize(("quantization", "bits", "group"), [("int8", 8, 64), ("int4", 4, 64)])
@pytest.mark.parametrize("layout", ["apart", "joined"])
def test_plain_experts_are_rounded_at_load(
    quantization: str, bits: int, group: int, layout: str, tmp_path: Path
) -> None:
    """--quantization rounds experts of both layouts to the nearest code, and leaves the router as it is."""
    folder = make_routed("qwen3-moe", tmp_path / "base", save_original_format=layout == "apart")
    stored = load_file(make_routed("qwen3-moe", tmp_path / "apart") / "model.safetensors")
    driver = Family(folder, {}).engine(quantization=quantization)
    model = replace(read_model_config(folder), quantization=round_to_nearest(quantization, None))
    weights = load_decoder_weights(open_weights(folder, model), model, CPU, torch.float32)

    assert torch.equal(weights.module(1, "router")[0], stored["model.layers.1.mlp.gate.weight"])
    for number, linear in enumerate(experts_of(weights)):
        prefix = f"model.layers.1.mlp.experts.{number // 2}"
        names = ("down_proj",) if number % 2 else ("gate_proj", "up_proj")
        plain = torch.cat([stored[f"{prefix}.{name}.weight"] for name in names])
        assert isinstance(linear, QuantizedLinear)
        torch.testing.assert_close(linear.weight, rounded_values(plain, bits, group), atol=1e-6, rtol=1e-5)
    assert driver.run([5, 17, 40], ignore_eos=True).error is None


def test_biases_join_the_products_of_rounded_experts(tmp_path: Path) -> None:
    """gpt-oss in bf16, rounded at load, has the experts' biases and transformers' logits of the rounded weights."""
    torch.manual_seed(3)
    config = GptOssConfig(**GPT_OSS)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                for expert in parameter:
                    expert.copy_(rounded_values(expert.t().contiguous(), 8, expert.shape[0]).t())
            elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
                parameter.copy_(rounded_values(parameter, 8, parameter.shape[1]))
    family = Family(tmp_path / "base", {None: model.requires_grad_(False).train(False)})
    driver = family.engine(quantization="int8", max_batch_tokens=7)
    recorder = recorded(driver)
    prompt = random_prompt(Random(3), 17)

    driver.run(prompt, max_tokens=4, ignore_eos=True)

    check_rows(recorder, driver, family, dict.fromkeys(driver.outcomes, (prompt, None)))


def test_a_quantised_router_is_made_dense(made_of: Make, tmp_path: Path) -> None:
    """A router that the checkpoint has quantised is read as its library computes it."""
    made, form = made_of("qwen3-moe", "fp8 tensor, static"), FORMS["fp8 tensor, static"]
    path, module = tmp_path / "model.safetensors", "model.layers.1.mlp.gate"
    tensors = load_file(made.folder / "model.safetensors")
    parts, dense = form.pack(6, 64, torch.Generator().manual_seed(1))
    del tensors[f"{module}.weight"]
    save_file(tensors | {f"{module}.{last}": part for last, part in parts.items()}, path, {"format": "pt"})
    (tmp_path / "config.json").write_text((made.folder / "config.json").read_text())

    router, _ = loaded(tmp_path).module(1, "router")

    assert torch.equal(router, dense)


def test_gptq_exceptions_stay_plain(tmp_path: Path) -> None:
    """Layers that GPTQModel's `dynamic` excludes are plain, and a pattern with other settings is refused."""
    form, plain = FORMS["gptq"], make_routed("qwen3-moe", tmp_path / "plain")
    made = write(form, plain, tmp_path, skip=("0.up_proj", "o_proj"))
    excluded: dict[str, dict[str, int]] = {"-:.*experts\\.0\\.up_proj": {}, "-:.*o_proj$": {}}
    change_config(made.folder, quantization_config=form.config | {"dynamic": excluded})
    stored = load_file(plain / "model.safetensors")

    weights = loaded(made.folder)

    up = stored["model.layers.1.mlp.experts.0.up_proj.weight"]
    gate = made.dense["model.layers.1.mlp.experts.0.gate_proj"]
    assert torch.equal(experts_of(weights)[0].weight, torch.cat([gate, up]))
    assert torch.equal(weights.module(1, "o_proj")[0], stored["model.layers.1.self_attn.o_proj.weight"])
    change_config(made.folder, quantization_config=form.config | {"dynamic": {"+:.*down_proj$": {"bits": 8}}})
    with pytest.raises(InvalidRequest, match=r"dynamic with '\+:\.\*down_proj\$' is not served for gptq"):
        read_model_config(made.folder)


@pytest.mark.parametrize(
    ("form", "name", "message"),
    [
        ("gptq", "experts.3.up_proj.scales", r"no tensor '.*experts.3.up_proj.scales'"),
        ("awq", "experts.0.down_proj.qzeros", r"no tensor '.*experts.0.down_proj.qzeros'"),
        ("fp8 blocks", "experts.5.gate_proj.weight_scale_inv", r"no tensor '.*experts.5.gate_proj.weight_scale_inv'"),
        ("fp8 channels", "experts.1.down_proj.weight", r"no tensor '.*experts.1.down_proj.weight'"),
        ("packed int4", "gate.weight", r"no tensor '.*mlp.gate.weight'"),
    ],
)
def test_a_missing_tensor_is_refused_by_name(form: str, name: str, message: str, made_of: Make, tmp_path: Path) -> None:
    """A quantised expert or a router that is not whole is refused by the name of what is missing."""
    made = made_of("qwen3-moe", form)
    tensors = load_file(made.folder / "model.safetensors")
    del tensors[f"model.layers.1.mlp.{name}"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((made.folder / "config.json").read_text())

    with pytest.raises(InvalidRequest, match=message):
        loaded(tmp_path)


def test_experts_in_mxfp4_are_not_rounded_again(tmp_path: Path) -> None:
    """--quantization is refused for a checkpoint whose experts are MXFP4."""
    torch.manual_seed(3)
    config = GptOssConfig(**GPT_OSS)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})

    with pytest.raises(InvalidRequest, match=r"quantised already \(mxfp4\): leave --quantization out"):
        Family(tmp_path, {}).engine(quantization="int8")


@pytest.mark.parametrize(
    ("name", "form"), [("qwen3-moe", "int8 W8A8"), ("qwen2-moe", "fp8 channels"), ("mixtral", "awq")]
)
def test_the_plan_counts_experts_as_codes(name: str, form: str, made_of: Make) -> None:
    """The bytes that `graftwork plan` computes are those of the loaded codes, but for padding and scales."""
    made = made_of(name, form)
    settings = json.loads((made.folder / "config.json").read_text())
    sizes = ModelSizes.read(made.folder, "bfloat16")
    weights = loaded(made.folder, torch.bfloat16)
    linears = [linear for layer in weights.layers for linear in layer.linears if isinstance(linear, QuantizedLinear)]
    codes = sum(linear.out_features * linear.in_features for linear in linears)

    bits = sizes.model.quantization.bits_per_weight if sizes.model.quantization is not None else 16.0
    expected = 2 * (sizes.parameters - codes) + int(codes * bits / 8)

    assert settings["quantization_config"]
    assert sizes.weights_bytes == expected
