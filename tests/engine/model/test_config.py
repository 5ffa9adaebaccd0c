"""Reading config.json: the same facts as transformers reads, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.model.layers import rotary_frequencies
from graftwork.platform.errors import InvalidRequest

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA: dict[str, Any] = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL: dict[str, Any] = SIZES | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2: dict[str, Any] = SIZES | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3: dict[str, Any] = SIZES | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
BY_HALVES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


def read(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    """Read a config.json with this content."""
    (folder / "config.json").write_text(json.dumps(raw))
    return read_model_config(folder)


def reference(folder: Path) -> Any:
    """The model that transformers builds from the same folder, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "raw",
    [
        LLAMA,
        LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "tie_word_embeddings": True},
        LLAMA | {"num_key_value_heads": None, "rms_norm_eps": 1e-5},
        LLAMA | {"sliding_window": 16, "use_sliding_window": False},
        MISTRAL | {"sliding_window": None},
        MISTRAL | {"sliding_window": 16, "head_dim": 16},
        {name: MISTRAL[name] for name in MISTRAL if name not in ("num_key_value_heads", "max_position_embeddings")}
        | {"num_attention_heads": 8},
        QWEN2,
        QWEN2 | {"sliding_window": 16, "max_window_layers": 1},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 16, "layer_types": BY_HALVES},
        QWEN3,
        QWEN3 | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
        QWEN3 | {"use_sliding_window": True, "sliding_window": 16, "layer_types": BY_HALVES},
        QWEN3 | {"layer_types": ["full_attention"] * 4},
    ],
)
def test_facts_are_those_of_the_model_that_transformers_builds(tmp_path: Path, raw: dict[str, Any]) -> None:
    """Shapes, biases, norms, windows and epsilon are those of transformers, for any absent settings."""
    config = read(tmp_path, raw)
    model = reference(tmp_path)

    layers = model.model.layers
    linears = {name.split(".")[-1]: part for name, part in layers[0].named_modules() if "proj" in name}
    assert config.target_shapes == {name: tuple(part.weight.shape) for name, part in linears.items()}
    assert set(config.biased_targets) == {name for name, part in linears.items() if part.bias is not None}
    assert config.has_qk_norm == hasattr(layers[0].self_attn, "q_norm")
    assert config.rms_norm_eps == layers[0].input_layernorm.variance_epsilon
    assert config.context_tokens == model.config.max_position_embeddings
    assert config.tie_word_embeddings == model.config.tie_word_embeddings
    of_all = model.config.sliding_window if raw["architectures"] == ["MistralForCausalLM"] else None
    expected = tuple(getattr(layer.self_attn, "sliding_window", of_all) for layer in layers)
    assert config.windows == expected


def test_a_window_as_wide_as_the_context_is_none(tmp_path: Path) -> None:
    """Such a window hides no key, so it is read as no window."""
    assert read(tmp_path, MISTRAL | {"sliding_window": 128}).windows == (None,) * 4
    assert read(tmp_path, MISTRAL | {"sliding_window": 127}).windows == (127,) * 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 1e3, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        },
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 4.0}, "partial_rotary_factor": 1.0},
        {
            "original_max_position_embeddings": 32,
            "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ],
)
def test_old_and_new_spellings_of_rope_are_read_as_transformers_reads_them(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Both spellings are read as transformers reads them; the older one counts if a file has both."""
    config = read(tmp_path, LLAMA | settings)
    expected = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))

    assert torch.equal(rotary_frequencies(config.head_dim, config.rope), expected.inv_freq)
    assert config.rope.attention_factor == expected.attention_scaling


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        (LLAMA | {"architectures": []}, "architectures"),
        (LLAMA | {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures"),
        (LLAMA | {"model_type": "mistral"}, "model_type 'mistral'"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA | {"is_causal": False}, "is_causal"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (LLAMA | {"vision_config": {"hidden_size": 8}}, "vision_config"),
        (LLAMA | {"sliding_window": 16}, "sliding_window 16"),
        (LLAMA | {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        (LLAMA | {"head_dim": 7}, "head_dim"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads"),
        (LLAMA | {"hidden_size": "32"}, "hidden_size"),
        ({name: LLAMA[name] for name in LLAMA if name != "intermediate_size"}, "intermediate_size"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window"),
        (MISTRAL | {"sliding_window": 16, "layer_types": BY_HALVES}, "layer_types"),
        (QWEN2 | {"layer_types": BY_HALVES}, "layer_types"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": -1}, "sliding_window"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        (LLAMA | {"rope_scaling": {"type": "su"}}, "'su'"),
        (LLAMA | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn' needs 'factor'"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": "2"}}, "'linear' needs 'factor'"),
        (LLAMA | {"rope_scaling": {"type": "dynamic"}}, "'dynamic' needs 'factor'"),
        (LLAMA | {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "'llama3' needs 'low_freq_factor'"),
        (LLAMA | {"rope_theta": float("nan")}, "'rope_theta'"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "each layer type"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, raw: dict[str, Any], named: str) -> None:
    """A model whose output would be wrong is refused with the name of the setting."""
    with pytest.raises(InvalidRequest, match=named):
        read(tmp_path, raw)


def test_generation_config_says_where_generation_stops(tmp_path: Path) -> None:
    """The stop tokens of generation_config.json replace the one of config.json."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')

    assert read(tmp_path, LLAMA | {"eos_token_id": 1}).eos_token_ids == (3, 4)
