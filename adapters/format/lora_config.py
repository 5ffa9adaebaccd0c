"""Reads adapter_config.json, which contains the ranks, scales and target modules of an adapter.

Owns the reading of PEFT's LoraConfig. Never reads the weights.
Invariant: each field of the file is applied, or has no effect on serving, or makes the server refuse the adapter with
an error that names the field (see unsupported.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from graftwork.adapters.format.adapter_spec import EMBEDDING, HEAD
from graftwork.adapters.format.name_pattern import NamePattern
from graftwork.adapters.format.pattern_parser import PatternRefused
from graftwork.adapters.format.specs import shown
from graftwork.adapters.format.unsupported import refuse_unserved_settings, unserved
from graftwork.platform.errors import ValidationFailed
from graftwork.platform.strict_json import read_object

MAX_CONFIG_BYTES = 1024 * 1024
_SAVED_MODULES = {EMBEDDING: EMBEDDING, f"model.{EMBEDDING}": EMBEDDING, HEAD: HEAD}
_LAYERS_PATTERNS = ("layers", "model.layers")
_ALL_LINEAR = "all-linear"
_MAX_ALPHA = 1_000_000
_MAX_PATTERNS = 1024
_MAX_STATES = 65_536  # characters of all patterns of a table together
_MAX_WORK = 5_000_000  # states visited: a few seconds at most; real adapters need a hundredth of that


class PatternTable:
    """PEFT's field rank_pattern or alpha_pattern: a table that maps patterns of module names to numbers.

    If several patterns match the name of a module, the first of them decides.
    """

    def __init__(self, field: str, values: Mapping[str, float]) -> None:
        """Parses the patterns. Raises ValidationFailed, which names a pattern that cannot be read."""
        self._field = field
        self._rows: list[tuple[NamePattern, float]] = []
        num_states = 0
        for text, value in values.items():
            pattern = self._read(text)
            num_states += pattern.num_states
            self._check(num_states, _MAX_STATES)
            self._rows.append((pattern, value))
        self._work = 0

    def value(self, module: str, default: float) -> float:
        """Returns the number (a rank or an alpha) for the module, or `default` if no pattern matches the module.

        `module` is a name as PEFT writes it, such as `model.layers.0.self_attn.q_proj`.
        Raises ValidationFailed if the matching of the patterns takes too long.
        """
        for pattern, value in self._rows:
            self._work -= pattern.work
            matches = pattern.matches(module)
            self._work += pattern.work
            self._check(self._work, _MAX_WORK)
            if matches:
                return value
        return default

    def _read(self, text: str) -> NamePattern:
        try:
            return NamePattern(text)
        except PatternRefused as refusal:
            raise _refused(f"{self._field}.{shown(text)}", f"the pattern cannot be read: {refusal}.") from None

    def _check(self, spent: int, most: int) -> None:
        if spent > most:
            raise _refused(self._field, "the patterns take too long to match: write plain module names.")


class ModulePattern:
    """The value of target_modules or exclude_modules if it is one text: a regular expression for whole module names."""

    def __init__(self, field: str, text: str) -> None:
        """Parses the pattern. Raises ValidationFailed if it is not supported."""
        self._field = field
        try:
            self._pattern = NamePattern(text, is_whole=True)
        except PatternRefused as refusal:
            problem = f"the pattern {shown(text)} cannot be read: {refusal}. Write a list of module names instead."
            raise _refused(field, problem) from None

    def matches(self, module: str) -> bool:
        found = self._pattern.matches(module)
        if self._pattern.work > _MAX_WORK:
            raise _refused(self._field, "the pattern takes too long to match: write a list of module names.")
        return found


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The fields of adapter_config.json that decide to which modules the tensors are applied, and with which scale."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: PatternTable
    alpha_pattern: PatternTable
    target_modules: tuple[str, ...] | ModulePattern | None
    """The names of the target modules, or ends of these names, or a regular expression for whole names.

    It is None if the file has "all-linear" or no value.
    """
    target_parameters: tuple[str, ...]
    """The names of parameters that have LoRA of their own, or ends of these names, such as `experts.down_proj`."""
    exclude_modules: tuple[str, ...] | ModulePattern | None
    layers_to_transform: frozenset[int]
    """The indices of the layers that have LoRA, from 0. If empty, all layers have LoRA."""
    use_dora: bool
    lora_bias: bool
    bias: Literal["none", "all", "lora_only"]
    saved_modules: tuple[str, ...]
    """The modules whose whole matrix the adapter saves (modules_to_save): embed_tokens, lm_head, both or none."""
    base_fingerprint: str | None

    def rank(self, module: str) -> int:
        return int(self.rank_pattern.value(module, self.r))

    def scale(self, module: str) -> float:
        """Returns the scale of a module: alpha / rank, or alpha / sqrt(rank) for rsLoRA. Computed in double precision,
        as in PEFT.
        """
        alpha, rank = self.alpha_pattern.value(module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: str, layer: int | None) -> bool:
        """Returns whether PEFT would add LoRA to this module. The answer depends only on names and layer numbers in the
        configuration.

        `layer` is the index of the module's layer, from 0; None for a module outside the layers.
        """
        if self.exclude_modules and _is_chosen(module, self.exclude_modules):
            return False
        if self.target_modules is None:
            return True
        if isinstance(self.target_modules, ModulePattern):
            return self.target_modules.matches(module)
        if module in self.target_modules:
            return True
        right_layer = not self.layers_to_transform or layer in self.layers_to_transform
        return right_layer and _is_chosen(module, self.target_modules)

    def targets_parameter(self, parameter: str) -> bool:
        """Returns whether PEFT would add LoRA to a parameter, such as `model.layers.3.mlp.experts.down_proj`."""
        return _is_chosen(parameter, self.target_parameters)


def read_lora_config(raw: bytes, max_rank: int) -> LoraConfig:
    """Reads and checks adapter_config.json. `max_rank` is the highest rank that the server accepts.

    Raises ValidationFailed. The `param` of the error is `config` or `config.<field>`.
    """
    if len(raw) > MAX_CONFIG_BYTES:
        raise _refused("config", f"{len(raw)} bytes are more than the {MAX_CONFIG_BYTES} that are read.")
    config = read_object(raw, "config")
    _check_kind(config)
    refuse_unserved_settings(config)
    target_modules, exclude_modules = config.get("target_modules"), config.get("exclude_modules")
    return LoraConfig(
        r=_rank("config.r", config.get("r"), max_rank),
        lora_alpha=_alpha("config.lora_alpha", config.get("lora_alpha")),
        use_rslora=_boolean(config, "use_rslora"),
        rank_pattern=_rank_pattern(config, max_rank),
        alpha_pattern=_alpha_pattern(config),
        target_modules=_choice("config.target_modules", None if target_modules == _ALL_LINEAR else target_modules),
        target_parameters=_names(config, "target_parameters"),
        exclude_modules=_choice("config.exclude_modules", exclude_modules),
        layers_to_transform=_layers_to_transform(config),
        use_dora=_boolean(config, "use_dora"),
        lora_bias=_boolean(config, "lora_bias"),
        bias=_bias(config.get("bias")),
        saved_modules=_saved_modules(config.get("modules_to_save")),
        base_fingerprint=_text(config, "base_fingerprint"),
    )


def _check_kind(config: dict[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise _refused("config.peft_type", f"{shown(str(kind))} is not served: only LORA is.")
    for field in ("r", "lora_alpha"):
        if field not in config:
            raise _refused(f"config.{field}", "is missing: without it the scale of the adapter is unknown.")


def _rank(param: str, value: object, max_rank: int) -> int:
    if type(value) is not int or value < 1:
        raise _refused(param, "a rank must be an integer from 1 up.")
    if value > max_rank:
        raise _refused(param, f"rank {_number(value)} is above the {max_rank} that this server holds.")
    return value


def _alpha(param: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(param, "must be a number.")
    if not -_MAX_ALPHA <= value <= _MAX_ALPHA:  # also infinity, which JSON can write as 1e999
        raise _refused(param, f"must lie within ±{_MAX_ALPHA}.")
    return float(value)


def _rank_pattern(config: dict[str, Any], max_rank: int) -> PatternTable:
    rows = _pattern_rows(config, "rank_pattern")
    field = "config.rank_pattern"
    return PatternTable(field, {text: _rank(f"{field}.{shown(text)}", rank, max_rank) for text, rank in rows.items()})


def _alpha_pattern(config: dict[str, Any]) -> PatternTable:
    rows = _pattern_rows(config, "alpha_pattern")
    field = "config.alpha_pattern"
    return PatternTable(field, {text: _alpha(f"{field}.{shown(text)}", alpha) for text, alpha in rows.items()})


def _pattern_rows(config: dict[str, Any], field: str) -> dict[str, Any]:
    rows = config.get(field)
    if rows is None:
        return {}
    if not isinstance(rows, dict):
        raise _refused(f"config.{field}", "must map patterns of module names to numbers.")
    if len(rows) > _MAX_PATTERNS:
        raise _refused(f"config.{field}", f"{len(rows)} patterns are more than the {_MAX_PATTERNS} that are read.")
    return rows


def _choice(param: str, value: object) -> tuple[str, ...] | ModulePattern | None:
    if value is None:
        return None
    if isinstance(value, str):
        return ModulePattern(param, value)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _refused(param, "must be a list of module names, or one string.")
    return tuple(value)


def _names(config: dict[str, Any], field: str) -> tuple[str, ...]:
    value = config.get(field)
    if value is not None and (not isinstance(value, list) or not all(isinstance(name, str) for name in value)):
        raise _refused(f"config.{field}", "must be a list of names.")
    return tuple(value or ())


def _layers_to_transform(config: dict[str, Any]) -> frozenset[int]:
    field, value = "config.layers_to_transform", config.get("layers_to_transform")
    layers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(layer) is int and layer >= 0 for layer in layers):
        raise _refused(field, "must be a layer's index or a list of them.")
    if layers and isinstance(config.get("target_modules"), str):
        raise _refused(field, "cannot be used where target_modules is one string; PEFT refuses that as well.")
    _check_layers_pattern(config.get("layers_pattern"), is_used=bool(layers))
    return frozenset(layers)


def _check_layers_pattern(value: object, *, is_used: bool) -> None:
    """Checks `layers_pattern`, the name of the model's list of layers.

    If it is used, it must be the name that this model has.
    """
    patterns = value if isinstance(value, list) else [value] if value else []
    if is_used and patterns and not any(pattern in _LAYERS_PATTERNS for pattern in patterns):
        raise _refused("config.layers_pattern", "fits no module of this model: its layers are called 'layers'.")


def _bias(value: object) -> Literal["none", "all", "lora_only"]:
    if value is None:
        return "none"
    if value not in ("none", "all", "lora_only"):
        raise _refused("config.bias", "must be 'none', 'all' or 'lora_only'.")
    return value


def _saved_modules(value: object) -> tuple[str, ...]:
    param = "config.modules_to_save"
    if value is not None and (not isinstance(value, list) or not all(isinstance(name, str) for name in value)):
        raise _refused(param, "must be a list of module names.")
    names = cast(list[str], value or [])
    for name in names:
        if name not in _SAVED_MODULES:
            raise unserved(param, f"a copy of '{shown(name)}': only {EMBEDDING} and {HEAD} can be replaced whole")
    return tuple(dict.fromkeys(_SAVED_MODULES[name] for name in names))


def _boolean(config: dict[str, Any], field: str) -> bool:
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise _refused(f"config.{field}", "must be true or false.")
    return bool(value)


def _text(config: dict[str, Any], field: str) -> str | None:
    value = config.get(field)
    if value is not None and not isinstance(value, str):
        raise _refused(f"config.{field}", "must be a string.")
    return value


def _is_chosen(module: str, names: tuple[str, ...] | ModulePattern) -> bool:
    if isinstance(names, ModulePattern):
        return names.matches(module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _number(value: int) -> str:
    return str(value) if value.bit_length() < 64 else "with more digits than an adapter has"


def _refused(param: str, problem: str) -> ValidationFailed:
    return ValidationFailed(f"{param}: {problem}", param=param)
