"""Tests of adapter_config.json: each fault is refused by its exact field."""

import json
import re
from typing import Any

import pytest

from graftwork.adapters.format.adapter_spec import AdapterSpec
from graftwork.adapters.format.layout import parse_adapter
from graftwork.platform.errors import ValidationFailed
from tests.adapters.adapter_files import (
    DESCRIPTION,
    PREFIX,
    Q0_A,
    Tensors,
    config_bytes,
    weights_bytes,
)
from tests.adapters.peft_models import Family, base_model


def parse(found: Tensors | None = None, **config: Any) -> AdapterSpec:
    return parse_adapter(config_bytes(**config), weights_bytes(found), DESCRIPTION)


def refusal(found: Tensors | None = None, **config: Any) -> ValidationFailed:
    with pytest.raises(ValidationFailed) as caught:
        parse(found, **config)
    return caught.value


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

    if len(left_out) == len(MODULES):
        assert refusal(target_modules=pattern).param == "config.target_modules"
    elif left_out:
        assert refusal(target_modules=pattern).param in [
            f"weights.base_model.model.{module}.lora_A.weight" for module in left_out
        ]
    else:
        assert len(parse(target_modules=pattern).modules) == len(MODULES)


def test_a_pattern_can_exclude_modules() -> None:
    """A module in the file that exclude_modules matches would not be applied by PEFT."""
    assert refusal(exclude_modules=r".*\.1\..*v_proj").param == f"weights.{PREFIX}.1.self_attn.v_proj.lora_A.weight"
    assert len(parse(exclude_modules=r"lm_head").modules) == len(MODULES)


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
    """A target may be a module's whole name or its last part, as in PEFT."""
    targets = ["model.layers.0.self_attn.q_proj", "1.self_attn.q_proj", "v_proj", "mlp.down_proj"]

    assert len(parse(target_modules=targets).modules) == 6
    assert refusal(target_modules=["k_proj"]).param == f"weights.{Q0_A}"


@pytest.mark.parametrize(
    "name",
    [
        "q_porj",
        "_proj",
        "c_attn",
        "self_attn",
        "mlp.q_proj",
        "model.layers.2.self_attn.q_proj",
        "other.q_proj",
        "Q_PROJ",
        "",
    ],
)
def test_a_target_that_the_base_does_not_have_is_refused(name: str) -> None:
    """A name that fits no module is refused with the names that exist, even where the other names fit the file."""
    error = refusal(target_modules=["q_proj", "v_proj", "down_proj", name])

    assert error.param == "config.target_modules"
    assert f"'{name}' names no module" in error.message
    assert all(known in error.message for known in (*DESCRIPTION.target_shapes, "embed_tokens", "lm_head", "2 layers"))


@pytest.mark.parametrize("chosen", [["v_porj"], ["other.v_proj", "Q_PROJ"], [""], "v_proj", r".*\.v_porj"])
def test_an_exclusion_that_excludes_nothing_is_refused(chosen: object) -> None:
    """If no name in exclude_modules fits a module of the base, or its pattern fits none, it is refused; peft only warns."""
    error = refusal(exclude_modules=chosen)

    assert error.param == "config.exclude_modules"
    assert "no module of the base model" in error.message


def test_an_exclusion_may_have_names_of_other_models() -> None:
    """A name that fits no module is accepted beside one that fits, as in peft."""
    assert len(parse(exclude_modules=["vision_tower", "lm_head"]).modules) == len(MODULES)
    assert len(parse(exclude_modules=[]).modules) == len(MODULES)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_module_of_the_base_can_be_excluded(family: Family) -> None:
    """A name is accepted for each module that transformers has, also for those that cannot have LoRA."""
    names = [name for name, _ in base_model(family).named_modules() if name]

    for name in set(names) - set(MODULES):
        assert len(parse(exclude_modules=[name]).modules) == len(MODULES), name
    for module in MODULES:
        assert refusal(exclude_modules=[module]).param == f"weights.base_model.model.{module}.lora_A.weight"


