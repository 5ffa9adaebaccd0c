"""Reads from a config.json which layers are routed, and what their routers and experts compute.

Raises InvalidRequest for a setting that contradicts another, and names it. Never imports torch.
"""

from collections.abc import Mapping
from typing import Any

from graftwork.engine.core.expert_shapes import ExpertShapes
from graftwork.engine.model.experts import (
    MXFP4_BLOCK,
    ClampedSwiGlu,
    ExpertRules,
    ExpertsConfig,
    ExpertTensors,
    RoutedLayers,
    RouterSpec,
    SharedExpert,
)
from graftwork.engine.model.settings import positive, refused, whole


def read_experts(raw: Mapping[str, Any], rules: ExpertRules | None) -> ExpertsConfig | None:
    """Returns what a config.json says of routed layers; None if no layer is routed."""
    if rules is None:
        return None
    layers = tuple(layer for layer, routed in enumerate(_routed(raw, rules)) if routed)
    if not layers:
        return None
    shapes = ExpertShapes(
        num_experts=_count(raw, rules),
        hidden_size=whole(raw, "hidden_size"),
        intermediate_size=whole(raw, rules.size_setting),
        layers=layers,
        names=rules.names,
        interleaves=rules.tensors is ExpertTensors.INTERLEAVED_COLUMNS,
    )
    is_mxfp4 = rules.may_be_mxfp4 and _is_mxfp4(raw.get("quantization_config"))
    if is_mxfp4 and (shapes.hidden_size % MXFP4_BLOCK or shapes.intermediate_size % MXFP4_BLOCK):
        raise refused(f"hidden_size and {rules.size_setting} must be multiples of {MXFP4_BLOCK} for MXFP4.")
    return ExpertsConfig(
        shapes=shapes,
        router=_router(raw, rules, shapes.num_experts),
        tensors=rules.tensors,
        has_biases=rules.has_biases,
        shared=_shared(raw, rules, shapes),
        clamped=ClampedSwiGlu(positive(raw, "swiglu_alpha"), positive(raw, "swiglu_limit"))
        if rules.is_clamped
        else None,
        is_mxfp4=is_mxfp4,
        file_names=rules.file_names,
    )


def _count(raw: Mapping[str, Any], rules: ExpertRules) -> int:
    """Returns the number of experts. Files may give it under several names, as transformers does."""
    given = {name: whole(raw, name) for name in rules.count_settings if raw.get(name) is not None}
    if len(set(given.values())) != 1:
        wanted = " or ".join(rules.count_settings)
        raise refused(f"{wanted} must say how many experts there are, and agree, not {given or 'nothing'}.")
    return next(iter(given.values()))


def _routed(raw: Mapping[str, Any], rules: ExpertRules) -> list[bool]:
    """Returns whether each layer is routed."""
    num_layers = whole(raw, "num_hidden_layers")
    match rules.layers:
        case RoutedLayers.EVERY_LAYER:
            return [True] * num_layers
        case RoutedLayers.EVERY_LAYER_IF_ANY:
            return [whole(raw, rules.count_settings[0], least=0) > 0] * num_layers
        case RoutedLayers.AFTER_FIRST:
            num_dense = whole(raw, "first_k_dense_replace", least=0)
            return [layer >= num_dense for layer in range(num_layers)]
        case RoutedLayers.BY_STEP:
            step, dense = whole(raw, "decoder_sparse_step"), raw.get("mlp_only_layers") or []
            if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
                raise refused(f"mlp_only_layers must be a list of layers, not {dense!r}.")
            return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def _router(raw: Mapping[str, Any], rules: ExpertRules, num_experts: int) -> RouterSpec:
    num_chosen = whole(raw, "num_experts_per_tok")
    normalises = rules.normalises if isinstance(rules.normalises, bool) else bool(raw.get(rules.normalises))
    if not rules.has_groups:
        _check_choice(num_chosen, num_experts)
        return RouterSpec(rules.score, num_chosen, normalises)
    num_groups, num_chosen_groups = whole(raw, "n_group"), whole(raw, "topk_group")
    if num_experts % num_groups or num_chosen_groups > num_groups or num_experts // num_groups < 2:
        raise refused(
            f"n_group {num_groups} must divide {num_experts} experts into groups of at least two, "
            f"and topk_group {num_chosen_groups} be at most n_group."
        )
    _check_choice(num_chosen, num_experts // num_groups * num_chosen_groups)
    scale = positive(raw, "routed_scaling_factor")
    return RouterSpec(rules.score, num_chosen, normalises, num_groups, num_chosen_groups, scale)


def _check_choice(num_chosen: int, num_experts: int) -> None:
    if num_chosen > num_experts:
        raise refused(f"num_experts_per_tok {num_chosen} is more than the {num_experts} experts to choose from.")


def _shared(raw: Mapping[str, Any], rules: ExpertRules, shapes: ExpertShapes) -> SharedExpert | None:
    if rules.shared_size_setting is not None:
        return SharedExpert(whole(raw, rules.shared_size_setting), rules.has_shared_gate)
    if rules.shared_count_setting is not None:
        count = whole(raw, rules.shared_count_setting)
        return SharedExpert(count * shapes.intermediate_size, rules.has_shared_gate)
    return None


def _is_mxfp4(settings: object) -> bool:
    """Returns whether the experts are stored as MXFP4. Raises InvalidRequest for any other quantisation."""
    if not settings:
        return False
    if not isinstance(settings, dict) or settings.get("quant_method") != "mxfp4":
        raise refused("quantization_config is not served with this architecture; served is quant_method 'mxfp4'.")
    return True
