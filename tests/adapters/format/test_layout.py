"""An adapter's files against a model: each fault is refused by its exact tensor or field."""

import json
import math
import re
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
        (".weight", ".default.weight"),
    ],
)
def test_the_usual_spellings_of_names_mean_the_same(change: tuple[str, str]) -> None:
    """With and without PEFT's prefix, with and without the adapter's name."""
    places = [(module.layer, module.target, module.rank, module.scale) for module in parse(renamed(change)).modules]

    assert places == [(module.layer, module.target, module.rank, module.scale) for module in parse().modules]


def test_the_scale_follows_rslora_and_the_patterns() -> None:
    """alpha / sqrt(r) under rsLoRA; the first pattern that matches a module decides its rank and its alpha."""
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
    """All three formats that adapters are saved in."""
    halves = {name: tensor.astype(np.float16) for name, tensor in tensors().items()}
    brains = {name: (tensor.view(np.uint32) >> 16).astype(np.uint16) for name, tensor in tensors().items()}

    assert {module.A.dtype for module in parse(halves).modules} == {"F16"}
    assert {module.A.dtype for module in parse(brains).modules} == {"BF16"}


def test_a_file_without_tensors_is_refused() -> None:
    """An adapter that does nothing would answer as the base and nobody would know."""
    assert refusal({}).param == "weights"


def test_a_factor_without_its_counterpart_is_refused() -> None:
    """A without B, and B without A."""
    for missing, left in ((Q0_A, Q0_B), (Q0_B, Q0_A)):
        found = tensors()
        del found[missing]

        assert refusal(found).param == f"weights.{left}"


def test_one_module_in_two_spellings_is_refused() -> None:
    """Either could be meant."""
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
    """Shapes must be those of the model's module and the configured rank."""
    assert refusal(tensors() | {name: np.zeros(shape, np.float32)}).param == f"weights.{name}"


def test_a_rank_that_contradicts_the_config_is_refused() -> None:
    """With the wrong rank the scale would be silently wrong."""
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
    """Every tensor is applied or the upload fails; hostile names come back printable and short."""
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
    """What an engine cannot target is not accepted for it."""
    narrow = replace(DESCRIPTION, target_shapes={"q_proj": (32, 32), "v_proj": (16, 32)})

    with pytest.raises(ValidationFailed) as caught:
        parse_adapter(config_bytes(), weights_bytes(), narrow)

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
    """The config's own choice of modules and layers contradicts the file."""
    assert refusal(**config).param == f"weights.{name}"


@pytest.mark.parametrize("target_modules", ["all-linear", None])
def test_target_modules_without_names_leave_the_choice_to_the_tensors(target_modules: object) -> None:
    """Neither says which modules there are."""
    assert parse(target_modules=target_modules).rank == 4


MODULES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1)
    for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q|v|down)_proj",
        r"model\.layers\.[01]\.(self_attn|mlp)\.[a-z]+_proj",
        r".*_proj",
        r".*\.(q|v)_proj",
        r"(a+)+$",
        r"q_proj",
        r"model\.layers\.0\..*",
        "",
    ],
)
def test_a_pattern_chooses_the_modules_that_peft_would(pattern: str) -> None:
    """It must match the whole name of every module in the file, as `re.fullmatch` does."""
    left_out = [module for module in MODULES if re.fullmatch(pattern, module) is None]

    if left_out:
        assert refusal(target_modules=pattern).param in [
            f"weights.base_model.model.{module}.lora_A.weight" for module in left_out
        ]
    else:
        assert len(parse(target_modules=pattern).modules) == len(MODULES)


def test_a_pattern_can_exclude_modules() -> None:
    """A module in the file that exclude_modules matches would not be applied by PEFT."""
    assert refusal(exclude_modules=r".*\.1\..*v_proj").param == f"weights.{PREFIX}.1.self_attn.v_proj.lora_A.weight"
    assert len(parse(exclude_modules=r"v_proj").modules) == len(MODULES)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
