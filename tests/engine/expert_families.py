"""The served model families with experts: small configurations of each, beside those of families.py."""

from typing import Any

from transformers import Glm4MoeConfig, GptOssConfig, MixtralConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from tests.engine.families import SIZES, WINDOW

INNER = 24
CHOICE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": INNER}
HEADS: dict[str, Any] = {"head_dim": 16}
GPT_OSS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
GLM: dict[str, Any] = CHOICE | {"n_routed_experts": 8, "head_dim": 16, "num_mtp_layers": 0}

EXPERT_FAMILIES: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "mixtral-windows": MixtralConfig(**SIZES, num_local_experts=20, num_experts_per_tok=3, sliding_window=WINDOW),
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES, **CHOICE, num_experts=6, shared_expert_intermediate_size=40, mlp_only_layers=[1]
    ),
    "qwen2-moe-windows": Qwen2MoeConfig(
        **SIZES,
        **CHOICE,
        num_experts=6,
        shared_expert_intermediate_size=40,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    ),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **CHOICE, **HEADS, num_experts=6, norm_topk_prob=True),
    "qwen3-moe-windows": Qwen3MoeConfig(
        **SIZES,
        **CHOICE,
        num_experts=6,
        **HEADS,
        attention_bias=True,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
    ),
    "glm4-moe": Glm4MoeConfig(**SIZES, **GLM, use_qk_norm=True, routed_scaling_factor=1.5),
    "glm4-moe-groups": Glm4MoeConfig(
        **SIZES, **GLM, n_group=4, topk_group=2, n_shared_experts=2, first_k_dense_replace=2, attention_bias=True
    ),
    "gpt-oss": GptOssConfig(**SIZES, **GPT_OSS, sliding_window=WINDOW),
    "gpt-oss-wide": GptOssConfig(**SIZES, **GPT_OSS, sliding_window=4096, attention_bias=False),
}

JOINED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
"""The parameters that hold all experts."""
LLAMA_MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = "experts"
EXPERT_KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        EXPERTS: {"r": 4, "target_modules": ["q_proj", "o_proj", "w1", "w2", "w3"]},
        "router": {"r": 3, "target_modules": ["gate", "v_proj"]},
        "down alone": {"r": 5, "target_modules": ["q_proj"], "target_parameters": JOINED[1:]},
        "rslora": {"r": 3, "use_rslora": True, "target_modules": ["o_proj"], "target_parameters": JOINED},
        "all": {"r": 4, "target_modules": "all-linear"},
    },
    "qwen2-moe": {
        EXPERTS: {"r": 4, "target_modules": ["q_proj", *LLAMA_MLP], "target_parameters": JOINED},
        "router": {"r": 4, "target_modules": ["o_proj"], "target_parameters": ["gate.weight"]},
        "patterns": {
            "r": 4,
            "target_modules": ["k_proj"],
            "target_parameters": JOINED,
            "rank_pattern": {"gate_up_proj": 9},
            "alpha_pattern": {"down_proj": 3},
        },
        "dora": {"r": 4, "use_dora": True, "target_modules": [*LLAMA_MLP, "shared_expert_gate", "q_proj"]},
        "lora-bias": {"r": 3, "lora_bias": True, "target_modules": [*LLAMA_MLP, "shared_expert_gate"]},
        "vocabulary": {"r": 4, "target_modules": ["embed_tokens", "lm_head"], "target_parameters": JOINED},
    },
    "qwen3-moe": {
        EXPERTS: {"r": 4, "target_modules": [*LLAMA_MLP, "k_proj"]},
        "router": {"r": 4, "target_modules": [*LLAMA_MLP, "gate"]},
        "weight": {"r": 4, "target_modules": [], "target_parameters": ["q_proj.weight", "experts.gate_up_proj"]},
    },
    "glm4-moe": {
        EXPERTS: {"r": 4, "target_modules": ["q_proj", *LLAMA_MLP]},
        "all": {"r": 8, "target_modules": "all-linear"},
    },
    "gpt-oss": {
        EXPERTS: {"r": 4, "target_modules": ["q_proj", "o_proj"], "target_parameters": [*JOINED, "router.weight"]},
        "attention": {"r": 4, "target_modules": "all-linear"},
    },
}
"""What peft can put on each family: the options of its LoraConfig, by the name of the adapter."""
