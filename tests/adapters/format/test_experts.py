"""Adapters of experts: the forms that are read, and what is refused by name at an upload."""

from dataclasses import asdict, replace
from json import dumps, loads
from typing import Any

import numpy as np
import pytest

from graftwork.adapters.format.adapter_spec import AdapterSpec
from graftwork.adapters.format.identity import identify_adapter
from graftwork.adapters.format.layout import parse_adapter
from graftwork.engine.core.expert_shapes import ExpertNames, ExpertShapes
from graftwork.platform.errors import ValidationFailed
from tests.adapters.adapter_files import DESCRIPTION, PREFIX, Tensors, config_bytes, weights_bytes

COUNT, HIDDEN, INNER, RANK = 4, 32, 24, 4
SHAPES = ExpertShapes(COUNT, HIDDEN, INNER, (1,), ExpertNames(blocks=("mlp", "block_sparse_moe")))
MODEL = replace(
    DESCRIPTION,
    experts=SHAPES,
    target_shapes=DESCRIPTION.target_shapes
    | {"router": (COUNT, HIDDEN), "shared_gate_proj": (INNER, HIDDEN), "shared_gate": (1, HIDDEN)},
)
EXPERTS = f"{PREFIX}.1.mlp.experts"
JOINED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def pair(module: str, out_features: int, in_features: int, rank: int = RANK, count: int = 1) -> Tensors:
    """Random factors of one module under PEFT's names; of `count` experts together."""
    random = np.random.default_rng(len(module))
    return {
        f"{module}.lora_A.weight": random.standard_normal((count * rank, in_features)).astype(np.float32),
        f"{module}.lora_B.weight": random.standard_normal((out_features, rank * count)).astype(np.float32),
    }


GATE_UP = pair(f"{EXPERTS}.base_layer", 2 * INNER, HIDDEN, count=COUNT)
DOWN = pair(EXPERTS, HIDDEN, INNER, count=COUNT)
SINGLE = pair(f"{EXPERTS}.2.up_proj", INNER, HIDDEN) | pair(f"{EXPERTS}.0.down_proj", HIDDEN, INNER)


def parse(tensors: Tensors, **config: Any) -> AdapterSpec:
    settings = {"target_modules": [], "target_parameters": JOINED} | config
    return parse_adapter(config_bytes(**settings), weights_bytes(tensors), MODEL)


def refused(tensors: Tensors, **config: Any) -> ValidationFailed:
    with pytest.raises(ValidationFailed) as caught:
        parse(tensors, **config)
    return caught.value


def test_the_wrapped_parameter_is_the_first_one() -> None:
    """Of two parameters, PEFT wraps gate_up_proj by down_proj; each has the rank and scale that its own name gets."""
    spec = parse(
        pair(f"{EXPERTS}.base_layer", 2 * INNER, HIDDEN, rank=8, count=COUNT) | DOWN,
        rank_pattern={r".*\.gate_up_proj": 8},
        alpha_pattern={"experts.down_proj": 2},
    )

    gate_up, down = spec.experts
    assert (gate_up.target, gate_up.rank, gate_up.scale) == ("experts_gate_up", 8, 1.0)
    assert (down.target, down.rank, down.scale) == ("experts_down", 4, 0.5)
    assert (spec.modules, spec.rank, spec.target_modules) == ((), 8, ("experts_gate_up", "experts_down"))


def test_a_parameter_alone_is_the_one_that_the_configuration_names() -> None:
    """Without a second one, the tensors have the same names for either parameter."""
    down = parse(DOWN, target_parameters=JOINED[1:])
    gate_up = parse(pair(EXPERTS, 2 * INNER, HIDDEN, count=COUNT), target_parameters=["experts.gate_up_proj"])

    assert [part.target for part in down.experts] == ["experts_down"]
    assert [part.target for part in gate_up.experts] == ["experts_gate_up"]


def test_experts_that_are_modules_are_read_one_by_one() -> None:
    """Projections of single experts are found by target_modules, also under the block's older name."""
    older = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in SINGLE.items()}

    for tensors in (SINGLE, older):
        spec = parse(tensors, target_modules=["up_proj", "down_proj"], target_parameters=None)

        assert [(part.target, part.expert) for part in spec.experts] == [("experts_up", 2), ("experts_down", 0)]
        assert spec.target_modules == ("experts_up", "experts_down")


def test_routers_and_shared_experts_are_modules() -> None:
    """A router is named as a module or by its weight; a shared expert and its gate are modules."""
    router = pair(f"{PREFIX}.1.mlp.gate", COUNT, HIDDEN)
    shared = pair(f"{PREFIX}.1.mlp.shared_expert.gate_proj", INNER, HIDDEN)
    gate = pair(f"{PREFIX}.1.mlp.shared_expert_gate", 1, HIDDEN)

    by_weight = parse(router, target_parameters=["gate.weight"], rank_pattern={"gate.weight": 4}, r=2)
    by_name = parse(
        router | shared | gate,
        target_modules=["gate", "gate_proj", "shared_expert_gate"],
        target_parameters=None,
    )

    assert by_weight.target_modules == ("router",)
    assert by_name.target_modules == ("router", "shared_gate_proj", "shared_gate")


