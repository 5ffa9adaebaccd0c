"""Reads from a config.json which layers have a window, which are recurrent, and the rotary embedding of each layer.

Never imports torch. A window is read from the architecture's rule and from `layer_types`; a file in which the two
contradict each other is refused.
"""

from collections.abc import Mapping
from typing import Any

from graftwork.engine.model.architectures import ModelVariant, RopeRule, WindowRule
from graftwork.engine.model.block import StreamsSpec
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


def read_kv_sources(raw: Mapping[str, Any], kinds: tuple[str, ...], setting: str | None) -> tuple[int, ...]:
    """Returns for each layer the layer whose keys and values it reads: its own, or the last of its kind before the layers
    that `setting` counts from the end. Empty if each reads its own.

    Raises InvalidRequest if a layer has nothing to read.
    """
    count = 0 if setting is None else whole(raw, setting, least=0)
    first = len(kinds) - count
    if not count:
        return ()
    last = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    missing = sorted(set(kinds) - last.keys())
    if missing:
        raise refused(f"{setting} {count} leaves no layer of {' and '.join(missing)} with keys and values of its own.")
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds))


def read_sparsity(raw: Mapping[str, Any], setting: str | None) -> tuple[float, ...]:
    """Returns for each layer the share of its MLP's gates that is set to zero. Empty if there is no such setting.

    Without a value, 0.95 in the first ten layers of a model with more, as in transformers.
    """
    if setting is None:
        return ()
    count, given = whole(raw, "num_hidden_layers"), raw.get(setting)
    if given is None:
        return tuple(0.95 if layer < 10 < count else 0.0 for layer in range(count))
    is_share = isinstance(given, list) and all(isinstance(share, int | float) and 0 <= share < 1 for share in given)
    if not is_share or len(given) != count:
        raise refused(f"{setting} must hold a number from 0 to below 1 for each of {count} layers, not {given!r}.")
    return tuple(map(float, given))


def read_mlp_widths(raw: Mapping[str, Any], variant: ModelVariant) -> tuple[int, ...]:
    """Returns the width of each layer's dense MLP."""
    setting, count = variant.intermediate_setting, whole(raw, "num_hidden_layers")
    given = raw.get(setting)
    if not isinstance(given, list) or not variant.has_mlp_widths:
        return (whole(raw, setting),) * count
    if len(given) != count or not all(type(width) is int and width > 0 for width in given):
        raise refused(f"{setting} must hold a whole number of at least 1 for each of {count} layers, not {given!r}.")
    return tuple(given)


def read_streams(raw: Mapping[str, Any], *, has_streams: bool) -> StreamsSpec | None:
    """Returns what a config.json says of several residual streams; None if the architecture has one."""
    if not has_streams:
        return None
    count, active = whole(raw, "altup_num_inputs"), whole(raw, "altup_active_idx", least=0)
    if active >= count:
        raise refused(f"altup_active_idx {active} must be below altup_num_inputs, which is {count}.")
    return StreamsSpec(
        count=count,
        active=active,
        scales_gates=bool(raw["altup_correct_scale"]),
        laurel_rank=whole(raw, "laurel_rank"),
        input_width=whole(raw, "hidden_size_per_layer_input"),
        input_vocab_size=whole(raw, "vocab_size_per_layer_input"),
    )


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
