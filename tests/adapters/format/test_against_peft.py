"""Tests of every served option, alone and combined, against what peft makes of the same folder."""

import dataclasses
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from graftwork.adapters.format.identity import identify_adapter
from graftwork.adapters.format.unsupported import SERVED_FIELDS, TRAINING_FIELDS, UNSERVED_SETTINGS
from graftwork.adapters.registry.artifact_store import LocalArtifacts
from graftwork.adapters.registry.weights import ArtifactAdapterSource
from graftwork.engine.lora.weights import AdapterWeights, LoraPair
from tests.adapters.adapter_files import DESCRIPTION, store_files
from tests.adapters.peft_models import BIASED, Family, Place, lora_of, read_back, replaced_in, save_adapter
from tests.hypothesis_profiles import examples

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PATTERNS = [
    "q_proj",
    "layers.0.self_attn.q_proj",
    r"layers\.1\..*",
    r".*\.mlp\.(gate|up)_proj",
    "^model.layers.0.mlp.down_proj",
    "embed_tokens",
    "lm_head",
    r"(model\.)?embed_tokens|lm_head",
]


def load(folder: Path, family: Family) -> AdapterWeights:
    """Reads a folder as an upload and returns the engine's matrices."""
    config = (folder / "adapter_config.json").read_bytes()
    weights = (folder / "adapter_model.safetensors").read_bytes()
    description = replace(DESCRIPTION, biased_targets=BIASED[family])
    _, digest = identify_adapter(config, weights, description)
    with tempfile.TemporaryDirectory() as root:
        store_files(LocalArtifacts(Path(root)), digest, config, weights)
        return ArtifactAdapterSource(LocalArtifacts(Path(root)), description).load(digest)


def pairs_of(weights: AdapterWeights) -> dict[Place, LoraPair]:
    found: dict[Place, LoraPair] = {place: pair for place, pair in weights.pairs.items()}  # noqa: C416 - wider keys
    if weights.embedding is not None:
        found[None, "embed_tokens"] = weights.embedding
    if weights.head is not None:
        found[None, "lm_head"] = weights.head
    return found


def check(folder: Path, family: Family) -> None:
    """Asserts that both have the same modules, bits, scales and replaced parameters."""
    ours, model = load(folder, family), read_back(folder, family)

    expected = lora_of(model)
    found = pairs_of(ours)
    assert set(found) == set(expected)
    for place, pair in found.items():
        for name in ("A", "B", "magnitude", "bias"):
            theirs, mine = expected[place].get(name), getattr(pair, name)
            assert (mine is None) == (theirs is None), (place, name)
            if mine is not None:
                assert isinstance(theirs, torch.Tensor)
                torch.testing.assert_close(mine.float(), theirs.detach().float(), rtol=0, atol=0)
        assert pair.scale == expected[place]["scale"]
    biases, saved = replaced_in(model, family)
    kept = {"embed_tokens": ours.saved_embedding, "lm_head": ours.saved_head}
    assert set(biases) <= set(ours.biases)
    for place, bias in biases.items():
        torch.testing.assert_close(ours.biases[place].float(), bias.float(), rtol=0, atol=0)  # type: ignore[index]
    assert set(saved) <= {target for target, matrix in kept.items() if matrix is not None}
    for target, matrix in saved.items():
        torch.testing.assert_close(kept[target].float(), matrix.float(), rtol=0, atol=0)  # type: ignore[union-attr]


CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "dora": ("llama", {"use_dora": True, "target_modules": TARGETS}),
    "dora on the head": ("llama", {"use_dora": True, "target_modules": ["v_proj", "lm_head"]}),
    "bias on lora_B": ("llama", {"lora_bias": True, "target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "all biases": ("qwen2", {"bias": "all", "target_modules": ["q_proj", "down_proj"]}),
    "biases of the targets": ("qwen2", {"bias": "lora_only", "target_modules": ["q_proj", "down_proj"]}),
    "all biases where there are none": ("llama", {"bias": "all", "target_modules": ["q_proj"]}),
    "all biases and bias on lora_B": ("qwen2", {"bias": "all", "lora_bias": True, "target_modules": ["k_proj"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True}),
    "head under layers_to_transform": (
        "llama",
        {"target_modules": ["lm_head", "embed_tokens", "q_proj"], "layers_to_transform": [1]},
    ),
    "saved head": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "saved both": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "saved embedding, LoRA on the head": (
        "llama",
        {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
    ),
    "fan_in_fan_out": ("llama", {"target_modules": TARGETS, "fan_in_fan_out": True}),
    "layers_pattern": (
        "llama",
        {"target_modules": TARGETS, "layers_to_transform": [0], "layers_pattern": ["layers"]},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_peft_saves_is_what_is_served(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Each feature by itself gives the modules, bits and scales of peft, in two formats."""
    family, options = CASES[case]
    save_adapter(tmp_path, {"r": 4, "lora_alpha": 6} | options, family, dtype)

    check(tmp_path, family)


def patterns(most: int) -> st.SearchStrategy[dict[str, int]]:
    """Returns patterns in PEFT's sorted order, because the first matching pattern counts."""
    tables = st.dictionaries(st.sampled_from(PATTERNS), st.integers(1, most), max_size=3)
    return tables.map(lambda table: dict(sorted(table.items())))


@st.composite
def lora_options(draw: st.DrawFn) -> tuple[Family, dict[str, Any]]:
    """Draws options that peft accepts and that are served."""
    family: Family = draw(st.sampled_from(["llama", "qwen2"]))
    use_dora, lora_bias = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    outside = ["lm_head"] if use_dora or lora_bias else ["lm_head", "embed_tokens"]
    targets = draw(st.lists(st.sampled_from(TARGETS), min_size=1, max_size=7, unique=True))
    options: dict[str, Any] = {
        "r": draw(st.integers(1, 16)),
        "lora_alpha": draw(st.one_of(st.integers(1, 64), st.floats(0.25, 64))),
        "use_rslora": draw(st.booleans()),
        "use_dora": use_dora,
        "lora_bias": lora_bias,
        "bias": draw(st.sampled_from(["none", "all", "lora_only"])),
        "fan_in_fan_out": draw(st.booleans()),
        "target_modules": targets + draw(st.lists(st.sampled_from(outside), unique=True)),
        "rank_pattern": draw(patterns(16)),
        "alpha_pattern": draw(patterns(64)),
        "modules_to_save": draw(st.sampled_from([None, ["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])),
    }
    if draw(st.booleans()):
        options["layers_to_transform"] = draw(st.lists(st.integers(0, 1), min_size=1, unique=True))
        options["layers_pattern"] = draw(st.sampled_from([None, "layers", ["layers"], ["h", "layers"]]))
    if draw(st.booleans()):
        options["exclude_modules"] = [f"0.self_attn.{targets[0]}", "1.mlp.up_proj"]
    return family, options


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(drawn=lora_options(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_any_options_together_are_served_as_peft_has_them(
    drawn: tuple[Family, dict[str, Any]], dtype: torch.dtype
) -> None:
    """Random configurations give the modules, matrices, scales, biases and saved matrices of peft."""
    family, options = drawn
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_adapter(Path(folder), options, family, dtype)
        except ValueError as error:  # peft, where the options leave no module to adapt
            assert "target" in str(error) or "modules" in str(error)  # noqa: PT017 - not our code's error
            return
        check(Path(folder), family)


FIELDS = {
    "served": {
        *("alpha_pattern", "bias", "exclude_modules", "layers_pattern", "layers_to_transform", "lora_alpha"),
        *("lora_bias", "modules_to_save", "peft_type", "r", "rank_pattern", "target_modules", "use_dora", "use_rslora"),
        "target_parameters",
    },
    "without effect": {
        *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode"),
        *("lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision"),
        *("runtime_config", "task_type"),
    },
    "refused": {
        *("alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "init_lora_weights", "kasa_config"),
        *("layer_replication", "loftq_config", "megatron_config", "monteclora_config"),
        *("trainable_token_indices", "use_bdlora", "use_qalora", "velora_config"),
    },
}
"""`init_lora_weights` is refused only where it changes the base."""


def test_no_field_of_pefts_configuration_is_forgotten() -> None:
    """The tables of the code list every field of peft's configuration as served, without effect or refused."""
    of_peft = {field.name for field in dataclasses.fields(LoraConfig)}

    assert of_peft == FIELDS["served"] | FIELDS["without effect"] | FIELDS["refused"]
    assert sum(map(len, FIELDS.values())) == len(of_peft)
    assert {*SERVED_FIELDS} - {"base_fingerprint"} == FIELDS["served"]
    assert set(TRAINING_FIELDS) == FIELDS["without effect"]
    assert {setting.field for setting in UNSERVED_SETTINGS} == FIELDS["refused"]


def test_every_field_that_peft_writes_is_read(tmp_path: Path) -> None:
    """An adapter whose config has every field of peft is accepted."""
    save_adapter(tmp_path, {"r": 4, "target_modules": ["q_proj"]})

    written = set(json.loads((tmp_path / "adapter_config.json").read_text()))

    assert written <= FIELDS["served"] | FIELDS["without effect"] | FIELDS["refused"]
    check(tmp_path, "llama")
