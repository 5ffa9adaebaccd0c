"""Adapters of models whose layers have other modules than Llama's: which names are read, and what is refused by name."""

from dataclasses import asdict, replace
from json import dumps, loads
from typing import Any

import numpy as np
import pytest

from graftwork.adapters.format.adapter_spec import AdapterSpec
from graftwork.adapters.format.layout import parse_adapter
from graftwork.engine.core.expert_shapes import ExpertNames, ExpertShapes
from graftwork.engine.core.layer_modules import LayerModules
from graftwork.platform.errors import ValidationFailed
from tests.adapters.adapter_files import DESCRIPTION, PREFIX, Tensors, config_bytes, weights_bytes

HIDDEN, INNER, RANK = 32, 40, 4
NAMES = LayerModules("shared_mlp", "input_linear", "output_linear", "mamba", recurrent_layers=(0,))
SHAPES = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (16, HIDDEN),
    "v_proj": (16, HIDDEN),
    "o_proj": (HIDDEN, HIDDEN),
    "in_proj": (100, HIDDEN),
    "out_proj": (HIDDEN, 64),
}
DENSE = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
MODEL = replace(DESCRIPTION, num_layers=2, hidden_size=HIDDEN, target_shapes=SHAPES | DENSE, modules=NAMES)
ROUTED = replace(
    MODEL,
    target_shapes=SHAPES | {f"shared_{name}": shape for name, shape in DENSE.items()} | {"router": (4, HIDDEN)},
    experts=ExpertShapes(4, HIDDEN, 24, (0, 1), ExpertNames(blocks=("block_sparse_moe",), router="router")),
)


COUNT = 3
STREAMS = {
    "modality_router": (COUNT, HIDDEN),
    "prediction_coefs": (COUNT**2, COUNT),
    "correction_coefs": (COUNT, COUNT),
    "linear_left": (6, HIDDEN),
    "linear_right": (HIDDEN, 6),
    "per_layer_input_gate": (10, HIDDEN),
    "per_layer_projection": (HIDDEN, 10),
}
FURTHER = (
    *("altup.modality_router", "altup.prediction_coefs", "altup.correction_coefs"),
    *("laurel.linear_left", "laurel.linear_right", "per_layer_input_gate", "per_layer_projection"),
)
BESIDE = {
    **{
        f"altup_{kind}.{number}": (HIDDEN, HIDDEN)
        for kind in ("projections", "unembed_projections")
        for number in (0, 1)
    },
    "per_layer_model_projection": (30, HIDDEN),
}
SHARING = replace(
    DESCRIPTION,
    num_layers=3,
    hidden_size=HIDDEN,
    target_shapes={name: shape for name, shape in SHAPES.items() if name not in ("in_proj", "out_proj")}
    | DENSE
    | STREAMS
    | BESIDE,
    modules=LayerModules(
        further=FURTHER, beside=(*BESIDE,), input_table=(50, 30), query_layers=(2,), mlp_widths=(INNER, 24, INNER)
    ),
)
"""Layers with further modules and MLPs of their own widths, the last of which reads the keys of another."""


def pair(module: str, out_features: int, in_features: int) -> Tensors:
    """Random factors of one module under PEFT's names."""
    random = np.random.default_rng(len(module))
    return {
        f"{module}.lora_A.weight": random.standard_normal((RANK, in_features)).astype(np.float32),
        f"{module}.lora_B.weight": random.standard_normal((out_features, RANK)).astype(np.float32),
    }


def parse(tensors: Tensors, targets: list[str], model: Any = MODEL, **config: Any) -> AdapterSpec:
    return parse_adapter(config_bytes(target_modules=targets, **config), weights_bytes(tensors), model)


def test_modules_of_a_recurrent_layer_are_read() -> None:
    """in_proj and out_proj are targets of their own; input_linear is gates and ups with one A, output_linear is down."""
    tensors = (
        pair(f"{PREFIX}.0.mamba.in_proj", 100, HIDDEN)
        | pair(f"{PREFIX}.0.mamba.out_proj", HIDDEN, 64)
        | pair(f"{PREFIX}.0.shared_mlp.input_linear", 2 * INNER, HIDDEN)
        | pair(f"{PREFIX}.1.shared_mlp.output_linear", HIDDEN, INNER)
        | pair(f"{PREFIX}.1.self_attn.q_proj", HIDDEN, HIDDEN)
    )

    spec = parse(tensors, ["in_proj", "out_proj", "input_linear", "output_linear", "q_proj"])

    found = [(module.layer, module.target) for module in spec.modules]
    assert sorted(found) == sorted(
        [(0, "in_proj"), (0, "out_proj"), (0, "gate_proj"), (0, "up_proj"), (1, "down_proj"), (1, "q_proj")]
    )
    gate, up = (module for module in spec.modules if module.target in ("gate_proj", "up_proj"))
    assert gate.A == up.A
    assert (gate.B.shape, up.B.shape) == ((INNER, RANK), (INNER, RANK))
    assert gate.B.end == up.B.start


