"""Lists the features of PEFT that this server does not support, and refuses an adapter that uses one of them.

Owns two tables: fields of adapter_config.json, and names of tensors. Each row describes one feature, and an error shows
the description. To support a feature, remove its row here, and read its field or tensor in lora_config.py,
tensor_names.py and module_reader.py.
Invariant: an unknown field that may switch on a feature, and an unknown tensor, are refused too. So every adapter is
applied completely or refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graftwork.adapters.format.specs import shown
from graftwork.platform.errors import ValidationFailed


def _is_set(value: object) -> bool:
    return value not in (None, False, "", [], {})


def _changes_base(value: object) -> bool:
    """Returns whether an initialisation of LoRA moved part of the base model's weights into the adapter.

    Also returns True for an initialisation that this server does not know.
    """
    return not (value is None or isinstance(value, bool) or value in _INITIALISATIONS_THAT_KEEP_THE_BASE)


_INITIALISATIONS_THAT_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class UnservedSetting:
    """A field of adapter_config.json that changes how PEFT applies an adapter, and that this server does not support.

    `what` describes the feature. The error for the field shows it.
    """

    field: str
    what: str
    in_use: Callable[[object], bool] = _is_set


@dataclass(frozen=True, slots=True)
class UnservedTensor:
    """A kind of tensor that this server does not support. `pattern` matches the names of such tensors.

    `what` describes the feature. The error for such a tensor shows it.
    """

    pattern: re.Pattern[str]
    what: str


_CONVERT = "an initialisation that changes the base's weights: save with path_initial_model_for_weight_conversion"

UNSERVED_SETTINGS = (
    UnservedSetting("trainable_token_indices", "rows of the embedding that replace the base's"),
    UnservedSetting("layer_replication", "layers of the base repeated into a larger model"),
    UnservedSetting("init_lora_weights", _CONVERT, _changes_base),
    UnservedSetting("loftq_config", "LoftQ, an adapter to a quantised base"),
    UnservedSetting("alora_invocation_tokens", "aLoRA, active only behind its invocation tokens"),
    UnservedSetting("use_qalora", "QALoRA, whose lora_A reads pooled inputs"),
    UnservedSetting("use_bdlora", "BD-LoRA, block-diagonal factors"),
    UnservedSetting("arrow_config", "Arrow routing between adapters"),
    UnservedSetting("kasa_config", "KaSA, singular values between the factors"),
    UnservedSetting("velora_config", "VeLoRA"),
    UnservedSetting("monteclora_config", "MonteCLoRA"),
    UnservedSetting("megatron_config", "LoRA on Megatron's parallel layers"),
    UnservedSetting("ensure_weight_tying", "adapters shared between tied layers"),
)

SERVED_FIELDS = frozenset(
    [
        "alpha_pattern",
        "base_fingerprint",
        "bias",
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "use_dora",
        "use_rslora",
    ]
)

TRAINING_FIELDS = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    ]
)
"""The fields of adapter_config.json that may have any value, because they have no effect here.

Some only say how the adapter was trained. Some do nothing without a setting that is refused above. PEFT resets
fan_in_fan_out for the linear layers of these models.
"""

UNSERVED_TENSORS = (
    UnservedTensor(re.compile(r"embed_tokens\.lora_magnitude_vector"), "DoRA on the embedding"),
    UnservedTensor(re.compile(r"modules_to_save"), "a whole module in the place of the base's"),
    UnservedTensor(re.compile(r"token_adapter|trainable_tokens"), "trained rows of the embedding"),
    UnservedTensor(re.compile(r"lora_diag"), "KaSA's singular values"),
    UnservedTensor(re.compile(r"hada_|lokr_|oft_|ia3_|vera_lambda|boft_|loha_"), "another method than LoRA"),
    UnservedTensor(re.compile(r"\.experts\.[a-z_]+_bias$"), "trained biases of experts"),
    UnservedTensor(re.compile(r"\.experts?\."), "LoRA on experts, which this model has not, or not by this name"),
    UnservedTensor(re.compile(r"lora_embedding_[AB]"), "LoRA on another embedding than embed_tokens"),
    UnservedTensor(re.compile(r"lora_A(\.default)?\.bias$"), "a bias on lora_A"),
    UnservedTensor(re.compile(r"\.bias$"), "a bias of this module"),
    UnservedTensor(re.compile(r"^(?!.*lora_).*\.weight$"), "a whole matrix of this module in the place of the base's"),
)


def refuse_unserved_settings(config: dict[str, Any]) -> None:
    """Raises ValidationFailed if adapter_config.json uses a field that is not supported. The error names the first such
    field.
    """
    for setting in UNSERVED_SETTINGS:
        if setting.in_use(config.get(setting.field)):
            raise unserved(f"config.{setting.field}", setting.what)
    known = SERVED_FIELDS | TRAINING_FIELDS | {setting.field for setting in UNSERVED_SETTINGS}
    for field, value in config.items():
        if field not in known and _is_set(value):
            raise unserved(f"config.{shown(field)}", "a setting this server does not know")


def describe_unserved_tensor(name: str) -> str | None:
    """Returns a description of the unsupported feature that uses tensors with this name; None if the name is unknown."""
    return next((row.what for row in UNSERVED_TENSORS if row.pattern.search(name)), None)


def unserved(param: str, what: str) -> ValidationFailed:
    """Returns the error for a feature of PEFT that is not supported.

    `param` is the field or tensor that uses the feature, and `what` is a description of the feature.
    """
    message = f"{param}: not served: {what}. The adapter would not behave as trained, so it is refused."
    return ValidationFailed(message, param=param, code="unsupported_feature")
