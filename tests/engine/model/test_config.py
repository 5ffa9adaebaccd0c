"""Reading config.json: the same facts as transformers reads, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.model.projections import joined_projections
from graftwork.engine.model.rotary import rotary_frequencies
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
GRANITE: dict[str, Any] = SIZES | {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
OLMO2: dict[str, Any] = SIZES | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
SMOLLM3: dict[str, Any] = SIZES | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "pad_token_id": 0}
PHI3: dict[str, Any] = SIZES | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
GEMMA2: dict[str, Any] = SIZES | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3: dict[str, Any] = SIZES | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
GEMMA3N: dict[str, Any] = SIZES | {"architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text"}
GEMMA3N |= {"num_kv_shared_layers": 1, "head_dim": 8, "laurel_rank": 4, "sliding_window": 16}
GEMMA3N |= {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 60}
WRAPPED_GEMMA3N: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "model_type": "gemma3n",
    "text_config": {name: value for name, value in GEMMA3N.items() if name != "architectures"},
    "vision_config": {"model_type": "gemma3n_vision", "hidden_size": 8},
    "audio_config": {"model_type": "gemma3n_audio", "hidden_size": 8},
    "image_token_id": 61,
    "audio_soft_tokens_per_image": 188,
    "eos_token_id": [1, 2],
    "torch_dtype": "bfloat16",
}
COHERE2: dict[str, Any] = SIZES | {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2"}
GLM4: dict[str, Any] = SIZES | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "pad_token_id": 0}
LONG: dict[str, Any] = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
OLDER_GEMMA3: dict[str, Any] = {
    "rope_theta": 1e6,
    "rope_local_base_freq": 2e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 16,
    "sliding_window_pattern": 3,
}
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

    (rope,) = set(config.ropes)
    assert rope is not None
    assert torch.equal(rotary_frequencies(config.head_dim, rope, config.context_tokens), expected.inv_freq)
    assert rope.attention_factor == expected.attention_scaling


LATER = [
    GRANITE,
    GRANITE | {"attention_multiplier": 0.1, "embedding_multiplier": 12, "attention_bias": True},
    OLMO2,
    OLMO2 | {"attention_bias": True, "num_key_value_heads": None},
    SMOLLM3,
    SMOLLM3 | {"use_sliding_window": True, "sliding_window": 16, "no_rope_layers": [1, 0, 0, 1]},
    SMOLLM3 | {"no_rope_layer_interval": 2, "max_window_layers": 28, "tie_word_embeddings": False},
    PHI3,
    PHI3 | {"sliding_window": 16, "rope_scaling": None, "lm_head_bias": False, "full_attn_mod": 1},
    PHI3 | {"original_max_position_embeddings": 64, "rope_scaling": LONG},
    PHI3
    | {
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0]},
        "original_max_position_embeddings": 32,
    },
    GEMMA2,
    GEMMA2 | {"hidden_act": "silu", "head_dim": 8, "sliding_window": 16, "cache_implementation": "hybrid"},
    GEMMA2 | {"layer_types": BY_HALVES, "sliding_window": 16, "attention_bias": True},
    GEMMA3,
    GEMMA3 | OLDER_GEMMA3,
    GEMMA3 | {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}},
    COHERE2,
    COHERE2 | {"sliding_window": 16, "sliding_window_pattern": 2, "use_qk_norm": False, "rotary_pct": 1.0},
    COHERE2 | {"sliding_window": 16, "layer_types": BY_HALVES, "rope_theta": 5e4},
    GLM4,
    GLM4 | {"attention_bias": False, "partial_rotary_factor": 0.25, "head_dim": 16},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("raw", LATER)
def test_facts_of_other_families_are_those_of_transformers(tmp_path: Path, raw: dict[str, Any]) -> None:
    """Shapes, biases, norms, scales, windows and the frequencies of each layer are those that transformers builds."""
    config = read(tmp_path, raw)
    model = reference(tmp_path)

    layers, theirs = model.model.layers, model.config
    linears = {name.split(".")[-1]: part for name, part in layers[0].named_modules() if "_proj" in name}
    ours = config.target_shapes
    joined = {name: tuple(target for target, _ in parts) for name, parts in joined_projections(config).items()}
    assert {name for name in ours if not any(name in parts for parts in joined.values())} | {*joined} == {*linears}
    for name, linear in linears.items():
        parts = joined.get(name, (name,))
        assert (sum(ours[part][0] for part in parts), ours[parts[0]][1]) == tuple(linear.weight.shape)
        assert (linear.bias is not None) == all(part in config.biased_targets for part in parts)
    norms = {name for name, _ in layers[0].named_children() if "norm" in name}
    assert set(config.block.norms.names) == norms
    assert config.has_qk_norm or config.block.has_wide_qk_norm or not hasattr(layers[0].self_attn, "q_norm")
    assert config.rms_norm_eps == getattr(theirs, "rms_norm_eps", None) or theirs.layer_norm_eps
    assert (config.context_tokens, config.tie_word_embeddings) == (128, theirs.tie_word_embeddings)
    assert config.score_scale == pytest.approx(layers[0].self_attn.scaling)
    for index, layer in enumerate(layers):
        of_all = getattr(theirs, "sliding_window", None) if raw["model_type"] == "phi3" else None
        window = getattr(layer.self_attn, "sliding_window", of_all)
        assert config.windows[index] == (window if window is not None and window < 128 else None)
        check_frequencies(config, index, model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"num_kv_shared_layers": 0, "intermediate_size": [48, 24, 32, 48], "attention_bias": True},
        {"altup_num_inputs": 3, "altup_active_idx": 2, "num_hidden_layers": 12, "num_kv_shared_layers": 5},
        {"activation_sparsity_pattern": [0.5, 0.0, 0.25, 0.0], "rope_theta": 5e5, "rope_local_base_freq": 2e4},
    ],
)
def test_facts_of_several_streams_are_those_of_transformers(tmp_path: Path, own: dict[str, Any]) -> None:
    """The layers' shapes, windows, frequencies and sparsity, and whose keys and values they read, are those of
    transformers."""
    config = read(tmp_path, GEMMA3N | own)
    model = reference(tmp_path)

    layers, theirs = model.model.layers, model.config
    assert config.streams is not None
    assert (config.streams.count, config.streams.active) == (theirs.altup_num_inputs, theirs.altup_active_idx)
    assert config.score_scale == layers[0].self_attn.scaling == 1.0
    around = {
        name: part for name, part in model.model.named_modules() if isinstance(part, Linear) and "layers." not in name
    }
    assert config.model_shapes == {name: tuple(part.weight.shape) for name, part in around.items()}
    for index, layer in enumerate(layers):
        linears = {name.split(".")[-1]: part for name, part in layer.named_modules() if isinstance(part, Linear)}
        expected = {name: tuple(part.weight.shape) for name, part in linears.items()}
        assert config.layer_shapes(index) == expected
        assert {name for name in expected if linears[name].bias is not None} == {*config.biased_targets} & {*expected}
        assert config.windows[index] == layer.self_attn.sliding_window
        assert config.sparsity[index] == layer.mlp.activation_sparsity
        kinds, mode = theirs.layer_types, theirs.kv_sharing_modes[index]
        read_layer = max(
            (
                other
                for other in range(index)
                if theirs.kv_sharing_modes[other] == "store" and kinds[other] == kinds[index]
            ),
            default=index,
        )
        assert config.kv_source(index) == (read_layer if mode == "reuse" else index)
        check_frequencies(config, index, model)


def test_the_language_model_within_another_is_read_as_if_it_were_alone(tmp_path: Path) -> None:
    """Settings of vision and audio are left out, and those outside `text_config` serve where it has none."""
    inner, outer = read(tmp_path, GEMMA3N), read(tmp_path, WRAPPED_GEMMA3N)

    assert outer.wrapper is not None
    assert (outer.eos_token_ids, outer.dtype) == ((1, 2), "bfloat16")
    assert replace(outer, wrapper=None, eos_token_ids=inner.eos_token_ids, dtype=inner.dtype) == inner


def check_frequencies(config: ModelConfig, index: int, model: Any) -> None:
    """Compare the frequencies of one layer with those of the model that transformers has built."""
    attention, rotary, rope = model.model.layers[index].self_attn, model.model.rotary_emb, config.ropes[index]
    rotates = bool(getattr(attention, "use_rope", True))
    if type(attention).__name__ == "Cohere2Attention":
        rotates = attention.sliding_window is not None
    assert (rope is not None) == rotates
    if rope is None:
        return
    kind = getattr(attention, "layer_type", None)
    fresh = type(rotary)(model.config)
    name = f"{kind}_inv_freq" if hasattr(fresh, f"{kind}_inv_freq") else "inv_freq"
    factor = getattr(fresh, name.replace("inv_freq", "attention_scaling"))
    served = getattr(rope.scaling, "original_context_tokens", config.context_tokens)
    assert torch.equal(rotary_frequencies(config.head_dim, rope, served), getattr(fresh, name))
    assert rope.attention_factor == pytest.approx(factor)


def test_the_served_context_chooses_the_factors_of_longrope(tmp_path: Path) -> None:
    """An engine of long contexts takes the long factors for all requests, and its KV has a scope of its own. The oldest
    files call the scaling `su`."""
    config = read(tmp_path, PHI3 | {"original_max_position_embeddings": 64, "rope_scaling": LONG})
    (rope,) = set(config.ropes)
    assert rope is not None

    long = rotary_frequencies(config.head_dim, rope, config.context_tokens)
    short = rotary_frequencies(config.head_dim, rope, 64)

    torch.testing.assert_close(short / long, torch.tensor([1.0, 2.0 / 1.1, 4.0 / 1.2, 8.0 / 1.3]))
    older = PHI3 | {"original_max_position_embeddings": 64, "rope_scaling": LONG | {"type": "su"}}
    assert read(tmp_path, older).ropes == config.ropes
    assert config.kv_variant != replace(config, context_tokens=64).kv_variant == ""


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        (LLAMA | {"architectures": []}, "architectures"),
        (LLAMA | {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures"),
        (LLAMA | {"model_type": "mistral"}, "model_type 'mistral'"),
        (LLAMA | {"hidden_act": "relu"}, "hidden_act 'relu'"),
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
        (LLAMA | {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        (LLAMA | {"use_alibi": False, "norm_placement": "post"}, "use_alibi False, norm_placement 'post'"),
        (LLAMA | {"embedding_multiplier": 12.0}, "embedding_multiplier 12.0"),
        (LLAMA | {"is_encoder_decoder": True}, "is_encoder_decoder True"),
        (QWEN3 | {"num_experts": 8}, "num_experts 8"),
        (GRANITE | {"logits_scaling": 0}, "logits_scaling"),
        (GRANITE | {"attention_multiplier": "0.1"}, "attention_multiplier"),
        (PHI3 | {"lm_head_bias": True}, "lm_head_bias True"),
        (PHI3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        (PHI3 | {"rope_scaling": LONG | {"short_factor": [1.0]}}, "4 numbers each"),
        (PHI3 | {"rope_scaling": LONG | {"long_factor": 3}}, "'long_factor' as a list"),
        (PHI3 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
        (PHI3 | {"partial_rotary_factor": 0.4}, "rotates 3 features"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (GEMMA2 | {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        (GEMMA3N | {"num_kv_shared_layers": 4}, "num_kv_shared_layers 4 leaves no layer of sliding_attention"),
        (GEMMA3N | {"layer_types": BY_HALVES, "num_kv_shared_layers": 3}, "leaves no layer of sliding_attention"),
        (GEMMA3N | {"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        (GEMMA3N | {"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern"),
        (GEMMA3N | {"activation_sparsity_pattern": [1.0, 0.0, 0.0, 0.0]}, "activation_sparsity_pattern"),
        (GEMMA3N | {"intermediate_size": [48]}, "intermediate_size must hold"),
        (LLAMA | {"intermediate_size": [48] * 4}, "intermediate_size must be"),
        (GEMMA3N | {"altup_active_idx": 4}, "altup_active_idx 4 must be below"),
        (GEMMA3N | {"laurel_rank": 0}, "laurel_rank"),
        (GEMMA3N | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (GEMMA3N | {"vision_config": {}}, "vision_config"),
        (GEMMA3N | {"model_type": "gemma3n"}, "model_type 'gemma3n'"),
        (WRAPPED_GEMMA3N | {"model_type": "gemma3n_text"}, "model_type 'gemma3n_text'"),
        (WRAPPED_GEMMA3N | {"text_config": None}, "text_config must hold"),
        (WRAPPED_GEMMA3N | {"text_config": GEMMA3N | {"model_type": "gemma3_text"}}, "text_config.model_type"),
        (WRAPPED_GEMMA3N | {"text_config": GEMMA3N | {"router": 8}}, "router 8"),
        (WRAPPED_GEMMA3N | {"smell_config": {"nose": 1}}, "smell_config"),
        (WRAPPED_GEMMA3N | {"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not served"),
        (COHERE2 | {"use_qk_norm": True}, "use_qk_norm True"),
        (SMOLLM3 | {"no_rope_layers": [1, 1]}, "no_rope_layers"),
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
