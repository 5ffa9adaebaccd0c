"""Finds the module to which a tensor belongs, and the tensor's role in this module, from the tensor's name.

Owns the forms of tensor names that the versions of PEFT write, for models of text and for the language models inside models
that also see. Never checks that a model has the module:
`module_reader.py` does.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.default.weight
    └── may be missing ──┘ └───────── module ───────┘└─── part ────────┘
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from graftwork.adapters.format.adapter_spec import EMBEDDING, HEAD, INPUT_EMBEDDING

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Maps a fused module to its targets. The targets share one matrix A.

The rows of B belong to the targets in this order.
"""
ROUTED = "routed layer"
"""Stands for the parent of what a routed layer has besides its experts. Architectures name these parts differently."""
PARENTS = {
    "self_attn": frozenset(["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"]),
    "mlp": frozenset(["gate_proj", "up_proj", "down_proj", "gate_up_proj"]),
    ROUTED: frozenset(["router", "shared_gate_proj", "shared_up_proj", "shared_down_proj", "shared_gate"]),
}


class Part(StrEnum):
    """The role of a tensor in its module, such as LoRA's matrix A or a bias."""

    A = "lora_A"
    B = "lora_B"
    MAGNITUDE = "lora_magnitude_vector"
    LORA_BIAS = "lora_B.bias"
    BIAS = "bias"
    MATRIX = "weight"
    """A whole matrix that replaces the module's matrix. It comes from modules_to_save, or from a resized embedding."""
    BASE_MATRIX = "base_layer.weight"
    """A whole matrix that replaces the module's matrix. The LoRA of the same module is added to it."""


_OF_LINEAR = {
    "lora_A.weight": Part.A,
    "lora_A.default.weight": Part.A,
    "lora_B.weight": Part.B,
    "lora_B.default.weight": Part.B,
    "lora_B.bias": Part.LORA_BIAS,
    "lora_B.default.bias": Part.LORA_BIAS,
    "lora_magnitude_vector": Part.MAGNITUDE,
    "lora_magnitude_vector.weight": Part.MAGNITUDE,
    "lora_magnitude_vector.default": Part.MAGNITUDE,
    "lora_magnitude_vector.default.weight": Part.MAGNITUDE,
}
_OF_BIASED = {"bias": Part.BIAS, "base_layer.bias": Part.BIAS}
_OF_SAVED = {
    "weight": Part.MATRIX,
    "modules_to_save.weight": Part.MATRIX,
    "modules_to_save.default.weight": Part.MATRIX,
    "base_layer.weight": Part.BASE_MATRIX,
}
_OF_EMBEDDING = {
    "lora_embedding_A": Part.A,
    "lora_embedding_A.default": Part.A,
    "lora_embedding_B": Part.B,
    "lora_embedding_B.default": Part.B,
}
_PARTS_OF_LAYER = _OF_LINEAR | _OF_BIASED
_PARTS_OF_REST = {
    EMBEDDING: _OF_EMBEDDING | _OF_SAVED,
    INPUT_EMBEDDING: _OF_EMBEDDING,
    HEAD: _OF_LINEAR | _OF_SAVED,
}

_NAME = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?P<module>(?:model\.language_model\.|language_model\.(?:model\.)?|model\.)?layers"
    r"\.(?P<layer>0|[1-9][0-9]{0,3})\.(?:(?P<parent>self_attn|mlp|mamba|shared_mlp|laurel|altup)\.(?P<target>[a-z_]{1,32})"
    r"|(?P<alone>per_layer_input_gate|per_layer_projection))"
    r"|(?:model\.language_model\.|language_model\.(?:model\.)?|model\.)?"
    r"(?:(?P<embedding>embed_tokens(?:_per_layer)?)"
    r"|(?P<beside>altup_(?:unembed_)?projections\.(?:0|[1-9][0-9]{0,2})|per_layer_model_projection))"
    r"|(?:language_model\.)?(?P<head>lm_head))"
    r"\.(?P<part>[A-Za-z_.]{1,64})"
)


@dataclass(frozen=True, slots=True)
class Place:
    """The information in a tensor's name: the module to which the tensor belongs, and the tensor's role in this module."""

    module: str
    """The module's name as PEFT's patterns match it, such as `model.layers.3.self_attn.q_proj`."""
    layer: int | None
    parent: str | None
    """The part of the layer that has the module; None for a module of the layer itself, or outside the layers."""
    target: str
    part: Part

    @property
    def in_layer(self) -> str:
        """The module's name within its layer."""
        return self.target if self.parent is None else f"{self.parent}.{self.target}"


def find_place(name: str) -> Place | None:
    """Returns the module and the role that a tensor's name contains; None for a name that is not supported."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if match["beside"] is not None:
        part = _OF_LINEAR.get(match["part"])
        return None if part is None else Place(match["module"], None, None, match["beside"], part)
    if match["layer"] is None:
        target = match["embedding"] or match["head"]
        part = _PARTS_OF_REST[target].get(match["part"])
        return None if part is None else Place(match["module"], None, None, target, part)
    part = part_of_layer(match["part"])
    target = match["target"] or match["alone"]
    return None if part is None else Place(match["module"], int(match["layer"]), match["parent"], target, part)


def part_of_layer(text: str) -> Part | None:
    """Returns the role of a tensor in a module of a layer, from the last part of its name; None if it is unknown."""
    return _PARTS_OF_LAYER.get(text)