def test_the_mlp_beside_experts_is_the_shared_expert() -> None:
    """In a routed layer the same modules are the projections of the expert that sees every token."""
    tensors = pair(f"{PREFIX}.1.shared_mlp.input_linear", 2 * INNER, HIDDEN)
    tensors |= pair(f"{PREFIX}.0.block_sparse_moe.router", 4, HIDDEN)

    spec = parse(tensors, ["input_linear"], ROUTED, target_parameters=["router.weight"])

    found = {(module.layer, module.target) for module in spec.modules}
    assert found == {(1, "shared_gate_proj"), (1, "shared_up_proj"), (0, "router")}


@pytest.mark.parametrize(
    ("tensors", "targets", "told"),
    [
        (pair(f"{PREFIX}.0.self_attn.q_proj", HIDDEN, HIDDEN), ["q_proj"], "layer 0 has mamba.in_proj.*in place"),
        (pair(f"{PREFIX}.1.mamba.in_proj", 100, HIDDEN), ["in_proj"], "layer 1 has self_attn.*in place"),
        (pair(f"{PREFIX}.0.mlp.gate_proj", INNER, HIDDEN), ["in_proj"], "no module 'mlp.gate_proj'"),
        (pair(f"{PREFIX}.0.shared_mlp.gate_proj", INNER, HIDDEN), ["in_proj"], "no module 'shared_mlp.gate_proj'"),
        (pair(f"{PREFIX}.2.mamba.in_proj", 100, HIDDEN), ["in_proj"], "the model has 2 layers"),
        (pair(f"{PREFIX}.0.mamba.in_proj", 99, HIDDEN), ["in_proj"], r"its shape is \[99, 4\]"),
        (pair(f"{PREFIX}.0.mamba.in_proj", 100, HIDDEN), ["gate_proj"], "'gate_proj' names no module"),
        (pair(f"{PREFIX}.0.mamba.in_proj", 100, HIDDEN), ["conv1d"], "'conv1d' names no module"),
    ],
)
def test_a_module_that_the_layer_lacks_is_refused_by_name(tensors: Tensors, targets: list[str], told: str) -> None:
    """The error names the tensor or the field, and what the model has."""
    with pytest.raises(ValidationFailed, match=told):
        parse(tensors, targets)


def test_a_model_of_llamas_form_has_no_such_modules() -> None:
    """shared_mlp and mamba are refused for a model that has none."""
    for module in ("mamba.in_proj", "shared_mlp.input_linear"):
        with pytest.raises(ValidationFailed, match=f"no module '{module}'"):
            parse(pair(f"{PREFIX}.0.{module}", 100, HIDDEN), ["q_proj"], DESCRIPTION)


def test_modules_beside_attention_and_mlp_are_read() -> None:
    """Those of a part and those of the layer itself are targets, and an MLP has the width of its layer."""
    tensors = {
        name: tensor
        for module in FURTHER
        for name, tensor in pair(f"{PREFIX}.1.{module}", *STREAMS[module.rpartition(".")[2]]).items()
    }
    tensors |= pair(f"{PREFIX}.1.mlp.up_proj", 24, HIDDEN) | pair(f"{PREFIX}.2.mlp.down_proj", HIDDEN, INNER)

    spec = parse(tensors, [*STREAMS, "up_proj", "down_proj"], SHARING)

    assert {(module.layer, module.target) for module in spec.modules} == {
        *((1, target) for target in (*STREAMS, "up_proj")),
        (2, "down_proj"),
    }
    altup, others = [*STREAMS][:3], [*STREAMS][3:]
    assert spec.target_modules == ("up_proj", "down_proj", *others, *altup)