def test_a_digest_depends_on_the_experts_and_not_on_names() -> None:
    """Other values and other experts give other digests; another spelling of the names does not."""

    def digest(tensors: Tensors) -> str:
        config = config_bytes(target_modules=["up_proj", "down_proj"])
        return identify_adapter(config, weights_bytes(tensors), MODEL)[1]

    spelled = {name.removeprefix("base_model.model."): tensor for name, tensor in SINGLE.items()}
    moved = {name.replace("experts.2", "experts.3"): tensor for name, tensor in SINGLE.items()}
    changed = {name: tensor + np.float32("lora_B" in name) for name, tensor in SINGLE.items()}

    assert digest(spelled) == digest(SINGLE)
    assert len({digest(SINGLE), digest(moved), digest(changed)}) == 3


FIRST_A, FIRST_B = f"{EXPERTS}.lora_A.weight", f"{EXPERTS}.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "config", "param", "told"),
    [
        (GATE_UP | DOWN, {"use_dora": True}, "config.use_dora", "use_dora on experts"),
        (GATE_UP | DOWN, {"lora_bias": True}, "config.lora_bias", "lora_bias on experts"),
        (DOWN, {}, f"weights.{FIRST_A}", "only one of the two"),
        (GATE_UP | DOWN, {"target_parameters": JOINED[1:]}, None, "name down_proj"),
        (DOWN, {"target_parameters": None, "target_modules": ["q_proj"]}, None, "no parameter of these experts"),
        (DOWN, {"target_parameters": JOINED[1:], "r": 5}, f"weights.{FIRST_A}", r"\[20, 24\]"),
        ({FIRST_A: DOWN[FIRST_A]}, {"target_parameters": JOINED[1:]}, None, "counterpart lora_B is missing"),
        (DOWN, {"target_parameters": ["experts.up_proj"]}, "config.target_parameters", "names no module"),
        (DOWN, {"target_parameters": "experts"}, "config.target_parameters", "list of names"),
        (pair(f"{PREFIX}.0.mlp.experts", HIDDEN, INNER, count=COUNT), {}, None, "layer 0 has no experts"),
        (pair(f"{PREFIX}.7.mlp.experts", HIDDEN, INNER, count=COUNT), {}, None, "2 layers"),
        (pair(f"{EXPERTS}.4.up_proj", INNER, HIDDEN), {}, None, "4 experts, counted from 0"),
        (pair(f"{EXPERTS}.0.w1", INNER, HIDDEN), {}, None, "gate_proj, up_proj, down_proj"),
        (SINGLE, {"target_modules": ["up_proj"], "target_parameters": None}, None, "leave this module out"),
        (SINGLE | GATE_UP | DOWN, {"target_modules": ["up_proj", "down_proj"]}, None, "of all experts together"),
        ({f"{EXPERTS}.lora_magnitude_vector": np.ones(4, np.float32)}, {}, None, "lora_magnitude_vector of experts"),
        (pair(f"{PREFIX}.1.mlp.up_proj", 48, HIDDEN), {"target_modules": ["up_proj"]}, None, "experts in place of"),
        (pair(f"{PREFIX}.0.mlp.gate", COUNT, HIDDEN), {"target_modules": ["gate"]}, None, "layer 0 has no experts"),
        ({f"{EXPERTS}.down_proj_bias": np.ones(4, np.float32)}, {"bias": "all"}, None, "trained biases of experts"),
        (GATE_UP | DOWN, {"r": 17}, "config.r", "above the 16"),
        (GATE_UP | DOWN, {"rank_pattern": {"gate_up_proj": 17}}, None, "above the 16"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tensors: Tensors, config: dict[str, Any], param: str | None, told: str
) -> None:
    """The error names the tensor or the field, and says what is wrong."""
    error = refused(tensors, **config)

    assert error.param is not None
    assert param in (None, error.param)
    with pytest.raises(ValidationFailed, match=told):
        raise error


def test_a_model_without_experts_refuses_them() -> None:
    """The tensors of experts have no place in a dense model, and are refused by what they are."""
    config = config_bytes(target_modules=["q_proj"])

    with pytest.raises(ValidationFailed, match="LoRA on experts") as caught:
        parse_adapter(config, weights_bytes(SINGLE), DESCRIPTION)

    assert caught.value.code == "unsupported_feature"


def test_a_file_may_have_more_tensors_if_the_model_has_many_experts() -> None:
    """The limit of 4,096 tensors grows with the experts of the model."""
    many = replace(MODEL, experts=replace(SHAPES, num_experts=1000))
    tensors: Tensors = {}
    for number in range(1000):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            shape = (HIDDEN, INNER) if projection == "down_proj" else (INNER, HIDDEN)
            tensors |= pair(f"{EXPERTS}.{number}.{projection}", *shape, rank=1)
    config, weights = config_bytes(r=1, target_modules=["up_proj", "gate_proj", "down_proj"]), weights_bytes(tensors)

    assert len(parse_adapter(config, weights, many).experts) == 3000
    with pytest.raises(ValidationFailed, match="4120 is the most"):
        parse_adapter(config, weights, MODEL)


def test_the_shapes_of_experts_survive_the_wire() -> None:
    """ExpertShapes are the same after JSON."""
    assert ExpertShapes.from_json(loads(dumps(asdict(SHAPES)))) == SHAPES
