"""Finds what a tensor of a routed layer belongs to, from its name: the router, the shared expert, or the experts.

The names differ by architecture: ExpertNames has them. Owns the forms in which PEFT names the LoRA of experts:

    layers.3.mlp.experts.base_layer.lora_A.weight    of a parameter that holds all experts, wrapped by another
    layers.3.mlp.experts.lora_A.weight               of the parameter that is wrapped last, or alone
    layers.3.mlp.experts.5.up_proj.lora_A.weight     of one expert, in models whose experts are modules

Never checks shapes: `expert_reader.py` does.
"""

import re
from dataclasses import dataclass

from graftwork.adapters.format.tensor_names import ROUTED, Part, Place, part_of_layer
from graftwork.engine.core.expert_shapes import ExpertShapes

_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<block>[a-z_]{1,32})"
    r"\.(?P<inside>[a-z_]{1,32}(?:\.[a-z0-9_]{1,32}){0,2}?))\.(?P<part>(?:lora_|base_layer\.bias|bias)[A-Za-z_.]{0,64})"
)
_EXPERT = re.compile(r"experts\.(?P<number>0|[1-9][0-9]{0,4})\.(?P<projection>[a-z0-9_]{1,32})")
_JOINED = {"experts": False, "experts.base_layer": True}


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """The experts to which a tensor belongs, and its role."""

    module: str
    """The module's name as PEFT's patterns match it: of all experts, or of one projection of one expert."""
    layer: int
    part: Part
    is_wrapped: bool
    """Whether another parameter of the same module is wrapped around this one. Only of all experts."""
    expert: int | None
    """The number of the expert; None for all experts together."""
    projection: str | None
    """The name of one expert's projection; None for all experts together."""


def find_expert_place(name: str, shapes: ExpertShapes | None) -> ExpertPlace | None:
    """Returns the experts that a tensor's name contains; None if it is no tensor of experts."""
    match = _matched(name, shapes)
    if match is None:
        return None
    part, inside = part_of_layer(match["part"]), match["inside"]
    if part is None:
        return None
    layer, module = int(match["layer"]), match["module"]
    if inside in _JOINED:
        return ExpertPlace(module.removesuffix(".base_layer"), layer, part, _JOINED[inside], None, None)
    single = _EXPERT.fullmatch(inside)
    if single is None:
        return None
    return ExpertPlace(module, layer, part, False, int(single["number"]), single["projection"])


def find_routed_place(name: str, shapes: ExpertShapes | None) -> Place | None:
    """Returns the router or the part of the shared expert that a tensor's name contains; None if it is neither."""
    match = _matched(name, shapes)
    if match is None or shapes is None:
        return None
    target = routed_targets(shapes).get(match["inside"])
    part = part_of_layer(match["part"])
    if target is None or part is None:
        return None
    return Place(match["module"], int(match["layer"]), ROUTED, target, part)


def routed_targets(shapes: ExpertShapes) -> dict[str, str]:
    """Returns the targets of a routed layer besides its experts, by their names within the layer's MLP."""
    names = shapes.names
    shared = {f"{names.shared}.{part}": f"shared_{part}" for part in ("gate_proj", "up_proj", "down_proj")}
    return {names.router: "router", names.shared_gate: "shared_gate"} | shared


def _matched(name: str, shapes: ExpertShapes | None) -> re.Match[str] | None:
    if shapes is None:
        return None
    match = _NAME.fullmatch(name)
    return match if match is not None and match["block"] in shapes.names.blocks else None
