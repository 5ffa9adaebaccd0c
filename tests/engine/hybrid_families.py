"""The served model families with recurrent layers: small configurations of each, beside those of families.py."""

from typing import Any

from transformers import GraniteMoeHybridConfig, PreTrainedConfig

from tests.engine.families import ALL, KINDS, SIZES

RECURRENT, ATTENTION = "linear_attention", "full_attention"
GRANITE: dict[str, Any] = SIZES | {
    "num_hidden_layers": 4,
    "layer_types": [RECURRENT, ATTENTION, RECURRENT, RECURRENT],
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}

HYBRID_FAMILIES: dict[str, PreTrainedConfig] = {
    "granite-hybrid": GraniteMoeHybridConfig(**GRANITE, tie_word_embeddings=True),
    "granite-hybrid-groups": GraniteMoeHybridConfig(
        **GRANITE | {"mamba_n_groups": 2, "mamba_d_head": "auto", "mamba_d_conv": 3, "mamba_n_heads": 8},
        position_embedding_type="rope",
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        attention_bias=True,
    ),
    "granite-hybrid-experts": GraniteMoeHybridConfig(**GRANITE | EXPERTS),
    "granite-attention": GraniteMoeHybridConfig(**GRANITE | {"layer_types": [ATTENTION] * 4}),
}
ROUTED = "routed"
HYBRID_KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "granite-hybrid": dict(KINDS)
    | {
        "head": {"r": 4, "target_modules": ["lm_head", "output_linear"]},
        "mixer": {"r": 4, "target_modules": ["in_proj", "out_proj"]},
        "mlp": {"r": 4, "target_modules": ["input_linear"]},
        "weight": {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["in_proj.weight"]},
    },
    "granite-hybrid-groups": {
        "dora": KINDS["dora"],
        "lora-bias": KINDS["lora-bias"],
        "bias": {"r": 3, "bias": "lora_only", "target_modules": ALL},
    },
    "granite-hybrid-experts": {
        ROUTED: {
            "r": 4,
            "target_modules": ["in_proj", "q_proj", "input_linear", "output_linear"],
            "target_parameters": ["router.weight", "experts.gate_up_proj", "experts.down_proj"],
        },
        "dora": KINDS["dora"],
    },
}
"""What peft can put on each family: the options of its LoraConfig, by the name of the adapter."""
