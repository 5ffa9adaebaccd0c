"""Tests of module_reader: fused modules, magnitudes, biases, the embedding and the head."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from graftwork.adapters.format.adapter_spec import AdapterSpec
from graftwork.adapters.format.identity import identify_adapter
from graftwork.platform.errors import ValidationFailed
from tests.adapters.adapter_files import DESCRIPTION, PREFIX, Q0_A, Q0_B, Tensors, config_bytes, tensors, weights_bytes

BIASED = replace(DESCRIPTION, biased_targets=("q_proj", "k_proj", "v_proj"))
Q0 = f"{PREFIX}.0.self_attn.q_proj"
EMBEDDING, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
RANDOM = np.random.default_rng(0)


def ones(*shape: int) -> npt.NDArray[np.float32]:
    return RANDOM.standard_normal(shape).astype(np.float32)


def identify(found: Tensors, **config: Any) -> tuple[AdapterSpec, str]:
    return identify_adapter(config_bytes(target_modules=None, **config), weights_bytes(found), BIASED)


def refusal(found: Tensors, **config: Any) -> ValidationFailed:
    with pytest.raises(ValidationFailed) as caught:
        identify(found, **config)
    return caught.value


def embedding(rank: int = 4) -> Tensors:
    return {f"{EMBEDDING}.lora_embedding_A": ones(rank, 64), f"{EMBEDDING}.lora_embedding_B": ones(32, rank)}


def head(rank: int = 4) -> Tensors:
    return {f"{HEAD}.lora_A.weight": ones(rank, 32), f"{HEAD}.lora_B.weight": ones(64, rank)}


def fused(prefix: str, out_features: int, **extra: npt.NDArray[Any]) -> Tensors:
    found = {f"{prefix}.lora_A.weight": ones(3, 32), f"{prefix}.lora_B.weight": ones(out_features, 3)}
    return found | {f"{prefix}.{name}": tensor for name, tensor in extra.items()}


def test_a_fused_module_is_its_targets_by_the_rows_of_b() -> None:
    """The targets q, k and v of a fused module share A, and have the rank and scale of the fused name."""
    name = f"{PREFIX}.1.self_attn.qkv_proj"
    found = fused(name, 64) | fused(f"{PREFIX}.0.mlp.gate_up_proj", 96)
    weights = weights_bytes(found)

    spec, _ = identify(found, r=3, alpha_pattern={"qkv_proj": 6, "q_proj": 1})

    assert [(module.layer, module.target) for module in spec.modules] == [
        *((0, target) for target in ("gate_proj", "up_proj")),
        *((1, target) for target in ("q_proj", "k_proj", "v_proj")),
    ]
    assert [module.scale for module in spec.modules] == [8 / 3, 8 / 3, 2.0, 2.0, 2.0]
    rows = np.concatenate([module.B.bits(weights) for module in spec.modules if module.layer == 1])
    assert np.array_equal(rows.view(np.float32).reshape(64, 3), found[f"{name}.lora_B.weight"])
    assert [module.B.shape[0] for module in spec.modules if module.layer == 1] == [32, 16, 16]


@pytest.mark.parametrize("extra", [{}, {"lora_magnitude_vector": ones(64)}, {"lora_B.bias": ones(64)}])
def test_fused_and_split_files_of_one_adapter_are_one_adapter(extra: Tensors) -> None:
    """A fused file and a split file of one adapter have the same digest."""
    name, layer = f"{PREFIX}.1.self_attn.qkv_proj", f"{PREFIX}.1.self_attn"
    found = fused(name, 64, **extra)
    split: Tensors = {}
    for target, first, end in (("q_proj", 0, 32), ("k_proj", 32, 48), ("v_proj", 48, 64)):
        split[f"{layer}.{target}.lora_A.weight"] = found[f"{name}.lora_A.weight"]
        split[f"{layer}.{target}.lora_B.weight"] = found[f"{name}.lora_B.weight"][first:end]
        split |= {f"{layer}.{target}.{part}": tensor[first:end] for part, tensor in extra.items()}
    config = {"r": 3, "use_dora": "lora_magnitude_vector" in extra, "lora_bias": "lora_B.bias" in extra}

    assert identify(found, **config)[1] == identify(split, **config)[1]


def test_a_module_that_comes_fused_and_split_is_refused() -> None:
    """A file that has a module both fused and split is refused."""
    found = tensors(targets=("q_proj",), rank=3) | fused(f"{PREFIX}.0.self_attn.qkv_proj", 64)

    assert "for the same module" in refusal(found, r=3).message


@pytest.mark.parametrize("spelling", ["", ".weight", ".default", ".default.weight"])
def test_a_magnitude_is_read_in_every_spelling(spelling: str) -> None:
    """A magnitude is read under the names of PEFT's files, of its state dict and of older tools."""
    found = tensors(targets=("q_proj",))
    for layer in (0, 1):
        found[f"{PREFIX}.{layer}.self_attn.q_proj.lora_magnitude_vector{spelling}"] = ones(32)

    spec, _ = identify(found, use_dora=True)

    assert all(module.magnitude is not None and module.magnitude.shape == (32,) for module in spec.modules)


