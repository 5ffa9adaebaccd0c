"""Describes the architectures with experts that the engine can serve, as data, beside those of architectures.py."""

from collections.abc import Mapping

from graftwork.engine.core.expert_shapes import ExpertNames
from graftwork.engine.core.layer_modules import LayerModules
from graftwork.engine.model.architectures import (
    GRANITE_DEFAULTS,
    GRANITE_SCALES,
    VARIANTS,
    ModelVariant,
    RopeRule,
    WindowRule,
)
from graftwork.engine.model.block import BlockSpec
from graftwork.engine.model.experts import ExpertRules, ExpertTensors, RoutedLayers, RouterScore
from graftwork.engine.model.recurrence import RecurrenceRules
from graftwork.engine.model.rope_config import RopeRules

_QKV = ("q_proj", "k_proj", "v_proj")
_ATTENTION = (*_QKV, "o_proj")
_UNUSED = ("output_router_logits", "router_jitter_noise")
"""What concerns training alone."""

EXPERT_VARIANTS: Mapping[str, ModelVariant] = {
    "MixtralForCausalLM": ModelVariant(
        model_type="mixtral",
        window_rule=WindowRule.EVERY_LAYER,
        experts=ExpertRules(
            count_settings=("num_local_experts", "num_experts"),
            size_setting="intermediate_size",
            layers=RoutedLayers.EVERY_LAYER,
            score=RouterScore.SOFTMAX,
            names=ExpertNames(blocks=("mlp", "block_sparse_moe"), projections=("w1", "w3", "w2")),
        ),
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_experts_per_tok": 2,
        },
        unused=_UNUSED,
    ),
    "Qwen2MoeForCausalLM": ModelVariant(
        model_type="qwen2_moe",
        window_rule=WindowRule.EARLY_EVEN_LAYERS,
        biased_by_setting={"qkv_bias": _QKV},
        experts=ExpertRules(
            count_settings=("num_experts",),
            size_setting="moe_intermediate_size",
            layers=RoutedLayers.BY_STEP,
            score=RouterScore.SOFTMAX,
            normalises="norm_topk_prob",
            shared_size_setting="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
        defaults={
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "decoder_sparse_step": 1,
            "num_experts_per_tok": 4,
        },
        unused=_UNUSED,
    ),
    "Qwen3MoeForCausalLM": ModelVariant(
        model_type="qwen3_moe",
        window_rule=WindowRule.EVERY_LAYER_IF_USED,
        biased_by_setting={"attention_bias": _ATTENTION},
        has_qk_norm=True,
        experts=ExpertRules(
            count_settings=("num_experts", "num_local_experts"),
            size_setting="moe_intermediate_size",
            layers=RoutedLayers.BY_STEP,
            score=RouterScore.SOFTMAX,
            normalises="norm_topk_prob",
        ),
        defaults={
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "num_experts_per_tok": 8,
        },
        unused=_UNUSED,
    ),
    "Glm4MoeForCausalLM": ModelVariant(
        model_type="glm4_moe",
        rope=RopeRules(allows_share=True),
        biased_by_setting={"attention_bias": _QKV},
        qk_norm_setting="use_qk_norm",
        experts=ExpertRules(
            count_settings=("n_routed_experts", "num_local_experts", "num_experts"),
            size_setting="moe_intermediate_size",
            layers=RoutedLayers.AFTER_FIRST,
            score=RouterScore.SIGMOID,
            normalises="norm_topk_prob",
            has_groups=True,
            shared_count_setting="n_shared_experts",
            names=ExpertNames(shared="shared_experts"),
        ),
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        draft_layers_settings=("num_nextn_predict_layers", "num_mtp_layers"),
        unused=_UNUSED,
    ),
    "GptOssForCausalLM": ModelVariant(
        model_type="gpt_oss",
        block=BlockSpec(has_sinks=True),
        window_rule=WindowRule.BY_PATTERN,
        biased_targets=("router",),
        biased_by_setting={"attention_bias": _ATTENTION},
        experts=ExpertRules(
            count_settings=("num_local_experts", "num_experts"),
            size_setting="intermediate_size",
            layers=RoutedLayers.EVERY_LAYER,
            score=RouterScore.SOFTMAX_OF_CHOSEN,
            has_biases=True,
            is_clamped=True,
            tensors=ExpertTensors.INTERLEAVED_COLUMNS,
            names=ExpertNames(router="router"),
            may_be_mxfp4=True,
        ),
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        unused=(*_UNUSED, "experts_per_token", "initial_context_length"),
    ),
    "GraniteMoeHybridForCausalLM": ModelVariant(
        model_type="granitemoehybrid",
        block=BlockSpec(
            modules=LayerModules(mlp="shared_mlp", gate_up="input_linear", down="output_linear", recurrent="mamba")
        ),
        rope_rule=RopeRule.BY_POSITION_TYPE,
        biased_by_setting={"attention_bias": _ATTENTION, "mamba_proj_bias": ("in_proj", "out_proj")},
        recurrence=RecurrenceRules(),
        experts=ExpertRules(
            count_settings=("num_local_experts",),
            size_setting="intermediate_size",
            layers=RoutedLayers.EVERY_LAYER_IF_ANY,
            score=RouterScore.SOFTMAX_OF_CHOSEN,
            shared_size_setting="shared_intermediate_size",
            names=ExpertNames(blocks=("block_sparse_moe",), router="router"),
            file_names={
                "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
                "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
                "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
            },
        ),
        intermediate_setting="shared_intermediate_size",
        scales=GRANITE_SCALES,
        defaults=GRANITE_DEFAULTS
        | {
            "position_embedding_type": None,
            "shared_intermediate_size": 1024,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 11_008,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        only={"time_step_limit": [0.0, float("inf")]},
        unused=(*_UNUSED, "mamba_chunk_size", "normalization_function", "init_method", "layers_block_type"),
    ),
}
"""The served architectures with experts, by their name in `architectures` of config.json."""

SERVED_VARIANTS: Mapping[str, ModelVariant] = {**VARIANTS, **EXPERT_VARIANTS}
"""All served architectures."""
