"""Describes the model architectures that the engine can serve, as data.

Owns the differences between architectures: what a layer computes, which layers have windows and rotary embeddings,
biases, scales, and default settings. Never contains code for a single architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from graftwork.engine.core.layer_modules import LayerModules
from graftwork.engine.model.block import LLAMA_BLOCK, STREAM_SETTINGS, BlockSpec, NormKind, NormTensors
from graftwork.engine.model.experts import ExpertRules
from graftwork.engine.model.recurrence import RecurrenceRules
from graftwork.engine.model.rope_config import LLAMA_ROPE, RopeRules

_QKV = ("q_proj", "k_proj", "v_proj")
_ATTENTION = (*_QKV, "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


class WindowRule(Enum):
    """Says which layers have a sliding window.

    In such a layer a token attends only to the last `sliding_window` tokens. `layer_types` overrides the last four.
    """

    NO_LAYER = auto()
    EVERY_LAYER = auto()
    EVERY_LAYER_IF_USED = auto()
    """All layers, if `use_sliding_window` is set."""
    EARLY_EVEN_LAYERS = auto()
    """The even layers before `max_window_layers`, if `use_sliding_window` is set."""
    LATER_LAYERS = auto()
    """The layers from `max_window_layers` on, if `use_sliding_window` is set."""
    WITHOUT_ROPE = auto()
    """The layers that `no_rope_layers` leaves without rotary embedding, if `use_sliding_window` is set."""
    BY_PATTERN = auto()
    """All layers but each `sliding_window_pattern`th."""


class RopeRule(Enum):
    """Says which layers have a rotary embedding, and which."""

    EVERY_LAYER = auto()
    BY_LIST = auto()
    """The layers with 1 in `no_rope_layers`, or else all but each `no_rope_layer_interval`th."""
    WINDOWED_LAYERS = auto()
    """Layers without a window rotate nothing."""
    BY_LAYER_TYPE = auto()
    """Layers with a window have settings of their own."""
    BY_POSITION_TYPE = auto()
    """All layers with attention, if `position_embedding_type` is "rope"."""


@dataclass(frozen=True, slots=True)
class ScaleSetting:
    """A number that is a setting of config.json to some power. The power 0 gives 1."""

    name: str
    power: float = 1.0


@dataclass(frozen=True, slots=True)
class WrapperRules:
    """How a model that also sees or hears holds its language model, which is all that is served of it."""

    model_type: str
    """The `model_type` of the whole config.json; that of `text_config` is the variant's."""
    prefix: str
    """What the names of the language model's tensors begin with, in place of "model."."""
    other_tensors: tuple[str, ...]
    """What the names of all other tensors begin with. They are left out."""
    other_settings: tuple[str, ...]
    """The settings of config.json that are of the other parts alone."""


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """Describes how one architecture differs from the others."""

    model_type: str
    """The `model_type` that config.json must have; transformers selects the model by it."""
    block: BlockSpec = LLAMA_BLOCK
    window_rule: WindowRule = WindowRule.NO_LAYER
    rope_rule: RopeRule = RopeRule.EVERY_LAYER
    rope: RopeRules = LLAMA_ROPE
    biased_targets: tuple[str, ...] = ()
    """Linear layers that always have a bias."""
    biased_by_setting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the name of a setting, the linear layers that have a bias if the setting is true."""
    has_qk_norm: bool = False
    """Whether each head of queries and keys is normalised before rotation."""
    qk_norm_setting: str | None = None
    """The setting that says whether heads are normalised, where the architecture alone does not."""
    experts: ExpertRules | None = None
    """How routed layers are described; None if the architecture has none."""
    recurrence: RecurrenceRules | None = None
    """How recurrent layers are described; None if the architecture has none."""
    has_streams: bool = False
    """Whether there are several residual streams (see StreamsSpec)."""
    kv_sharing_setting: str | None = None
    """The setting that counts the last layers, which read the keys and values of earlier layers of their kind."""
    sparsity_setting: str | None = None
    """The setting with the share of each MLP's gates that is set to zero."""
    wrapper: WrapperRules | None = None
    """How the model is within another one; None if it is not."""
    intermediate_setting: str = "intermediate_size"
    """The setting that has the width of the dense MLP."""
    has_mlp_widths: bool = False
    """Whether that setting may be a list of one width for each layer."""
    draft_layers_settings: tuple[str, ...] = ()
    """The names of the setting that counts layers for drafts, whose tensors follow those of the model and are not used."""
    scales: Mapping[str, ScaleSetting] = field(default_factory=dict)
    """By the name of a field of Scales, the setting that it follows from."""
    rounds_embedding_scale: bool = False
    activation_setting: str = "hidden_act"
    epsilon_setting: str = "rms_norm_eps"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values that transformers uses for absent settings, besides COMMON_DEFAULTS."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of config.json, and the one value with which they are served."""
    unused: tuple[str, ...] = ()
    """Further settings that transformers does not read for this architecture."""

    @property
    def inner_prefix(self) -> str | None:
        """What the names of modules begin with in place of "model."; None if they begin with it."""
        return None if self.wrapper is None else self.wrapper.prefix


COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""The values that transformers uses for absent settings in all architectures."""

GRANITE_SCALES = {
    "embedding": ScaleSetting("embedding_multiplier"),
    "residual": ScaleSetting("residual_multiplier"),
    "attention": ScaleSetting("attention_multiplier"),
    "logits": ScaleSetting("logits_scaling", -1.0),
}
GRANITE_DEFAULTS = {
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GEMMA_SCALES = {
    "embedding": ScaleSetting("hidden_size", 0.5),
    "attention": ScaleSetting("query_pre_attn_scalar", -0.5),
    "logits_cap": ScaleSetting("final_logit_softcapping"),
}
_GEMMA_BLOCK = BlockSpec(
    norm=NormKind.RMS_ROUNDED_ONCE,
    norm_offset=1.0,
    norms=NormTensors(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
)
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}

_GEMMA3N = ModelVariant(
    model_type="gemma3n_text",
    block=replace(
        _GEMMA_BLOCK,
        norm_offset=0.0,
        has_value_norm=True,
        modules=LayerModules(
            further=(
                *("altup.modality_router", "altup.prediction_coefs", "altup.correction_coefs"),
                *("laurel.linear_left", "laurel.linear_right", "per_layer_input_gate", "per_layer_projection"),
            )
        ),
    ),
    window_rule=WindowRule.BY_PATTERN,
    rope_rule=RopeRule.BY_LAYER_TYPE,
    biased_by_setting={"attention_bias": _ATTENTION},
    has_qk_norm=True,
    has_streams=True,
    has_mlp_widths=True,
    kv_sharing_setting="num_kv_shared_layers",
    sparsity_setting="activation_sparsity_pattern",
    scales=_GEMMA_SCALES | {"attention": ScaleSetting("head_dim", 0.0)},
    rounds_embedding_scale=True,
    activation_setting="hidden_activation",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 15,
        "activation_sparsity_pattern": None,
        **dict(zip(STREAM_SETTINGS, (4, 0, True, 64, 256, 262_144), strict=True)),
    },
    unused=("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"),
)

VARIANTS: Mapping[str, ModelVariant] = {
    "LlamaForCausalLM": ModelVariant(
        model_type="llama",
        biased_by_setting={"attention_bias": _ATTENTION, "mlp_bias": _MLP},
        defaults={"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": ModelVariant(
        model_type="mistral",
        window_rule=WindowRule.EVERY_LAYER,
        defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": ModelVariant(
        model_type="qwen2",
        window_rule=WindowRule.LATER_LAYERS,
        biased_targets=_QKV,
        defaults={
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "Qwen3ForCausalLM": ModelVariant(
        model_type="qwen3",
        window_rule=WindowRule.LATER_LAYERS,
        biased_by_setting={"attention_bias": _ATTENTION},
        has_qk_norm=True,
        defaults={
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "GraniteForCausalLM": ModelVariant(
        model_type="granite",
        biased_by_setting={"attention_bias": _ATTENTION, "mlp_bias": _MLP},
        scales=GRANITE_SCALES,
        defaults=GRANITE_DEFAULTS,
    ),
    "Olmo2ForCausalLM": ModelVariant(
        model_type="olmo2",
        block=BlockSpec(
            norm=NormKind.RMS_ROUNDED_ONCE,
            norms=NormTensors(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
            has_wide_qk_norm=True,
        ),
        biased_by_setting={"attention_bias": _ATTENTION},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    "SmolLM3ForCausalLM": ModelVariant(
        model_type="smollm3",
        window_rule=WindowRule.WITHOUT_ROPE,
        rope_rule=RopeRule.BY_LIST,
        biased_by_setting={"attention_bias": _ATTENTION, "mlp_bias": _MLP},
        defaults={
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    "Phi3ForCausalLM": ModelVariant(
        model_type="phi3",
        block=BlockSpec(joined_groups=("qkv", "gate_up")),
        window_rule=WindowRule.EVERY_LAYER,
        rope=RopeRules(
            allows_share=True, aliases={"su": "longrope", "yarn": "longrope"}, served=("default", "longrope")
        ),
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        only={"lm_head_bias": False},
        unused=("full_attn_mod", "interpolate_factor"),
    ),
    "Gemma2ForCausalLM": ModelVariant(
        model_type="gemma2",
        block=_GEMMA_BLOCK,
        window_rule=WindowRule.BY_PATTERN,
        biased_by_setting={"attention_bias": _ATTENTION},
        scales=_GEMMA_SCALES | {"attention_cap": ScaleSetting("attn_logit_softcapping")},
        rounds_embedding_scale=True,
        activation_setting="hidden_activation",
        defaults=_GEMMA_DEFAULTS
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        only={"use_bidirectional_attention": False},
    ),
    "Gemma3ForCausalLM": ModelVariant(
        model_type="gemma3_text",
        block=_GEMMA_BLOCK,
        window_rule=WindowRule.BY_PATTERN,
        rope_rule=RopeRule.BY_LAYER_TYPE,
        biased_by_setting={"attention_bias": _ATTENTION},
        has_qk_norm=True,
        scales=_GEMMA_SCALES,
        rounds_embedding_scale=True,
        activation_setting="hidden_activation",
        defaults=_GEMMA_DEFAULTS
        | {
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
        only={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
        unused=("_sliding_window_pattern",),
    ),
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": replace(
        _GEMMA3N,
        wrapper=WrapperRules(
            model_type="gemma3n",
            prefix="model.language_model.",
            other_tensors=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
            other_settings=(
                *("vision_config", "audio_config", "audio_soft_tokens_per_image", "vision_soft_tokens_per_image"),
                *("boi_token_id", "eoi_token_id", "image_token_id", "boa_token_id", "eoa_token_id", "audio_token_id"),
            ),
        ),
    ),
    "Cohere2ForCausalLM": ModelVariant(
        model_type="cohere2",
        block=BlockSpec(norm=NormKind.LAYER, norms=NormTensors("input_layernorm", None, None, None), is_parallel=True),
        window_rule=WindowRule.BY_PATTERN,
        rope_rule=RopeRule.WINDOWED_LAYERS,
        rope=RopeRules(is_interleaved=True),
        biased_by_setting={"attention_bias": _ATTENTION},
        scales={"logits": ScaleSetting("logit_scale")},
        epsilon_setting="layer_norm_eps",
        defaults={
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
        },
        only={
            "use_qk_norm": False,
            "use_parallel_block": True,
            "use_gated_activation": True,
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "order_of_interleaved_layers": "local_attn_first",
        },
        unused=("_sliding_window_pattern", "layer_switch", "use_embedding_sharing", "use_parallel_embedding"),
    ),
    "Glm4ForCausalLM": ModelVariant(
        model_type="glm4",
        block=BlockSpec(
            norms=NormTensors(
                "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
            ),
            joined_groups=("gate_up",),
        ),
        rope=RopeRules(is_interleaved=True, allows_share=True),
        biased_by_setting={"attention_bias": _QKV},
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 0.00000015625,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
    ),
}
"""The served architectures, by their name in `architectures` of config.json."""