SAVED_EMBEDDING = {f"{EMBEDDING}.weight": ones(64, 32)}
BASE_EMBEDDING = {f"{EMBEDDING}.base_layer.weight": ones(64, 32)}
MAGNITUDES = {f"{PREFIX}.{layer}.self_attn.q_proj.lora_magnitude_vector": ones(32) for layer in (0, 1)}


@pytest.mark.parametrize(
    ("extra", "config", "fault"),
    [
        ({}, {"use_dora": True}, Q0_B),
        (MAGNITUDES, {}, f"{Q0}.lora_magnitude_vector"),
        (MAGNITUDES | {f"{Q0}.lora_magnitude_vector": ones(16)}, {"use_dora": True}, f"{Q0}.lora_magnitude_vector"),
        (MAGNITUDES | {f"{Q0}.lora_magnitude_vector": ones(32, 1)}, {"use_dora": True}, f"{Q0}.lora_magnitude_vector"),
        ({f"{PREFIX}.0.mlp.up_proj.lora_magnitude_vector": ones(48)}, {}, f"{PREFIX}.0.mlp.up_proj.lora_magnitude_vector"),
        ({}, {"lora_bias": True}, Q0_B),
        ({f"{Q0}.lora_B.bias": ones(32)}, {}, f"{Q0}.lora_B.bias"),
        ({f"{Q0}.bias": ones(32)}, {}, f"{Q0}.bias"),
        ({f"{Q0}.base_layer.bias": ones(32)}, {"bias": "none"}, f"{Q0}.base_layer.bias"),
        ({f"{Q0}.base_layer.bias": ones(16)}, {"bias": "all"}, f"{Q0}.base_layer.bias"),
        ({f"{PREFIX}.0.self_attn.o_proj.bias": ones(32)}, {"bias": "all"}, f"{PREFIX}.0.self_attn.o_proj.bias"),
        ({f"{Q0}.bias": ones(32), f"{Q0}.base_layer.bias": ones(32)}, {"bias": "all"}, f"{Q0}.base_layer.bias"),
        (embedding(3), {}, f"{EMBEDDING}.lora_embedding_A"),
        ({f"{EMBEDDING}.lora_A.weight": ones(4, 64)}, {}, f"{EMBEDDING}.lora_A.weight"),
        ({f"{HEAD}.lora_embedding_A": ones(4, 64)}, {}, f"{HEAD}.lora_embedding_A"),
        ({f"{HEAD}.lora_A.weight": ones(4, 32)}, {}, f"{HEAD}.lora_A.weight"),
        (head() | {f"{HEAD}.lora_B.weight": ones(65, 4)}, {}, f"{HEAD}.lora_B.weight"),
        ({f"{HEAD}.weight": ones(65, 32)}, {"modules_to_save": ["lm_head"]}, f"{HEAD}.weight"),
        ({f"{HEAD}.weight": ones(32, 64)}, {}, f"{HEAD}.weight"),
        (BASE_EMBEDDING, {}, f"{EMBEDDING}.base_layer.weight"),
        (SAVED_EMBEDDING | embedding(), {}, f"{EMBEDDING}.weight"),
        (SAVED_EMBEDDING | {f"{EMBEDDING}.modules_to_save.weight": ones(64, 32)}, {}, f"{EMBEDDING}.modules_to_save.weight"),
        ({f"{HEAD}.weight": np.full((64, 32), np.inf, np.float32)}, {}, f"{HEAD}.weight"),
        (MAGNITUDES | {f"{Q0}.lora_magnitude_vector": np.full(32, np.nan, np.float32)}, {"use_dora": True}, f"{Q0}.lora_magnitude_vector"),
    ],
)  # fmt: skip
def test_a_part_that_would_not_be_applied_is_refused_by_its_name(
    extra: Tensors, config: dict[str, Any], fault: str
) -> None:
    """A part that is missing, superfluous, misshapen or not in the config is refused with its name."""
    assert refusal(tensors(targets=("q_proj",)) | extra, **config).param == f"weights.{fault}"


