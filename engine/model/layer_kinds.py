"""Reads from a config.json which layers have a window, which are recurrent, and the rotary embedding of each layer.

Never imports torch. A window is read from the architecture's rule and from `layer_types`; a file in which the two
contradict each other is refused.
"""

from collections.abc import Mapping
from typing import Any

from graftwork.engine.model.architectures import ModelVariant, RopeRule, WindowRule
from graftwork.engine.model.recurrence import RecurrenceConfig, RecurrenceRules
from graftwork.engine.model.rope_config import RopeConfig, read_rope_config, read_rope_of_kind
from graftwork.engine.model.settings import refused, whole

SLIDING, FULL = "sliding_attention", "full_attention"
_IS_RECURRENT = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}
"""The kinds of layers beside recurrent ones in `layer_types`, in the words of newer and older files."""
_NO_ROPE = (None, "nope")
_FREE_RULES = (
    WindowRule.EARLY_EVEN_LAYERS,
    WindowRule.LATER_LAYERS,
    WindowRule.WITHOUT_ROPE,
    WindowRule.BY_PATTERN,
)
"""The rules that `layer_types` may override."""
_SWITCHED_RULES = (
    WindowRule.EVERY_LAYER_IF_USED,
    WindowRule.EARLY_EVEN_LAYERS,
    WindowRule.LATER_LAYERS,
    WindowRule.WITHOUT_ROPE,
)
"""The rules that hold only if `use_sliding_window` is true."""


def read_windows(raw: Mapping[str, Any], kinds: tuple[str, ...], rule: WindowRule) -> tuple[int | None, ...]:
    """Returns the window of each layer; None for a layer whose window is as wide as the context.

    `kinds` are the kinds of the layers (see `read_kinds`).
    """
    window = _window(raw, rule)
    narrow = window if window is not None and window < raw["max_position_embeddings"] else None
    return tuple(narrow if kind == SLIDING else None for kind in kinds)


def read_kinds(raw: Mapping[str, Any], rule: WindowRule) -> tuple[str, ...]:
    """Returns the kind of each layer, SLIDING or FULL. Raises InvalidRequest if `layer_types` does not fit the rest."""
    window = _window(raw, rule)
    count = raw["num_hidden_layers"]
    derived = [SLIDING if window is not None and _slides(raw, rule, layer) else FULL for layer in range(count)]
    given = raw.get("layer_types") or derived
    is_free = rule in _FREE_RULES and (window is not None or SLIDING not in given)
    if len(given) != len(derived) or not set(given) <= {SLIDING, FULL} or not (is_free or given == derived):
        raise refused(f"layer_types {given} does not fit the other settings, by which it is {derived}.")
    return tuple(given)


def read_ropes(raw: Mapping[str, Any], kinds: tuple[str, ...], variant: ModelVariant) -> tuple[RopeConfig | None, ...]:
    """Returns the rotary embedding of each layer; None for a layer that rotates nothing."""
    match variant.rope_rule:
        case RopeRule.BY_LAYER_TYPE:
            by_kind = {kind: read_rope_of_kind(raw, kind, "rope_local_base_freq") for kind in set(kinds)}
            return tuple(by_kind[kind] for kind in kinds)
        case RopeRule.BY_LIST:
            rotates = [bool(flag) for flag in _rope_flags(raw)]
        case RopeRule.WINDOWED_LAYERS:
            rotates = [kind == SLIDING for kind in kinds]
        case RopeRule.EVERY_LAYER:
            rotates = [True] * len(kinds)
        case RopeRule.BY_POSITION_TYPE:
            rotates = [_has_positions(raw)] * len(kinds)
    rope = read_rope_config(raw, variant.rope)
    return tuple(rope if rotated else None for rotated in rotates)


def _has_positions(raw: Mapping[str, Any]) -> bool:
    """Returns whether the layers with attention have a rotary embedding, by `position_embedding_type`."""
    given = raw.get("position_embedding_type")
    if given not in (*_NO_ROPE, "rope"):
        raise refused(f"position_embedding_type must be 'rope', 'nope' or null, not {given!r}.")
    return given == "rope"


