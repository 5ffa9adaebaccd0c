"""Says which settings of a config.json the engine reads, and refuses all others by name.

A setting that is unknown may change what the model computes, so it is never ignored. Only null is no setting. Never
imports torch.
"""

from collections.abc import Mapping
from typing import Any

from graftwork.engine.model.architectures import ModelVariant
from graftwork.engine.model.block import STREAM_SETTINGS
from graftwork.platform.errors import InvalidRequest

_READ = frozenset(
    {
        *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "hidden_act"),
        *("rms_norm_eps", "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "is_causal"),
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
        *("original_max_position_embeddings", "sliding_window", "use_sliding_window", "layer_types"),
        *("max_window_layers", "quantization_config", "compression_config"),
    }
)
"""What is read for every architecture."""

_WITHOUT_EFFECT = frozenset(
    {
        # of training
        *("initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "embd_dropout"),
        *(
            "pretraining_tp",
            "gradient_checkpointing",
            "use_flash_attn",
            "_flash_attn_2_enabled",
            "router_aux_loss_coef",
        ),
        # of generation, which requests and generation_config.json choose
        *("use_cache", "cache_implementation", "max_length", "min_length", "do_sample", "early_stopping", "num_beams"),
        *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
        *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences"),
        *("output_scores", "return_dict_in_generate", "remove_invalid_values", "bad_words_ids"),
        *("bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class", "prefix"),
        # of the classes and files of transformers
        *("_name_or_path", "name_or_path", "transformers_version", "auto_map", "return_dict", "output_hidden_states"),
        *("output_attentions", "torchscript", "id2label", "label2id", "problem_type", "finetuning_task"),
        *("task_specific_params", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset"),
        *("attn_implementation_internal", "_attn_implementation_internal", "_commit_hash", "is_decoder"),
        *("keys_to_ignore_at_inference", "unsloth_fixed", "unsloth_version", "model_name", "base_model_tp_plan"),
    }
)
"""What changes nothing that the engine computes, whatever its value is."""

_WITHOUT_EFFECT_IF_OFF = frozenset(
    {
        *("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder"),
        *("pruned_heads", "chunk_size_feed_forward", "use_bfloat16", "tf_legacy_loss", "use_mrope"),
        *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
        *("exponential_decay_length_penalty", "attention_bias", "mlp_bias"),
    }
)
"""What changes nothing as long as its value is false, 0 or empty."""


_SHOWN_CHARACTERS = 60


def refuse_unknown(found: Mapping[str, Any], variant: ModelVariant) -> None:
    """Raises InvalidRequest if a config.json has a setting that the engine does not read.

    `found` is the content of the file. The error names all such settings.
    """
    known = _READ | _WITHOUT_EFFECT | _read_by(variant)
    wrong = [
        f"{name} {_shown(value)}"
        for name, value in found.items()
        if value is not None and name not in known and not (name in _WITHOUT_EFFECT_IF_OFF and not value)
    ]
    if wrong:
        raise refused(
            f"{', '.join(wrong)}: no such setting of {variant.model_type} is served. It may change what the model "
            "computes, so it is not ignored; remove it if it changes nothing."
        )
    for name, value in variant.only.items():
        if name in found and found[name] is not None and found[name] != value:
            raise refused(f"{name} {found[name]!r} is not served with {variant.model_type}; served is {value!r}.")


def unwrapped(found: Mapping[str, Any], variant: ModelVariant) -> dict[str, Any]:
    """Returns the settings of the model that is served: all of them, or those of the language model within another.

    Settings outside `text_config` serve where it has none. Raises InvalidRequest if `text_config` is no object, or if
    an outer setting is neither that of the language model nor of the parts that are left out.
    """
    wrapper = variant.wrapper
    if wrapper is None:
        return dict(found)
    text = found.get("text_config")
    if not isinstance(text, dict):
        raise refused(f"text_config must hold the settings of the language model, not {_shown(text)}.")
    if text.get("model_type", variant.model_type) != variant.model_type:
        raise refused(f"text_config.model_type {text['model_type']!r} does not belong to {wrapper.model_type}.")
    outer = {name: value for name, value in found.items() if name not in ("text_config", *wrapper.other_settings)}
    return (
        outer | {name: value for name, value in text.items() if value is not None} | {"model_type": variant.model_type}
    )


def _shown(value: object) -> str:
    """Returns a value for an error: its first characters, if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def whole(raw: Mapping[str, Any], name: str, least: int = 1) -> int:
    """Returns a setting that is a whole number of at least `least`. Raises InvalidRequest if it is none."""
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise refused(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return value


def positive(raw: Mapping[str, Any], name: str) -> float:
    """Returns a setting that is a finite number above 0. Raises InvalidRequest if it is none."""
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise refused(f"{name} must be a number above 0, not {value!r}.")
    return float(value)


def refused(problem: str) -> InvalidRequest:
    """Returns the error for a config.json that cannot be served."""
    return InvalidRequest(f"config.json: {problem}", param="model")


def _read_by(variant: ModelVariant) -> frozenset[str]:
    """Returns the names of the settings that only some architectures have, and that are read for this one."""
    scales = {scale.name for scale in variant.scales.values()}
    settings = {variant.activation_setting, variant.epsilon_setting, *variant.unused, *scales}
    settings |= {*variant.draft_layers_settings} | ({variant.qk_norm_setting} if variant.qk_norm_setting else set())
    settings |= variant.experts.settings if variant.experts is not None else set()
    settings |= variant.recurrence.settings if variant.recurrence is not None else set()
    settings |= {name for name in (variant.kv_sharing_setting, variant.sparsity_setting) if name is not None}
    settings |= {*STREAM_SETTINGS} if variant.has_streams else set()
    settings |= {variant.intermediate_setting}
    return frozenset(settings | {*variant.defaults, *variant.biased_by_setting, *variant.only})
