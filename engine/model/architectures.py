"""Describes the model architectures that the engine can serve, as data.

Owns the differences between architectures: sliding windows, biases, norms, and default settings. Never contains code
for a single architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


class WindowRule(Enum):
    """Says which layers have a sliding window.

    In such a layer a token attends only to the last `sliding_window` tokens.
    """

    NO_LAYER = auto()
    EVERY_LAYER = auto()
    BY_LAYER_TYPE = auto()
    """The layers named in `layer_types`, or the layers from `max_window_layers` on if `use_sliding_window` is set."""


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """Describes how one architecture differs from the others."""

    model_type: str
    """The `model_type` that config.json must have; transformers selects the model by it."""
    window_rule: WindowRule = WindowRule.NO_LAYER
    biased_targets: tuple[str, ...] = ()
    """Linear layers that always have a bias."""
    biased_by_setting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the name of a setting, the linear layers that have a bias if the setting is true."""
    has_qk_norm: bool = False
    """Whether each head of queries and keys is normalised before rotation."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values that transformers uses for absent settings, besides COMMON_DEFAULTS."""


COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""The values that transformers uses for absent settings in all architectures."""

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
        window_rule=WindowRule.BY_LAYER_TYPE,
        biased_targets=("q_proj", "k_proj", "v_proj"),
        defaults={
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "Qwen3ForCausalLM": ModelVariant(
        model_type="qwen3",
        window_rule=WindowRule.BY_LAYER_TYPE,
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
}
"""The served architectures, by their name in `architectures` of config.json."""