@pytest.mark.parametrize("pattern", [r".*\.q_porj", r"model\.layers\.[2-9]\..*", "q_proj|v_proj"])
def test_a_pattern_that_fits_no_module_is_refused(pattern: str) -> None:
    """A pattern without a match in the base is refused by its field, before any tensor is looked at."""
    error = refusal(target_modules=pattern)

    assert error.param == "config.target_modules"
    assert "matches no module" in error.message


@pytest.mark.parametrize("name", ["k_proj", "up_proj", "lm_head", "model.embed_tokens", "qkv_proj", "mlp.gate_up_proj"])
def test_a_target_without_a_tensor_in_the_file_is_no_fault(name: str) -> None:
    """The base has these modules, so the names are right, though the file has no LoRA for them; a name without `model.`
    is right as well.
    """
    targets = ["q_proj", "v_proj", "layers.0.mlp.down_proj", "down_proj", name]

    assert len(parse(target_modules=targets, layers_to_transform=[0, 1]).modules) == 6


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
    """A setting that is not served is refused with its name."""
    error = refusal(**{field: value})

    assert (error.param, error.code) == (f"config.{field}", "unsupported_feature")


@pytest.mark.parametrize(
    "field", ["use_dora", "lora_bias", "modules_to_save", "loftq_config", "bias", "use_something_new", "kasa_config"]
)
def test_a_setting_that_is_not_in_use_is_no_reason_to_refuse(field: str) -> None:
    """An unserved field with its neutral value is accepted, because PEFT writes every field it knows."""
    assert parse(**{field: None}).rank == 4


def test_ways_to_initialise_that_leave_the_base_alone_are_served() -> None:
    """An initialisation that does not change the base model is accepted."""
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
    """A value of the wrong JSON type is refused with its field; true is not an integer."""
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
    """A pattern with a wrong text or a wrong number is refused, and the error shows the pattern."""
    assert refusal(**{field: rows}).param == param


@pytest.mark.parametrize(("hostile", "number"), [("(.?){200}(a|b|%d)", 1000), ("(.?){60}(a|b|%d)", 300)])
def test_patterns_that_would_take_too_long_are_refused(hostile: str, number: int) -> None:
    """Patterns that need more than the limit of states and steps are refused."""
    error = refusal(alpha_pattern={hostile % i: 8 for i in range(number)})

    assert error.param == "config.alpha_pattern"


def test_a_pattern_for_every_module_of_a_large_model_is_served() -> None:
    """A config with one full module name as a pattern for each module of a large model is accepted."""
    names = [f"model.layers.{layer}.self_attn.{target}_proj" for layer in range(79, -1, -1) for target in "qkvo"]

    assert parse(alpha_pattern=dict.fromkeys(names, 12)).modules[0].scale == 3.0


@pytest.mark.parametrize("field", ["r", "lora_alpha"])
def test_without_rank_or_alpha_the_scale_is_not_guessed(field: str) -> None:
    """A config without rank or alpha is refused."""
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
    """A config that is not a plain JSON object is refused."""
    with pytest.raises(ValidationFailed) as caught:
        parse_adapter(config, weights_bytes(), DESCRIPTION)

    assert caught.value.param == "config"


def test_infinity_written_as_a_large_exponent_is_refused() -> None:
    """The number 1e999, which Python reads as an infinity, is refused."""
    config = config_bytes().replace(b'"lora_alpha": 8', b'"lora_alpha": 1e999')

    with pytest.raises(ValidationFailed) as caught:
        parse_adapter(config, weights_bytes(), DESCRIPTION)

    assert caught.value.param == "config.lora_alpha"


def test_only_the_fingerprint_ties_an_adapter_to_its_base() -> None:
    """A base with another path but the same fingerprint is accepted; another fingerprint is refused."""
    assert parse(base_model_name_or_path="elsewhere", base_fingerprint=DESCRIPTION.fingerprint).rank == 4
    assert parse(base_model_name_or_path=None, base_fingerprint=None).rank == 4
    assert refusal(base_fingerprint="sha256:" + "c" * 64).param == "config.base_fingerprint"