@pytest.mark.parametrize(
    "pattern",
    [
        r"(?!.*lm_head).*_proj",
        r"(?=model).*",
        r".*(?<=q)_proj",
        r"(?i).*_PROJ",
        r"(.)\1.*",
        r".*\b_proj",
        "(",
        "a" * 300,
    ],
)
def test_a_pattern_that_is_not_matched_here_is_refused_by_its_field(field: str, pattern: str) -> None:
    """Look-around, back-references, flags and what is malformed or too long are refused, never run and never ignored."""
    chosen: dict[str, Any] = {field: pattern}

    error = refusal(**chosen)

    assert error.param == f"config.{field}"
    assert "list of module names" in error.message


def test_targets_by_full_name_are_honoured() -> None:
    """PEFT takes a whole name or the tail of one behind a dot."""
    targets = ["model.layers.0.self_attn.q_proj", "1.self_attn.q_proj", "v_proj", "mlp.down_proj"]

    assert len(parse(target_modules=targets).modules) == 6
    assert refusal(target_modules=["_proj"]).param == f"weights.{Q0_A}"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_by_the_tensors_name(value: float) -> None:
    """One NaN would spread to every token of whoever uses the adapter."""
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
    """The refusal names the feature, not only the tensor."""
    error = refusal(tensors() | {name: np.zeros((1,), np.float32)})

    assert (error.param, error.code) == (f"weights.{name}", "unsupported_feature")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modules_to_save", ["lm_head", "score"]),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 1], [0, 2]]),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", ["?"]),
        ("loftq_config", {"loftq_bits": 4}),
        ("alora_invocation_tokens", [1]),
        ("use_qalora", True),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 2}),
        ("kasa_config", {"beta": 1}),
        ("velora_config", {"n": 1}),
        ("monteclora_config", {"n": 1}),
        ("megatron_config", {"n": 1}),
        ("use_something_new", True),
        ("something_new_config", {"n": 1}),
        ("new_factor", 0.5),
        ("new_variant", "fast"),
    ],
)
def test_a_setting_that_is_not_served_is_refused_by_its_name(field: str, value: Any) -> None:
    """What would be silently dropped elsewhere is an error here."""
    error = refusal(**{field: value})

    assert (error.param, error.code) == (f"config.{field}", "unsupported_feature")


@pytest.mark.parametrize(
    "field", ["use_dora", "lora_bias", "modules_to_save", "loftq_config", "bias", "use_something_new", "kasa_config"]
)
def test_a_setting_that_is_not_in_use_is_no_reason_to_refuse(field: str) -> None:
    """PEFT writes every field it knows."""
    assert parse(**{field: None}).rank == 4


def test_ways_to_initialise_that_leave_the_base_alone_are_served() -> None:
    """Only the weights matter then."""
    for way in (True, False, "gaussian", "eva", "orthogonal", "mica"):
        assert parse(init_lora_weights=way).rank == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", -1),
        ("r", 17),
        ("r", 10**9),
        ("r", 10**4000),
        ("r", 4.0),
        ("r", True),
        ("r", "4"),
        ("r", None),
        ("lora_alpha", "8"),
        ("lora_alpha", True),
        ("lora_alpha", None),
        ("lora_alpha", 10**7),
        ("lora_alpha", -(10**400)),
        ("use_rslora", "yes"),
        ("use_rslora", 1),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", "q_proj"),
        ("rank_pattern", {f"m{i}": 4 for i in range(1025)}),
        ("target_modules", ["q_proj", 3]),
        ("target_modules", {"q_proj": 1}),
        ("layers_to_transform", ["0"]),
        ("layers_to_transform", [-1]),
        ("layers_to_transform", True),
        ("bias", "some"),
        ("bias", True),
        ("use_dora", "yes"),
        ("lora_bias", 1),
        ("modules_to_save", "lm_head"),
        ("modules_to_save", [1]),
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("base_fingerprint", 7),
    ],
)
def test_a_wrong_value_is_refused_by_its_field(field: str, value: Any) -> None:
    """Types are checked as JSON has them: true is no integer."""
    assert refusal(**{field: value}).param == f"config.{field}"


