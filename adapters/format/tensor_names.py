"""From the name of a tensor to the place that it claims in the model.

Owns the spellings that PEFT has written over the years. Never knows a model: whether the place exists is for others.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.default.weight
    └── may be missing ──┘ └───────── module ───────┘└─── part ────────┘
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from graftwork.adapters.format.adapter_spec import EMBEDDING, HEAD

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""One A for several targets; the rows of B stand in this order."""
PARENTS = {
    "self_attn": frozenset(["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"]),
    "mlp": frozenset(["gate_proj", "up_proj", "down_proj", "gate_up_proj"]),
}


class Part(StrEnum):
    """What a tensor is to its module."""

    A = "lora_A"
    B = "lora_B"
    MAGNITUDE = "lora_magnitude_vector"
    LORA_BIAS = "lora_B.bias"
    BIAS = "bias"
    MATRIX = "weight"
    """In the place of the module's own: modules_to_save, or an embedding that was resized."""
    BASE_MATRIX = "base_layer.weight"
    """Likewise, beneath a LoRA of the same module."""


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
_PARTS_OF_REST = {EMBEDDING: _OF_EMBEDDING | _OF_SAVED, HEAD: _OF_LINEAR | _OF_SAVED}

_NAME = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?P<module>(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<parent>self_attn|mlp)\.(?P<target>[a-z_]{1,32})"
    r"|(?:model\.)?(?P<embedding>embed_tokens)|(?P<head>lm_head))"
    r"\.(?P<part>[A-Za-z_.]{1,64})"
)


@dataclass(frozen=True, slots=True)
class Place:
    """A module, and which of its tensors."""

    module: str
    """As PEFT's patterns see it: `model.layers.3.self_attn.q_proj`."""
    layer: int | None
    parent: str | None
    target: str
    part: Part


def find_place(name: str) -> Place | None:
    """None where the name is none of those that are served."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if match["layer"] is None:
        target = match["embedding"] or match["head"]
        part = _PARTS_OF_REST[target].get(match["part"])
        return None if part is None else Place(match["module"], None, None, target, part)
    part = _PARTS_OF_LAYER.get(match["part"])
    return None if part is None else Place(match["module"], int(match["layer"]), match["parent"], match["target"], part)
