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


def test_what_cannot_have_lora_may_be_excluded() -> None:
    """A convolution or a norm of a recurrent layer in exclude_modules is no mistake."""
    spec = parse(pair(f"{PREFIX}.0.mamba.in_proj", 100, HIDDEN), ["in_proj"], exclude_modules=["conv1d", "mamba.norm"])

    assert spec.target_modules == ("in_proj",)


def test_the_names_survive_json() -> None:
    """What travels to the process that validates uploads is what it reads."""
    assert LayerModules.from_json(loads(dumps(asdict(NAMES)))) == NAMES
