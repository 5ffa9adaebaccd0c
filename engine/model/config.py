"""Reads the sizes and settings of a decoder from a Hugging Face config.json.

Turns config.json into a ModelConfig; engine/model/architectures.py lists how architectures differ. Never imports torch,
because the gateway reads configurations too. Never ignores an unsupported setting: raises an error that names the
setting.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftwork.engine.model.architectures import COMMON_DEFAULTS, VARIANTS, ModelVariant, WindowRule
from graftwork.engine.model.rope_config import RopeConfig, read_rope_config
from graftwork.platform.errors import InvalidRequest

_ACTIVATIONS = {"silu", "swish"}  # both names mean the same function
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and settings of a model that the forward pass needs, besides the weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    biased_targets: tuple[str, ...]
    """LoRA targets that have a bias."""
    has_qk_norm: bool
    """Whether each head of queries and keys is normalised before rotation."""
    windows: tuple[int | None, ...]
    """The window of each layer.

    A query at position p sees the keys from p - window + 1 to p; with None, all keys up to p.
    """
    tie_word_embeddings: bool
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def kv_width(self) -> int:
        """The number of features of one token's key in one layer, over all KV heads. A value has the same number."""
        return self.num_kv_heads * self.head_dim

    def kv_page_bytes(self, page_tokens: int, item_bytes: int) -> int:
        """Returns the size in bytes of one KV page: the keys and values of `page_tokens` tokens in all layers."""
        return 2 * self.num_layers * page_tokens * self.kv_width * item_bytes

    @property
    def target_shapes(self) -> dict[str, tuple[int, int]]:
        """The pair (out_features, in_features) of each linear layer that LoRA can change, by name, such as "q_proj"."""
        query = self.num_heads * self.head_dim
        return {
            "q_proj": (query, self.hidden_size),
            "k_proj": (self.kv_width, self.hidden_size),
            "v_proj": (self.kv_width, self.hidden_size),
            "o_proj": (self.hidden_size, query),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }


def read_model_config(folder: Path) -> ModelConfig:
    """Reads config.json from a model folder.

    Raises InvalidRequest if the file is missing, or if the model is not supported.
    """
    try:
        return _read_model_config(folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _refused(f"a setting has a value of the wrong kind ({error}): take the model's own file.") from error


def _read_model_config(folder: Path) -> ModelConfig:
    found = _read_json(folder / "config.json")
    variant = _variant(found)
    raw = {**COMMON_DEFAULTS, **variant.defaults, **found}
    _refuse_unsupported(raw)
    heads = _whole(raw, "num_attention_heads")
    config = ModelConfig(
        vocab_size=_whole(raw, "vocab_size"),
        hidden_size=_whole(raw, "hidden_size"),
        intermediate_size=_whole(raw, "intermediate_size"),
        num_layers=_whole(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if raw.get("num_key_value_heads") is None else _whole(raw, "num_key_value_heads"),
        head_dim=raw["hidden_size"] // heads if raw.get("head_dim") is None else _whole(raw, "head_dim"),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope=read_rope_config(raw | {"max_position_embeddings": _whole(raw, "max_position_embeddings")}),
        biased_targets=_biased_targets(raw, variant),
        has_qk_norm=variant.has_qk_norm,
        windows=_windows(raw, variant.window_rule),
        tie_word_embeddings=raw["tie_word_embeddings"],
        context_tokens=raw["max_position_embeddings"],
        eos_token_ids=_eos_token_ids(folder, raw),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise _refused("num_attention_heads must be a multiple of num_key_value_heads, and head_dim even.")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidRequest(
            f"{path} does not exist: --model must name a Hugging Face folder.", param="model"
        ) from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.", param="model") from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", param="model") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} holds no JSON object: take the model's own file.", param="model")
    return content


def _variant(found: dict[str, Any]) -> ModelVariant:
    """Returns the architecture that config.json names."""
    architectures = found.get("architectures") or []
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in VARIANTS:
        raise _refused(f"architectures {architectures} is not served; served is one of {', '.join(VARIANTS)}.")
    variant = VARIANTS[architectures[0]]
    model_type = found.get("model_type", variant.model_type)
    if model_type != variant.model_type:
        raise _refused(f"model_type {model_type!r} does not belong to {architectures[0]}: one of the two is wrong.")
    return variant


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    problems = {
        f"hidden_act {raw['hidden_act']!r}": raw["hidden_act"] not in _ACTIVATIONS,
        "is_causal false": raw.get("is_causal", True) is False,
    }
    problems |= {name: bool(value) for name, value in raw.items() if name.endswith("_config")}
    found = [name for name, applies in problems.items() if applies]
    if found:
        raise _refused(f"this checkpoint uses what is not served: {'; '.join(found)}.")


def _biased_targets(raw: dict[str, Any], variant: ModelVariant) -> tuple[str, ...]:
    chosen = (targets for setting, targets in variant.biased_by_setting.items() if raw.get(setting))
    return variant.biased_targets + tuple(target for targets in chosen for target in targets)


def _windows(raw: dict[str, Any], rule: WindowRule) -> tuple[int | None, ...]:
    """Returns the window of each layer; None for a layer whose window is as wide as the context."""
    window = _window(raw, rule)
    first = _whole(raw, "max_window_layers", least=0) if rule is WindowRule.BY_LAYER_TYPE else 0
    derived = [
        _SLIDING if window is not None and layer >= first else _FULL for layer in range(raw["num_hidden_layers"])
    ]
    given = raw.get("layer_types") or derived
    is_free = rule is WindowRule.BY_LAYER_TYPE and (window is not None or _SLIDING not in given)
    if len(given) != len(derived) or not set(given) <= {_SLIDING, _FULL} or not (is_free or given == derived):
        raise _refused(f"layer_types {given} does not fit the other settings, by which it is {derived}.")
    narrow = window if window is not None and window < raw["max_position_embeddings"] else None
    return tuple(narrow if kind == _SLIDING else None for kind in given)


def _window(raw: dict[str, Any], rule: WindowRule) -> int | None:
    """Returns the width of the window; None if no layer has one."""
    is_unused = rule is WindowRule.BY_LAYER_TYPE and not raw.get("use_sliding_window", False)
    if raw.get("sliding_window") is None or is_unused:
        return None
    window = _whole(raw, "sliding_window")
    if rule is not WindowRule.NO_LAYER:
        return window
    if raw.get("use_sliding_window", True) and window < raw["max_position_embeddings"]:
        raise _refused(f"sliding_window {window} is not served with this architecture, which has none.")
    return None


def _whole(raw: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _refused(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return value


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(f"config.json: {problem}", param="model")


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens: of generation_config.json, else of config.json."""
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    if eos is None:
        return ()
    token_ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token_id, int) for token_id in token_ids):
        raise _refused(f"eos_token_id must be a token id or a list of them, not {eos!r}.")
    return tuple(token_ids)