def read_recurrence(raw: Mapping[str, Any], rules: RecurrenceRules | None) -> RecurrenceConfig | None:
    """Returns what a config.json says of recurrent layers; None if it has none.

    Raises InvalidRequest if a setting contradicts another. The error names it.
    """
    layers = () if rules is None else _recurrent_layers(raw)
    if rules is None or not layers:
        return None
    num_heads, num_groups = whole(raw, rules.heads_setting), whole(raw, rules.groups_setting)
    width = whole(raw, rules.expansion_setting) * whole(raw, "hidden_size")
    given = raw.get(rules.head_dim_setting)
    head_dim = width // num_heads if given in (None, "auto") else whole(raw, rules.head_dim_setting)
    if head_dim * num_heads != width or num_heads % num_groups:
        raise refused(
            f"{rules.heads_setting} {num_heads} times {rules.head_dim_setting} {head_dim} must be "
            f"{rules.expansion_setting} times hidden_size, which is {width}, and {rules.groups_setting} {num_groups} must "
            "divide the heads."
        )
    return RecurrenceConfig(
        layers=layers,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=whole(raw, rules.state_setting),
        conv_tokens=whole(raw, rules.conv_setting, least=2),
        has_conv_bias=bool(raw.get(rules.conv_bias_setting)),
    )


def _recurrent_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the recurrent layers. Without `layer_types`, all are, as in transformers."""
    count, given = whole(raw, "num_hidden_layers"), raw.get("layer_types") or raw.get("layers_block_type")
    kinds = ["linear_attention"] * count if given is None else given
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= _IS_RECURRENT.keys():
        raise refused(
            f"layer_types must be one of {', '.join(_IS_RECURRENT)} for each of {count} layers, not {kinds!r}."
        )
    layers = tuple(layer for layer, kind in enumerate(kinds) if _IS_RECURRENT[kind])
    if len(layers) == count:
        raise refused("layer_types must name at least one layer with attention: models without one are not served.")
    return layers


def _slides(raw: Mapping[str, Any], rule: WindowRule, layer: int) -> bool:
    """Returns whether a layer has a window, if the model has any."""
    match rule:
        case WindowRule.LATER_LAYERS:
            return layer >= whole(raw, "max_window_layers", least=0)
        case WindowRule.BY_PATTERN:
            return (layer + 1) % whole(raw, "sliding_window_pattern") != 0
        case WindowRule.WITHOUT_ROPE:
            return not _rope_flags(raw)[layer]
        case WindowRule.EARLY_EVEN_LAYERS:
            return layer % 2 == 0 and layer < whole(raw, "max_window_layers", least=0)
        case WindowRule.EVERY_LAYER | WindowRule.EVERY_LAYER_IF_USED:
            return True
        case WindowRule.NO_LAYER:
            return False


def _window(raw: Mapping[str, Any], rule: WindowRule) -> int | None:
    """Returns the width of the window; None if no layer has one."""
    is_unused = rule in _SWITCHED_RULES and not raw.get("use_sliding_window", False)
    if raw.get("sliding_window") is None or is_unused:
        return None
    window = whole(raw, "sliding_window")
    if rule is not WindowRule.NO_LAYER:
        return window
    if raw.get("use_sliding_window", True) and window < raw["max_position_embeddings"]:
        raise refused(f"sliding_window {window} is not served with this architecture, which has none.")
    return None


def _rope_flags(raw: Mapping[str, Any]) -> list[int]:
    """Returns for each layer 1 if it has a rotary embedding, else 0."""
    count = raw["num_hidden_layers"]
    given = raw.get("no_rope_layers")
    if given is None:
        interval = whole(raw, "no_rope_layer_interval")
        return [int((layer + 1) % interval != 0) for layer in range(count)]
    if not isinstance(given, list) or len(given) < count or not set(given) <= {0, 1}:
        raise refused(f"no_rope_layers must hold 0 or 1 for each of the {count} layers, not {given!r}.")
    return given[:count]
