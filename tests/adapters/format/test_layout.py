"""Tests of an adapter's tensors against a model: each fault is refused by its exact tensor."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graftwork.adapters.format.adapter_spec import AdapterSpec
from graftwork.adapters.format.layout import parse_adapter
from graftwork.platform.errors import ValidationFailed
from tests.adapters.adapter_files import (
    DESCRIPTION,
    PREFIX,
    Q0_A,
    Q0_B,
    Tensors,
    config_bytes,
    container,
    entries,
    tensors,
    weights_bytes,
)


def parse(found: Tensors | None = None, **config: Any) -> AdapterSpec:
    return parse_adapter(config_bytes(**config), weights_bytes(found), DESCRIPTION)


def refusal(found: Tensors | None = None, **config: Any) -> ValidationFailed:
    with pytest.raises(ValidationFailed) as caught:
        parse(found, **config)
    return caught.value


def renamed(change: tuple[str, str]) -> Tensors:
    return {name.replace(*change): tensor for name, tensor in tensors().items()}


def test_every_module_is_found_with_its_rank_and_scale() -> None:
    """The parsed adapter lists the modules by layer and by the model's order of targets."""
    spec = parse()

    assert [(module.layer, module.target) for module in spec.modules] == [
        (layer, target) for layer in (0, 1) for target in ("q_proj", "v_proj", "down_proj")
    ]
    assert {(module.rank, module.scale) for module in spec.modules} == {(4, 2.0)}
    assert (spec.rank, spec.target_modules) == (4, ("q_proj", "v_proj", "down_proj"))


@pytest.mark.parametrize(
    "change",
    [
        ("base_model.model.", ""),
        ("base_model.model.model.", "base_model.model."),
        ("base_model.model.model.", ""),
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        ("base_model.model.model.", "language_model."),
        (".weight", ".default.weight"),
    ],
)
def test_the_usual_spellings_of_names_mean_the_same(change: tuple[str, str]) -> None:
    """Names with or without PEFT's prefix and the adapter's name give the same adapter."""
    places = [(module.layer, module.target, module.rank, module.scale) for module in parse(renamed(change)).modules]

    assert places == [(module.layer, module.target, module.rank, module.scale) for module in parse().modules]


def test_the_scale_follows_rslora_and_the_patterns() -> None:
    """The scale is alpha / sqrt(r) under rsLoRA; the first pattern that matches a module sets its rank and alpha."""
    found = tensors()
    found[Q0_A], found[Q0_B] = found[Q0_A][:3], found[Q0_B][:, :3]

    spec = parse(
        found,
        use_rslora=True,
        rank_pattern={"layers.0.self_attn.q_proj": 3, "q_proj": 4},
        alpha_pattern={r"layers\.1\..*": 5, "v_proj": 6.5},
    )

    scales = {(module.layer, module.target): module.scale for module in spec.modules}
    assert scales == {
        (0, "q_proj"): 8 / math.sqrt(3),
        (0, "v_proj"): 6.5 / math.sqrt(4),
        (0, "down_proj"): 8 / math.sqrt(4),
        (1, "q_proj"): 5 / math.sqrt(4),
        (1, "v_proj"): 5 / math.sqrt(4),
        (1, "down_proj"): 5 / math.sqrt(4),
    }


def test_a_bfloat16_and_a_float16_file_are_read() -> None:
    """A file in bfloat16 or float16 is read."""
    halves = {name: tensor.astype(np.float16) for name, tensor in tensors().items()}
    brains = {name: (tensor.view(np.uint32) >> 16).astype(np.uint16) for name, tensor in tensors().items()}

    assert {module.A.dtype for module in parse(halves).modules} == {"F16"}
    assert {module.A.dtype for module in parse(brains).modules} == {"BF16"}


def test_a_file_without_tensors_is_refused() -> None:
    """A file without tensors is refused, because it would answer like the base model."""
    assert refusal({}).param == "weights"


def test_a_factor_without_its_counterpart_is_refused() -> None:
    """A factor A without its B, or B without its A, is refused."""
    for missing, left in ((Q0_A, Q0_B), (Q0_B, Q0_A)):
        found = tensors()
        del found[missing]

        assert refusal(found).param == f"weights.{left}"


def test_one_module_in_two_spellings_is_refused() -> None:
    """A file that has one module under two names is refused."""
    twice = Q0_A.removeprefix("base_model.model.")
    found = tensors() | {twice: tensors()[Q0_A]}

    assert refusal(found).param == f"weights.{twice}"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (Q0_A, (4, 31)),
        (Q0_A, (3, 32)),
        (Q0_A, (32, 4)),
        (Q0_A, (4, 32, 1)),
        (Q0_A, (0, 32)),
        (Q0_A, (128,)),
        (Q0_B, (32, 5)),
        (Q0_B, (16, 4)),
        (f"{PREFIX}.1.self_attn.v_proj.lora_B.weight", (32, 4)),
        (f"{PREFIX}.1.mlp.down_proj.lora_A.weight", (4, 32)),
    ],
)
def test_a_wrong_shape_is_refused_by_the_tensors_name(name: str, shape: tuple[int, ...]) -> None:
    """A shape that differs from the model's module or the configured rank is refused with the tensor's name."""
    assert refusal(tensors() | {name: np.zeros(shape, np.float32)}).param == f"weights.{name}"


