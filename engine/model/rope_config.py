"""Reads the settings of the rotary position embedding from a Hugging Face config.json.

A file has these settings in one of two forms: `rope_parameters` (newer), or `rope_theta` and `rope_scaling` (older). If
a file has both, `rope_scaling` is used, as in transformers. Never imports torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graftwork.platform.errors import InvalidRequest

_DEFAULT_THETA = 10_000.0
_DEFAULT_BETA_FAST, _DEFAULT_BETA_SLOW = 32.0, 1.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Rope scaling in which every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """The rope scaling of Llama 3.

    Low frequencies are divided by `factor`, high frequencies are kept, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN rope scaling.

    High frequencies are kept, low frequencies are divided by `factor`, and those between are interpolated. Two numbers
    of rotations, counted over the original context, separate high, middle and low frequencies. Source: Peng et al.,
    "YaRN: Efficient Context Window Extension of Large Language Models" (2023).
    """

    factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE scaling: each pair of features has its own two divisors of its frequency, for short and long contexts.

    An engine takes one of the two for all requests, by the longest context that it serves: keys in the cache would be
    wrong for a request that changes its divisors while it grows. transformers decides by the length of each prompt.
    Source: Ding et al., "LongRoPE" (2024), arXiv 2402.13753.
    """

    short_factors: tuple[float, ...]  # one for each pair of features
    long_factors: tuple[float, ...]
    original_context_tokens: int

    def is_long(self, context_tokens: int) -> bool:
        """Returns whether an engine that serves contexts of up to `context_tokens` uses the long factors."""
        return context_tokens > self.original_context_tokens

    def factors(self, context_tokens: int) -> tuple[float, ...]:
        return self.long_factors if self.is_long(context_tokens) else self.short_factors


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The settings of the rotary embedding of one layer."""

    theta: float
    scaling: Scaling | None = None
    attention_factor: float = 1.0
    """The factor by which cosines and sines are multiplied."""
    share: float = 1.0
    """The share of each head's features that are rotated: the first ones."""
    is_interleaved: bool = False
    """Whether the two features of a pair are neighbours. Otherwise they are half of the rotated features apart."""

    def rotated_features(self, head_dim: int) -> int:
        """Returns how many features of a head are rotated."""
        return int(head_dim * self.share)


@dataclass(frozen=True, slots=True)
class RopeRules:
    """How an architecture reads and applies the settings of its rotary embedding."""

    is_interleaved: bool = False
    allows_share: bool = False
    """Whether transformers reads partial_rotary_factor."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of a rope_type."""
    served: tuple[str, ...] = ()
    """The only types that the architecture has. Empty for all types."""


LLAMA_ROPE = RopeRules()


def read_rope_config(raw: Mapping[str, Any], rules: RopeRules = LLAMA_ROPE) -> RopeConfig:
    """Reads the settings of the rotary embedding from the content of a config.json.

    Raises InvalidRequest if a setting is not supported or is not a number. The error names the setting.
    """
    settings = _settings(raw)
    rope_type = rules.aliases.get(_rope_type(settings), _rope_type(settings))
    read = _READERS.get(rope_type)
    if read is None or rope_type not in (rules.served or _READERS):
        raise _refused(f"rope_type {rope_type!r} is not served; served are {', '.join(rules.served or _READERS)}.")
    share = 1.0 if settings.get("partial_rotary_factor") is None else settings["partial_rotary_factor"]
    if share != 1 and (not rules.allows_share or not 0 < share < 1):
        raise _refused(f"partial_rotary_factor {share!r} is not served with this architecture.")
    rope = read(settings, raw["max_position_embeddings"])
    return replace(rope, share=float(share), is_interleaved=rules.is_interleaved)


def read_rope_of_kind(raw: Mapping[str, Any], kind: str, local_theta: str) -> RopeConfig:
    """Reads the settings of the layers of one kind, "full_attention" or "sliding_attention".

    In the newer form, `rope_parameters` has a table for each kind. In the older form, `rope_theta` and `rope_scaling` are
    those of full attention, and the setting named `local_theta` is the theta of windowed layers, which have no scaling.
    """
    tables = raw.get("rope_parameters")
    own = tables.get(kind) if isinstance(tables, dict) else None
    own = {} if own is None else own
    if not isinstance(own, dict):
        raise _refused(f"rope_parameters.{kind} must hold settings, not {own!r}.")
    is_local = kind == "sliding_attention"
    theta = raw[local_theta if is_local else "rope_theta"]
    scaling = {} if is_local else raw.get("rope_scaling") or {}
    flat = {name: value for name, value in raw.items() if name not in ("rope_parameters", "rope_scaling")}
    return read_rope_config(flat | {"rope_theta": theta, "rope_scaling": own | scaling})