@pytest.mark.parametrize(
    ("field", "rows", "param"),
    [
        ("rank_pattern", {"q_proj": 0}, "config.rank_pattern.q_proj"),
        ("rank_pattern", {"q_proj": 4, "v_proj": 1.5}, "config.rank_pattern.v_proj"),
        ("rank_pattern", {"(q_proj": 4}, "config.rank_pattern.(q_proj"),
        ("alpha_pattern", {"q_proj": "8"}, "config.alpha_pattern.q_proj"),
        ("alpha_pattern", {"(?=a)": 8}, "config.alpha_pattern.(?=a)"),
    ],
)
def test_a_wrong_pattern_is_refused_by_its_text(field: str, rows: dict[str, Any], param: str) -> None:
    """The pattern itself is named, whether its text or its number is wrong."""
    assert refusal(**{field: rows}).param == param


@pytest.mark.parametrize(("hostile", "number"), [("(.?){200}(a|b|%d)", 1000), ("(.?){60}(a|b|%d)", 300)])
def test_patterns_that_would_take_too_long_are_refused(hostile: str, number: int) -> None:
    """Together they may not cost more than a bounded number of states and steps."""
    error = refusal(alpha_pattern={hostile % i: 8 for i in range(number)})

    assert error.param == "config.alpha_pattern"


def test_a_pattern_for_every_module_of_a_large_model_is_served() -> None:
    """Tools that choose ranks by module write one full name each."""
    names = [f"model.layers.{layer}.self_attn.{target}_proj" for layer in range(79, -1, -1) for target in "qkvo"]

    assert parse(alpha_pattern=dict.fromkeys(names, 12)).modules[0].scale == 3.0


@pytest.mark.parametrize("field", ["r", "lora_alpha"])
def test_without_rank_or_alpha_the_scale_is_not_guessed(field: str) -> None:
    """PEFT's defaults are not this adapter's training."""
    config = json.loads(config_bytes())
    del config[field]

    with pytest.raises(ValidationFailed) as caught:
        parse_adapter(json.dumps(config).encode(), weights_bytes(), DESCRIPTION)

    assert caught.value.param == f"config.{field}"


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe{}",
        b'{"r": 4, "r": 8, "lora_alpha": 8}',
        b'{"r": 4, "lora_alpha": NaN}',
        b'{"r": 4, "lora_alpha": Infinity}',
        b'{"r": ' + b"[" * 100_000,
        b'{"r": ' + b"9" * 5000 + b"}",
        b" " * (1024 * 1024 + 1),
    ],
    ids=range(11),
)
def test_a_config_that_is_no_plain_json_object_is_refused(config: bytes) -> None:
    """Before anything in it is believed."""
    with pytest.raises(ValidationFailed) as caught:
        parse_adapter(config, weights_bytes(), DESCRIPTION)

    assert caught.value.param == "config"


def test_infinity_written_as_a_large_exponent_is_refused() -> None:
    """1e999 is a number to JSON and an infinity to Python."""
    config = config_bytes().replace(b'"lora_alpha": 8', b'"lora_alpha": 1e999')

    with pytest.raises(ValidationFailed) as caught:
        parse_adapter(config, weights_bytes(), DESCRIPTION)

    assert caught.value.param == "config.lora_alpha"


def test_only_the_fingerprint_ties_an_adapter_to_its_base() -> None:
    """Another path of the base is the same base; another fingerprint is not."""
    assert parse(base_model_name_or_path="elsewhere", base_fingerprint=DESCRIPTION.fingerprint).rank == 4
    assert parse(base_model_name_or_path=None, base_fingerprint=None).rank == 4
    assert refusal(base_fingerprint="sha256:" + "c" * 64).param == "config.base_fingerprint"


def test_validation_needs_no_torch() -> None:
    """The gateway validates uploads, and loads no torch for it."""
    program = "import sys; import graftwork.adapters.registry.registry; assert not {'torch', 'safetensors'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
