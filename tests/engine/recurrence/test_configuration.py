"""Reading the configuration of models with recurrent layers, their checkpoints, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftwork.engine.build.devices import check_recurrent
from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.model.weights import DecoderWeights, load_decoder_weights, open_weights
from graftwork.engine.rpc.codec import description_from_wire, description_to_wire
from graftwork.platform.errors import InvalidRequest
from tests.engine.families import Family, make_family
from tests.engine.hybrid_families import ATTENTION, HYBRID_FAMILIES, RECURRENT
from tests.engine.tagged_kv_cache import load_always

TINY: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "vocab_size": 100_352,
    "hidden_size": 1536,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_hidden_layers": 40,
    "layer_types": [ATTENTION if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "max_position_embeddings": 131_072,
    "position_embedding_type": "nope",
}
"""A configuration of the shape of Granite 4.0 H Tiny, in the words of published files."""


def read(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return read_model_config(folder)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.set_num_threads(1)
    return make_family(HYBRID_FAMILIES["granite-hybrid-experts"], tmp_path_factory.mktemp("hybrid"), ())


def test_a_published_configuration_is_read(tmp_path: Path) -> None:
    """Layers of both kinds, their sizes, experts, no rotary embedding, and the size of a page and of the states in it."""
    model = read(tmp_path)

    assert model.recurrence is not None
    assert model.kv_layers == (5, 15, 25, 35)
    assert model.ropes == (None,) * 40
    assert model.experts is not None
    assert model.experts.shared is not None
    assert model.layer_shapes(0)["in_proj"] == (3072 + 3072 + 2 * 128 + 48, 1536)
    assert "q_proj" not in model.layer_shapes(0)
    assert "in_proj" not in model.layer_shapes(5)
    one_layer = 4 * (48 * 64 * 128 + 3 * (3072 + 2 * 128))
    assert model.recurrence.state_bytes == 36 * one_layer
    assert model.page_tokens == 512
    keys_and_values = 4 * 512 * 2 * 4 * 128 * 2
    assert 0 <= model.kv_page_bytes(512, 2) - keys_and_values - 36 * one_layer < keys_and_values // 4


def test_pages_of_small_states_are_small(tmp_path: Path) -> None:
    """The default size of a page follows from the state: the least power of two for which it is no larger than KV in bf16."""
    small = read(tmp_path, mamba_n_heads=48, mamba_d_state=1, mamba_d_conv=2, num_key_value_heads=12)

    assert small.recurrence is not None
    token_bytes = 4 * 2 * 2 * 12 * 128
    assert small.recurrence.state_bytes <= small.page_tokens * token_bytes < 2 * small.recurrence.state_bytes
    assert 16 < small.page_tokens < 512


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layer_types": ["mamba"] * 40}, "at least one layer with attention"),
        ({"layer_types": None}, "at least one layer with attention"),
        ({"layer_types": ["mamba", "attention"]}, "for each of 40 layers"),
        ({"layer_types": ["sliding_attention"] * 40}, "layer_types"),
        ({"mamba_d_head": 63}, "mamba_d_head 63 must be mamba_expand times hidden_size, which is 3072"),
        ({"mamba_n_groups": 5}, "mamba_n_groups 5 must divide the heads"),
        ({"mamba_d_conv": 1}, "mamba_d_conv must be a whole number of at least 2"),
        ({"mamba_d_state": "128"}, "mamba_d_state must be a whole number"),
        ({"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type must be"),
        ({"mamba_min_dt": 1.0}, "mamba_min_dt 1.0: no such setting"),
        ({"num_local_experts": -1}, "num_local_experts"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
            "recurrent layers are not served",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    """An error names the setting and what it must be."""
    with pytest.raises(InvalidRequest, match=told):
        read(tmp_path, **changes)


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    """An upper limit of infinity is the same in either spelling."""
    assert read(tmp_path, time_step_limit=[0.0, {"__float__": "Infinity"}]).recurrence is not None
    assert read(tmp_path, time_step_limit=[0.0, float("inf")]).recurrence is not None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tensor_parallel": 2}, "one device"),
        ({"quantization": "int8"}, "--quantization int8 is not served"),
    ],
)
def test_an_engine_refuses_what_it_cannot_do_with_recurrent_layers(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    """Several devices and rounded weights are refused at the start, before weights are read."""
    read(tmp_path, num_local_experts=0)

    with pytest.raises(InvalidRequest, match=told):
        build_engine(EngineConfig(tmp_path, dtype="float32", **options), lambda _: None, costs=load_always())  # type: ignore[arg-type,return-value]


def test_only_a_cpu_computes_recurrent_layers(tmp_path: Path) -> None:
    """A GPU is refused by name; a model without such layers is not."""
    hybrid, attention = read(tmp_path), read(tmp_path, layer_types=["attention"] * 40)

    check_recurrent(hybrid, torch.device("cpu"))
    check_recurrent(attention, torch.device("cuda:0"))

    with pytest.raises(InvalidRequest, match="not served on cuda:0"):
        check_recurrent(hybrid, torch.device("cuda:0"))


def loaded(folder: Path) -> DecoderWeights:
    config = read_model_config(folder)
    return load_decoder_weights(open_weights(folder, config), config, torch.device("cpu"), torch.float32)


def test_each_projection_is_found_in_its_layer(family: Family) -> None:
    """The weights of in_proj, out_proj, the shared MLP and the router are those of the file."""
    tensors = load_file(family.folder / "model.safetensors")

    weights = loaded(family.folder)

    prefix = "model.layers.2"
    for target in ("in_proj", "out_proj"):
        assert torch.equal(weights.module(2, target)[0], tensors[f"{prefix}.mamba.{target}.weight"])
    joined = torch.cat([weights.module(2, f"shared_{name}")[0] for name in ("gate_proj", "up_proj")])
    assert torch.equal(joined, tensors[f"{prefix}.shared_mlp.input_linear.weight"])
    assert torch.equal(weights.module(2, "shared_down_proj")[0], tensors[f"{prefix}.shared_mlp.output_linear.weight"])
    assert torch.equal(weights.module(2, "router")[0], tensors[f"{prefix}.block_sparse_moe.router.layer.weight"])
    assert torch.equal(weights.module(1, "q_proj")[0], tensors["model.layers.1.self_attn.q_proj.weight"])


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("mamba.A_log", None, "no tensor.*mamba.A_log"),
        ("mamba.conv1d.weight", lambda tensor: tensor[:, :, 1:], r"conv1d.weight.*\(80, 1, 3\), not \(80, 1, 4\)"),
        ("shared_mlp.input_linear.weight", lambda tensor: tensor[1:], r"input_linear.*\(79, 32\), not \(80, 32\)"),
        ("mamba.extra", lambda tensor: torch.ones(3), "mamba.extra"),
    ],
)
def test_a_wrong_tensor_of_a_recurrent_layer_is_refused_by_name(
    family: Family, tmp_path: Path, name: str, change: Callable[[Any], torch.Tensor] | None, told: str
) -> None:
    """A tensor that is missing, has another shape or has no use is named."""
    tensors = load_file(family.folder / "model.safetensors")
    tensor = tensors.pop(f"model.layers.0.{name}", None)
    if change is not None:
        tensors[f"model.layers.0.{name}"] = change(tensor).contiguous()
    (tmp_path / "config.json").write_bytes((family.folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(InvalidRequest, match=told):
        loaded(tmp_path)


def test_a_gateway_learns_the_names_of_the_modules(family: Family) -> None:
    """The description of an engine has the recurrent layers and the names of modules, also on the wire."""
    description = family.engine().engine.description

    assert description.modules is not None
    assert description.modules.recurrent_layers == (0, 2, 3)
    assert description_from_wire(description_to_wire(description)) == description
    assert RECURRENT not in description.target_shapes
