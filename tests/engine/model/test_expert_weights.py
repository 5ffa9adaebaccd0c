"""Checkpoints with experts: the layouts that are read, and what is refused in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.model.mlp_weights import AnyLinear, RoutedWeights
from graftwork.engine.model.weights import DecoderWeights, load_decoder_weights, open_weights
from graftwork.engine.parallel.ranks import check_divisible
from graftwork.engine.quantization.linear import QuantizedLinear
from graftwork.engine.quantization.mxfp4 import from_mxfp4
from graftwork.platform.errors import InvalidRequest
from tests.engine.expert_families import EXPERT_FAMILIES
from tests.engine.mxfp4_checkpoints import make_mxfp4

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes a random model of a family, as transformers does."""

    def save(name: str, **options: Any) -> Path:
        torch.manual_seed(3)
        model: Any = AutoModelForCausalLM.from_config(EXPERT_FAMILIES[name], dtype=torch.float32)  # type: ignore[no-untyped-call]
        folder = tmp_path / f"{name} {options}"
        model.save_pretrained(folder, **options)
        return folder

    return save


def loaded(folder: Path) -> DecoderWeights:
    config = read_model_config(folder)
    return load_decoder_weights(open_weights(folder, config), config, torch.device("cpu"), torch.float32)


def rewrite(folder: Path, change: Callable[[Tensors], None] = lambda tensors: None, **settings: Any) -> Path:
    """Changes the tensors and the settings of a saved model."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def linears_of(weights: DecoderWeights, layer: int) -> list[AnyLinear]:
    routed = weights.layers[layer].mlp
    assert isinstance(routed, RoutedWeights)
    return [linear for expert in routed.experts for linear in expert.linears]


def experts_of(weights: DecoderWeights, layer: int) -> list[torch.Tensor]:
    return [linear.weight for linear in linears_of(weights, layer)]


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "glm4-moe"])
def test_both_layouts_hold_the_same_experts(saved: Callable[..., Path], name: str) -> None:
    """The tensors of single experts and those of all experts together are the same weights, in one order."""
    apart, joined = saved(name), saved(name, save_original_format=False)
    names = [load_file(folder / "model.safetensors").keys() for folder in (apart, joined)]
    assert [any(one.endswith("mlp.experts.gate_up_proj") for one in each) for each in names] == [False, True]

    pairs = [experts_of(loaded(folder), 2) for folder in (apart, joined)]

    assert len(pairs[0]) == 2 * EXPERT_FAMILIES[name].num_local_experts
    assert all(torch.equal(*pair) for pair in zip(*pairs, strict=True))


def test_mxfp4_is_dequantised_as_transformers_does() -> None:
    """Every number of 4 bits under every power of two has the bits that transformers gives it."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16).repeat(1, 32, 1, 1)
    scales = torch.arange(64, 192, dtype=torch.uint8).view(1, 128, 1).expand(-1, -1, 4).contiguous()

    ours = from_mxfp4(blocks, scales, torch.bfloat16)

    theirs = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def small_gpt_oss() -> GptOssConfig:
    settings = EXPERT_FAMILIES["gpt-oss"].to_dict() | {"hidden_size": 64, "intermediate_size": 32}
    return GptOssConfig(**settings)