@pytest.mark.parametrize(
    ("extra", "config", "field"),
    [
        (embedding(), {"use_dora": True}, "use_dora"),
        (embedding(), {"lora_bias": True}, "lora_bias"),
        ({}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({}, {"modules_to_save": ["score"]}, "modules_to_save"),
        ({}, {"layers_to_transform": [0], "layers_pattern": "h"}, "layers_pattern"),
    ],
)
def test_a_setting_that_the_file_contradicts_is_refused_by_its_name(
    extra: Tensors, config: dict[str, Any], field: str
) -> None:
    """A setting whose tensors are missing or not served is refused with its name."""
    alone = extra or tensors(targets=("q_proj",))

    assert refusal(alone, **config).param == f"config.{field}"


def test_an_adapter_of_saved_matrices_alone_is_refused() -> None:
    """A file with saved matrices but no LoRA factors is refused."""
    assert refusal(dict(SAVED_EMBEDDING)).param == "weights"


def test_everything_that_is_applied_counts_towards_the_digest() -> None:
    """A changed bit in any part changes the digest; another spelling of the part does not."""
    plain = tensors(targets=("q_proj",))
    other = {name: tensor + 1 for name, tensor in SAVED_EMBEDDING.items()}
    bias = ones(32)
    configured: list[tuple[Tensors, dict[str, Any]]] = [
        (plain, {}),
        (plain | MAGNITUDES, {"use_dora": True}),
        (plain | {name: tensor * 2 for name, tensor in MAGNITUDES.items()}, {"use_dora": True}),
        (plain | {name.replace("lora_magnitude_vector", "lora_B.bias"): t for name, t in MAGNITUDES.items()}, {"lora_bias": True}),
        (plain | {f"{Q0}.bias": bias}, {"bias": "all"}),
        (plain | {f"{Q0}.bias": bias + 1}, {"bias": "all"}),
        (plain | {f"{PREFIX}.1.self_attn.q_proj.bias": bias}, {"bias": "all"}),
        (plain | SAVED_EMBEDDING, {}),
        (plain | other, {}),
        (plain | {f"{HEAD}.weight": SAVED_EMBEDDING[f"{EMBEDDING}.weight"]}, {}),
        (plain | embedding(), {}),
        (plain | head(), {}),
    ]  # fmt: skip

    digests = [identify(found, **config)[1] for found, config in configured]

    assert len(set(digests)) == len(digests)
    again = plain | {f"{Q0}.base_layer.bias": bias}
    assert identify(again, bias="lora_only")[1] == digests[4]
    saved = {f"{EMBEDDING}.modules_to_save.default.weight": SAVED_EMBEDDING[f"{EMBEDDING}.weight"]}
    assert identify(plain | saved, modules_to_save=["embed_tokens"])[1] == digests[7]


def test_the_digest_of_a_plain_adapter_is_what_it_has_always_been() -> None:
    """A plain adapter has the digest that the first release computed, because registries keep digests for years."""
    found = {name: np.ones_like(tensor) for name, tensor in tensors().items()}

    assert identify_adapter(config_bytes(), weights_bytes(found), DESCRIPTION)[1] == (
        "sha256:aa2d1571a0d3470e3e8f8f22eb818d8f1bd5a4d97f93c208b12f7d57f0ebfb6b"
    )


def test_what_is_changed_is_listed_in_the_models_order() -> None:
    """The adapter lists the modules that LoRA, a bias or a saved matrix changes, in the model's order."""
    found = tensors(targets=("v_proj",)) | {f"{Q0}.bias": ones(32)} | SAVED_EMBEDDING | head()

    spec, _ = identify(found, bias="all")

    assert spec.target_modules == ("q_proj", "v_proj", "embed_tokens", "lm_head")
    assert Q0_A.startswith(Q0)
    assert len(list(spec.entries)) == len(found)