@pytest.mark.parametrize("prefix", ["model.", "", "model.language_model."])
def test_modules_beside_the_layers_are_read(prefix: str) -> None:
    """The layers around the decoder layers are targets by their whole names and by their ends, in a fixed order and without
    a layer."""
    names = [*reversed(BESIDE)]
    tensors = {
        name: tensor
        for module in names
        for name, tensor in pair(f"base_model.model.{prefix}{module}", *BESIDE[module]).items()
    }

    spec = parse(tensors, [f"{prefix}{names[0]}", *names[1:]], SHARING)

    assert [(module.layer, module.target) for module in spec.modules] == [(None, name) for name in BESIDE]
    assert spec.target_modules == (*BESIDE,)


def test_the_table_of_inputs_may_have_lora() -> None:
    """embed_tokens_per_layer is an embedding of its own size; DoRA on it is refused, and so is any LoRA in a model without
    it."""
    random, module = np.random.default_rng(3), "base_model.model.model.embed_tokens_per_layer"
    tensors = {
        f"{module}.lora_embedding_A": random.standard_normal((RANK, 50)).astype(np.float32),
        f"{module}.lora_embedding_B": random.standard_normal((30, RANK)).astype(np.float32),
    }

    spec = parse(tensors, ["embed_tokens_per_layer"], SHARING)

    assert [(one.layer, one.target, one.A.shape) for one in spec.modules] == [
        (None, "embed_tokens_per_layer", (RANK, 50))
    ]
    with pytest.raises(ValidationFailed, match="use_dora: not served on embed_tokens_per_layer"):
        parse(tensors, ["embed_tokens_per_layer"], SHARING, use_dora=True)
    with pytest.raises(ValidationFailed, match="no module 'embed_tokens_per_layer'"):
        parse(tensors, ["q_proj"], DESCRIPTION)
    larger = replace(SHARING, modules=LayerModules(further=FURTHER, input_table=(51, 30)))
    with pytest.raises(ValidationFailed, match=r"\[4, 50\].*\[4, 51\]"):
        parse(tensors, ["embed_tokens_per_layer"], larger)


def test_a_module_beside_the_layers_is_in_none_of_them() -> None:
    """With layers_to_transform it is left out, unless it is named whole, as in PEFT."""
    name = "model.per_layer_model_projection"
    tensors = pair(f"base_model.model.{name}", *BESIDE["per_layer_model_projection"])

    spec = parse(tensors, [name], SHARING, layers_to_transform=[0])

    assert spec.target_modules == ("per_layer_model_projection",)
    with pytest.raises(ValidationFailed, match="leave this module out"):
        parse(tensors, ["per_layer_model_projection"], SHARING, layers_to_transform=[0])


def test_keys_and_values_that_a_layer_does_not_have_are_left_out() -> None:
    """Tensors for them are no part of the adapter, which is that without them; a layer that has them keeps them."""
    own = pair(f"{PREFIX}.1.self_attn.k_proj", 16, HIDDEN) | pair(f"{PREFIX}.2.self_attn.q_proj", HIDDEN, HIDDEN)
    unused = pair(f"{PREFIX}.2.self_attn.k_proj", 16, HIDDEN) | pair(f"{PREFIX}.2.self_attn.v_proj", 16, HIDDEN)
    targets = ["q_proj", "k_proj", "v_proj"]

    with_unused, without = (parse(tensors, targets, SHARING) for tensors in (own | unused, own))

    assert [(module.layer, module.target) for module in with_unused.modules] == [(1, "k_proj"), (2, "q_proj")]
    assert [module.target for module in without.modules] == ["k_proj", "q_proj"]
    with pytest.raises(ValidationFailed, match="no lora_A and lora_B"):
        parse(unused, targets, SHARING)