def test_a_checkpoint_in_mxfp4_has_the_weights_of_its_plain_form(tmp_path: Path) -> None:
    """gpt-oss as published: blocks and scales in place of the experts' weights, with biases beside them."""
    plain, packed = make_mxfp4(tmp_path, small_gpt_oss())

    one, other = (experts_of(loaded(folder), 2) for folder in (plain, packed))

    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    with pytest.raises(InvalidRequest, match="gate_up_proj_blocks"):
        loaded(rewrite(plain, quantization_config={"quant_method": "mxfp4"}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_that_stays_as_codes_has_the_same_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """Kept for kernels, experts have the dense values bit by bit, the same biases, and four bits and a quarter a weight."""
    _, packed = make_mxfp4(tmp_path, small_gpt_oss())
    config = read_model_config(packed)
    dense, kept = (
        load_decoder_weights(open_weights(packed, config), config, torch.device("cpu"), dtype, keeps_mxfp4=keeps)
        for keeps in (False, True)
    )

    for one, other in zip(linears_of(dense, 2), linears_of(kept, 2), strict=True):
        assert isinstance(other, QuantizedLinear)
        assert torch.equal(other.weight, one.weight)
        assert one.bias is not None
        assert other.bias is not None
        assert torch.equal(other.bias, one.bias)
        num_blocks = -(-one.in_features // 128)
        assert other.num_bytes == one.out_features * num_blocks * (64 + 4) + one.bias.nbytes


@pytest.mark.parametrize(
    ("family", "name", "change", "told"),
    [
        ("mixtral", "block_sparse_moe.experts.3.w2.weight", None, r"no tensor.*experts\.3\.w2"),
        (
            "mixtral",
            "block_sparse_moe.gate.weight",
            lambda tensor: tensor[:3],
            r"gate\.weight.*\(3, 32\), not \(4, 32\)",
        ),
        ("qwen2-moe", "mlp.shared_expert_gate.weight", None, "no tensor.*shared_expert_gate"),
        ("qwen3-moe", "mlp.experts.0.up_proj.weight", lambda tensor: tensor[:, 1:], r"up_proj.*\(24, 31\)"),
        ("glm4-moe", "mlp.gate.e_score_correction_bias", None, "no tensor.*e_score_correction_bias"),
        ("gpt-oss", "mlp.experts.down_proj_bias", None, "no tensor.*down_proj_bias"),
        ("gpt-oss", "mlp.experts.gate_up_proj", lambda tensor: tensor[:3], r"\(3, 32, 80\), not \(4, 32, 80\)"),
        ("gpt-oss", "self_attn.sinks", lambda tensor: tensor[:2], r"sinks.*\(2,\), not \(4,\)"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_refused_by_name(
    saved: Callable[..., Path], family: str, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None, told: str
) -> None:
    """The refusal names the tensor as the file does, with the shape that it should have."""

    def damage(tensors: Tensors) -> None:
        tensor = tensors.pop(f"model.layers.2.{name}")
        if change is not None:
            tensors[f"model.layers.2.{name}"] = change(tensor)

    with pytest.raises(InvalidRequest, match=told):
        loaded(rewrite(saved(family), damage))


def test_a_surplus_expert_is_refused(saved: Callable[..., Path]) -> None:
    """An expert beyond those of config.json belongs to another model."""
    extra = {"model.layers.1.mlp.experts.6.down_proj.weight": torch.ones(32, 24)}

    with pytest.raises(InvalidRequest, match=r"experts\.6\.down_proj"):
        loaded(rewrite(saved("qwen3-moe"), lambda tensors: tensors.update(extra)))


def test_the_layer_for_drafts_of_glm_is_left_out(saved: Callable[..., Path]) -> None:
    """GLM's checkpoints hold a layer that predicts drafts, as config.json says; without its setting it is refused."""
    extra = {"model.layers.3.eh_proj.weight": torch.ones(32, 64)}
    folder = rewrite(saved("glm4-moe"), lambda tensors: tensors.update(extra), num_nextn_predict_layers=1)

    assert len(loaded(folder).layers) == 3
    with pytest.raises(InvalidRequest, match="eh_proj"):
        loaded(rewrite(folder, num_nextn_predict_layers=0))


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("mixtral", {"router_bias": True}, "router_bias True"),
        ("qwen2-moe", {"n_group": 2}, "n_group 2"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts or num_experts"),
        ("qwen3-moe", {"num_experts": 8}, "num_experts or num_local_experts"),
        ("glm4-moe", {"n_group": 3}, "n_group 3"),
        ("qwen3-moe", {"mlp_only_layers": "all"}, "mlp_only_layers"),
        ("gpt-oss", {"swiglu_limit": -1}, "swiglu_limit"),
        ("gpt-oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 40}, "multiples of 32"),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ],
)
def test_a_setting_that_is_not_served_is_refused_by_name(
    saved: Callable[..., Path], family: str, settings: dict[str, Any], told: str
) -> None:
    """Settings that are unknown for the architecture, or contradict each other, are refused before weights are read."""
    folder = rewrite(saved(family), **settings)

    with pytest.raises(InvalidRequest, match=told):
        read_model_config(folder)


def test_models_with_experts_are_served_by_one_device(saved: Callable[..., Path]) -> None:
    """Tensor parallelism is refused in one sentence."""
    model: ModelConfig = read_model_config(saved("mixtral"))

    check_divisible(model, 1)
    with pytest.raises(InvalidRequest, match="models with experts are served by one device"):
        check_divisible(model, 2)