def _settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rope settings of both spellings, as one flat table."""
    outside = {name: raw[name] for name in ("rope_theta", "partial_rotary_factor") if name in raw}
    inside = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(inside, dict) or any(isinstance(value, dict) for value in inside.values()):
        raise _refused("rope_parameters of its own for each layer type is not served; served is one for all layers.")
    original = raw.get("original_max_position_embeddings")
    beside = {} if original is None else {"original_max_position_embeddings": original}
    return {"rope_theta": _DEFAULT_THETA} | outside | inside | beside


def _rope_type(settings: dict[str, Any]) -> str:
    return str(settings.get("rope_type") or settings.get("type") or "default")


def _default(settings: dict[str, Any], _: int) -> RopeConfig:
    return RopeConfig(_number(settings, "rope_theta"))


def _linear(settings: dict[str, Any], _: int) -> RopeConfig:
    return RopeConfig(_number(settings, "rope_theta"), LinearScaling(_number(settings, "factor")))


def _dynamic(settings: dict[str, Any], _: int) -> RopeConfig:
    """Reads dynamic NTK scaling as no scaling: up to max_position_embeddings it changes nothing, and longer requests
    are refused.

    Beyond that length the frequencies would change with every token, and cached keys would be wrong.
    """
    _number(settings, "factor")
    return RopeConfig(_number(settings, "rope_theta"))


def _llama3(settings: dict[str, Any], context_tokens: int) -> RopeConfig:
    scaling = Llama3Scaling(
        factor=_number(settings, "factor"),
        low_freq_factor=_number(settings, "low_freq_factor"),
        high_freq_factor=_number(settings, "high_freq_factor"),
        original_context_tokens=_original_context_tokens(settings, context_tokens),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise _refused("high_freq_factor must be greater than low_freq_factor.")
    return RopeConfig(_number(settings, "rope_theta"), scaling)


def _yarn(settings: dict[str, Any], context_tokens: int) -> RopeConfig:
    original = _original_context_tokens(settings, context_tokens)
    has_null_factor = (
        "factor" in settings and settings["factor"] is None
    )  # null means the ratio of the two context lengths
    factor = context_tokens / original if has_null_factor else _number(settings, "factor")
    scaling = YarnScaling(
        factor=factor,
        beta_fast=_number(settings, "beta_fast", _DEFAULT_BETA_FAST),
        beta_slow=_number(settings, "beta_slow", _DEFAULT_BETA_SLOW),
        truncate=bool(settings.get("truncate", True)),
        original_context_tokens=original,
    )
    return RopeConfig(_number(settings, "rope_theta"), scaling, _yarn_attention_factor(settings, factor))


def _long(settings: dict[str, Any], context_tokens: int) -> RopeConfig:
    original = _original_context_tokens(settings, context_tokens)
    short, long = (_numbers(settings, name) for name in ("short_factor", "long_factor"))
    factor = context_tokens / original if settings.get("factor") is None else _number(settings, "factor")
    derived = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        _number(settings, "rope_theta"),
        LongScaling(short, long, original),
        _number(settings, "attention_factor", derived),
    )


def _yarn_attention_factor(settings: dict[str, Any], factor: float) -> float:
    if settings.get("attention_factor") is not None:
        return _number(settings, "attention_factor")
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return _mscale(factor, _number(settings, "mscale")) / _mscale(factor, _number(settings, "mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_READERS: dict[str, Callable[[dict[str, Any], int], RopeConfig]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _long,
}


def _original_context_tokens(settings: dict[str, Any], context_tokens: int) -> int:
    return int(_number(settings, "original_max_position_embeddings", context_tokens))


def _number(settings: dict[str, Any], name: str, default: float | None = None) -> float:
    """Returns a finite number above zero.

    For a setting that is absent, null or 0, returns the default, if there is one.
    """
    value = settings.get(name)
    if not value and default is not None:
        return default
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise _refused(f"rope_type {_rope_type(settings)!r} needs {name!r} as a number above 0, not {value!r}.")


def _numbers(settings: dict[str, Any], name: str) -> tuple[float, ...]:
    values = settings.get(name)
    if not isinstance(values, list) or not all(isinstance(value, int | float) and value > 0 for value in values):
        raise _refused(f"rope_type {_rope_type(settings)!r} needs {name!r} as a list of numbers above 0.")
    return tuple(map(float, values))


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(f"config.json: {problem}", param="model")