@pytest.mark.parametrize(
    ("tensors", "targets", "told"),
    [
        (pair(f"{PREFIX}.1.mlp.up_proj", INNER, HIDDEN), ["up_proj"], r"its shape is \[40, 4\].*\[24, 4\]"),
        (
            pair(f"{PREFIX}.0.altup.prediction_coefs", 16, 4),
            ["prediction_coefs"],
            r"prediction_coefs.lora_A.*\[4, 4\].*\[4, 3\]",
        ),
        (
            pair(f"{PREFIX}.0.altup.modality_router", COUNT, HIDDEN),
            ["up_proj"],
            "modality_router.lora_A.*leave this module",
        ),
        (pair(f"{PREFIX}.0.altup.router_norm", COUNT, HIDDEN), ["up_proj"], "no module 'altup.router_norm'"),
        (
            pair("base_model.model.model.altup_projections.2", HIDDEN, HIDDEN),
            ["up_proj"],
            "no module 'altup_projections.2'.*altup_projections.0, altup_projections.1",
        ),
        (
            pair("base_model.model.model.altup_projections", HIDDEN, HIDDEN),
            ["up_proj"],
            "model.altup_projections.lora_A",
        ),
        (pair(f"{PREFIX}.0.altup_projections.0", HIDDEN, HIDDEN), ["up_proj"], "layers.0.altup_projections.0"),
        (pair("base_model.model.model.altup_projections.0", HIDDEN, HIDDEN), ["altup_projections"], "names no module"),
        (pair(f"{PREFIX}.0.laurel.post_laurel_norm", HIDDEN, HIDDEN), ["up_proj"], "laurel.post_laurel_norm"),
        (pair(f"{PREFIX}.0.linear_left", 6, HIDDEN), ["linear_left"], "layers.0.linear_left.lora_A"),
        (pair(f"{PREFIX}.3.per_layer_projection", HIDDEN, 10), ["per_layer_projection"], "the model has 3 layers"),
    ],
)
def test_what_the_layers_lack_is_refused_by_name(tensors: Tensors, targets: list[str], told: str) -> None:
    """Modules that the model has not and shapes that do not fit are refused with the tensor's or the module's name."""
    with pytest.raises(ValidationFailed, match=told):
        parse(tensors, targets, SHARING)


def test_a_model_of_llamas_form_has_none_beside_attention_and_mlp() -> None:
    """A layer's own projection and a low-rank way beside attention are refused for a model that has none."""
    for module in ("per_layer_projection", "laurel.linear_left", "altup.modality_router"):
        with pytest.raises(ValidationFailed, match=f"no module '{module}'"):
            parse(pair(f"{PREFIX}.0.{module}", HIDDEN, HIDDEN), ["q_proj"], DESCRIPTION)
    for module in BESIDE:
        with pytest.raises(ValidationFailed, match=f"no module '{module}'"):
            parse(pair(f"base_model.model.model.{module}", HIDDEN, HIDDEN), ["q_proj"], DESCRIPTION)


def test_what_cannot_have_lora_may_be_excluded() -> None:
    """A convolution or a norm of a recurrent layer in exclude_modules is no mistake."""
    spec = parse(pair(f"{PREFIX}.0.mamba.in_proj", 100, HIDDEN), ["in_proj"], exclude_modules=["conv1d", "mamba.norm"])

    assert spec.target_modules == ("in_proj",)


@pytest.mark.parametrize(
    "name", ["modality_router", "altup_projections", "altup_projections.1", "embed_tokens_per_layer"]
)
def test_what_mixes_streams_may_be_excluded(name: str) -> None:
    """It is no mistake to leave it out, whether it can have LoRA or not; in a model without streams it names nothing."""
    tensors = pair(f"{PREFIX}.1.self_attn.q_proj", HIDDEN, HIDDEN)

    assert parse(tensors, ["q_proj"], SHARING, exclude_modules=[name]).target_modules == ("q_proj",)
    with pytest.raises(ValidationFailed, match=r"config\.exclude_modules"):
        parse(tensors, ["q_proj"], DESCRIPTION, exclude_modules=[name])


def test_a_pattern_may_name_the_language_model_within_another() -> None:
    """A pattern over the names of a model that also sees finds the modules of its language model, and no others."""
    name = "base_model.model.model.language_model.layers.1.self_attn.q_proj"
    tensors = pair(name, HIDDEN, HIDDEN)

    spec = parse_adapter(config_bytes(target_modules=r".*language_model.*q_proj"), weights_bytes(tensors), SHARING)

    assert [(module.layer, module.target) for module in spec.modules] == [(1, "q_proj")]
    with pytest.raises(ValidationFailed, match="matches no module"):
        parse_adapter(config_bytes(target_modules=r".*vision_tower.*q_proj"), weights_bytes(tensors), SHARING)


def test_the_names_survive_json() -> None:
    """What travels to the process that validates uploads is what it reads."""
    for names in (NAMES, SHARING.modules):
        assert names is not None
        assert LayerModules.from_json(loads(dumps(asdict(names)))) == names
