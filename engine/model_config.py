"""A decoder's shape, read from a Hugging Face config.json. Variants are data, not classes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftwork.platform.errors import InvalidRequest

_SERVED = {"LlamaForCausalLM"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass must know of a checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def kv_width(self) -> int:
        """Features of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def target_shapes(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of each LoRA target."""
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
    """Read config.json. Raises InvalidRequest if the file is missing or describes a model that is not served."""
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidRequest(
            f"{path} does not exist: --model must name a Hugging Face folder.", param="model"
        ) from None
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", param="model") from error
    _refuse_what_is_not_served(raw)
    heads = raw["num_attention_heads"]
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=_rope(raw).get("rope_theta", 10_000.0),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        context_tokens=raw["max_position_embeddings"],
        eos_token_ids=_eos_token_ids(folder, raw),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
    )


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Newer files hold everything in rope_parameters; older ones spread it."""
    older: dict[str, Any] = {"rope_theta": raw.get("rope_theta", 10_000.0)} | (raw.get("rope_scaling") or {})
    newer: dict[str, Any] = raw.get("rope_parameters") or {}
    return older | newer


def _refuse_what_is_not_served(raw: dict[str, Any]) -> None:
    architectures = set(raw.get("architectures") or [])
    rope_type = _rope(raw).get("rope_type") or _rope(raw).get("type") or "default"
    problems = {
        f"architectures {sorted(architectures)} (served: {sorted(_SERVED)})": not architectures & _SERVED,
        f"rope_type {rope_type!r}": rope_type != "default",
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "quantization_config": bool(raw.get("quantization_config")),
    }
    found = [name for name, applies in problems.items() if applies]
    if found:
        raise InvalidRequest(f"This checkpoint uses what is not served yet: {'; '.join(found)}.", param="model")


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json is what generation stops at; config.json is only its fallback."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