def test_a_rank_that_contradicts_the_config_is_refused() -> None:
    """A tensor of another rank than the config's is refused, because its scale would be wrong."""
    error = refusal(r=8)

    assert error.param == f"weights.{Q0_A}"
    assert "rank 8" in error.message


@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}.2.self_attn.q_proj.lora_A.weight",
        f"{PREFIX}.99999.self_attn.q_proj.lora_A.weight",
        f"{PREFIX}.00.self_attn.q_proj.lora_A.weight",
        f"{PREFIX}.-1.self_attn.q_proj.lora_A.weight",
        f"{PREFIX}.٠.self_attn.q_proj.lora_A.weight",
        f"{PREFIX}.0.mlp.q_proj.lora_A.weight",
        f"{PREFIX}.0.self_attn.qkv_proj.lora_A.weight",
        f"{PREFIX}.0.self_attn.q_proj.lora_C.weight",
        f"{PREFIX}.0.self_attn.q_proj.lora_A.other.weight",
        f"{PREFIX}.0.self_attn.q_proj.lora_A.weight\n",
        f" {PREFIX}.0.self_attn.q_proj.lora_A.weight",
        f"transformer.{PREFIX}.0.self_attn.q_proj.lora_A.weight",
        "../../etc/passwd",
        "/absolute",
        "a\0b",
        "\ud800",
        "x" * 5000,
        "",
        "base_model.model.score.weight",
    ],
)
def test_a_tensor_that_has_no_place_is_refused_by_its_name(name: str) -> None:
    """A tensor that belongs to no module is refused; the error shows its name printable and short."""
    header, data = entries(tensors())
    header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}

    with pytest.raises(ValidationFailed) as caught:
        parse_adapter(config_bytes(), container(header, data + b"\0" * 4), DESCRIPTION)

    param = caught.value.param or ""
    assert param.startswith("weights.")
    assert param.isprintable()
    assert param.isascii() or param.endswith("…")
    assert len(param) < 1200
    if name.isascii() and name.isprintable() and len(name) < 200:
        assert param == f"weights.{name}"
    json.dumps(caught.value.body()).encode()
    caught.value.message.encode()


def test_a_module_that_the_model_lacks_is_refused() -> None:
    """A target that the model does not have is refused."""
    narrow = replace(DESCRIPTION, target_shapes={"q_proj": (32, 32), "v_proj": (16, 32)})

    with pytest.raises(ValidationFailed) as caught:
        parse_adapter(config_bytes(target_modules=None), weights_bytes(), narrow)

    assert caught.value.param == f"weights.{PREFIX}.0.mlp.down_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"target_modules": ["q_proj", "down_proj"]}, f"{PREFIX}.0.self_attn.v_proj.lora_A.weight"),
        ({"layers_to_transform": [0]}, f"{PREFIX}.1.self_attn.q_proj.lora_A.weight"),
        ({"layers_to_transform": 1}, Q0_A),
        ({"exclude_modules": ["v_proj"]}, f"{PREFIX}.0.self_attn.v_proj.lora_A.weight"),
    ],
)
def test_a_tensor_that_peft_would_not_apply_is_refused(config: dict[str, Any], name: str) -> None:
    """A tensor of a module or layer that the config does not choose is refused."""
    assert refusal(**config).param == f"weights.{name}"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_by_the_tensors_name(value: float) -> None:
    """A NaN or an infinity is refused with the tensor's name."""
    found = tensors()
    found[Q0_B][7, 2] = value

    assert refusal(found).param == f"weights.{Q0_B}"


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.embed_tokens.lora_magnitude_vector",
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
        "base_model.model.score.weight",
        "base_model.model.score.modules_to_save.weight",
        "base_model.model.model.norm.weight",
        f"{PREFIX}.0.self_attn.q_proj.weight",
        f"{PREFIX}.0.self_attn.q_proj.base_layer.weight",
        f"{PREFIX}.0.self_attn.q_proj.lora_A.bias",
        f"{PREFIX}.0.self_attn.q_proj.lora_diag",
        f"{PREFIX}.0.input_layernorm.bias",
        "base_model.model.lm_head.bias",
        f"{PREFIX}.0.mlp.experts.3.up_proj.lora_A.weight",
    ],
)
def test_a_tensor_of_a_feature_that_is_not_served_says_which(name: str) -> None:
    """The refusal of a tensor names the feature that is not served."""
    error = refusal(tensors() | {name: np.zeros((1,), np.float32)})

    assert (error.param, error.code) == (f"weights.{name}", "unsupported_feature")


def test_validation_needs_no_torch() -> None:
    """Validating an upload does not import torch."""
    program = "import sys; import graftwork.adapters.registry.registry; assert not {'torch', 'safetensors'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
