"""An adapter's two files held against the model they claim to fit.

Owns the proof that every tensor will be applied, each at its exact place, shape and scale. Pure: no torch, no files.
A file passes whole or is refused with the exact tensor or field; nothing is skipped, guessed or padded.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from graftwork.adapters.lora_config import LoraConfig, read_lora_config
from graftwork.adapters.names import shown
from graftwork.adapters.safetensors_file import TensorEntry, read_entries
from graftwork.adapters.unserved import describe_unserved_tensor
from graftwork.engine.request import EngineDescription
from graftwork.platform.errors import ValidationFailed

# base_model.model.model.layers.3.self_attn.q_proj.lora_A.default.weight; the prefixes and `default` may be missing.
_TENSOR_NAME = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?P<module>(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<parent>self_attn|mlp)\.(?P<target>[a-z_]{1,32}))"
    r"\.lora_(?P<factor>[AB])(?:\.default)?\.weight"
)
_PARENT_BY_TARGET = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """The LoRA of one module: y += scale * (x @ A.T) @ B.T."""

    layer: int
    target: str
    rank: int
    scale: float
    A: TensorEntry  # [rank, in_features]
    B: TensorEntry  # [out_features, rank]


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A validated adapter: where each factor lies in the file, and how it is applied."""

    r: int
    """As configured; a module's own rank may differ by rank_pattern."""
    modules: tuple[ModuleSpec, ...]
    """By layer, then by the model's order of targets; never empty."""

    @property
    def rank(self) -> int:
        """The largest of any module."""
        return max(module.rank for module in self.modules)

    @property
    def target_modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(module.target for module in sorted(self.modules, key=lambda m: _order(m.target))))


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor and the place its name gives it."""

    entry: TensorEntry
    module: str
    layer: int
    target: str
    factor: str


def parse_adapter(config: bytes, weights: bytes, description: EngineDescription) -> AdapterSpec:
    """Everything about an upload that can be known before it is served. Raises ValidationFailed."""
    lora_config = read_lora_config(config, description.max_lora_rank)
    if lora_config.base_fingerprint not in (None, description.fingerprint):
        message = f"config.base_fingerprint: the adapter belongs to another base than {description.fingerprint}."
        raise ValidationFailed(message, param="config.base_fingerprint", code="wrong_base")
    entries = read_entries(weights)
    if not entries:
        raise ValidationFailed("weights: the file holds no tensor, so the adapter would do nothing.", param="weights")
    places = [_place(entry, lora_config, description) for entry in entries]
    modules = [_module(pair, lora_config, description) for pair in _pairs(places)]
    for entry in entries:
        if not entry.is_finite(weights):
            _refuse(entry, "holds NaN or an infinity.")
    return AdapterSpec(lora_config.r, tuple(sorted(modules, key=lambda m: (m.layer, _order(m.target)))))


def _order(target: str) -> int:
    return list(_PARENT_BY_TARGET).index(target)


def _place(entry: TensorEntry, config: LoraConfig, description: EngineDescription) -> _Place:
    """Where the tensor belongs. Raises ValidationFailed where the model or the config has no such place."""
    match = _TENSOR_NAME.fullmatch(entry.name)
    if match is None:
        _refuse_name(entry)
    module, target, layer = match["module"], match["target"], int(match["layer"])
    if target not in description.target_shapes or _PARENT_BY_TARGET.get(target) != match["parent"]:
        known = ", ".join(description.target_shapes)
        _refuse(entry, f"the model has no module '{match['parent']}.{target}' for it; it has {known}.")
    if layer >= description.num_layers:
        _refuse(entry, f"the model has {description.num_layers} layers, counted from 0.")
    if not config.targets(module, layer):
        _refuse(entry, "the config's target_modules, exclude_modules or layers_to_transform leave this module out.")
    return _Place(entry, module, layer, target, match["factor"])


def _pairs(places: Iterable[_Place]) -> list[tuple[_Place, _Place]]:
    """A and B of each module. Raises ValidationFailed where one is missing or there twice."""
    found: dict[tuple[int, str, str], _Place] = {}
    for place in places:
        first = found.setdefault((place.layer, place.target, place.factor), place)
        if first is not place:
            _refuse(place.entry, f"'{shown(first.entry.name)}' is the same tensor in another spelling.")
    pairs = []
    for (layer, target, factor), place in found.items():
        other = found.get((layer, target, "B" if factor == "A" else "A"))
        if other is None:
            _refuse(place.entry, f"its counterpart lora_{'B' if factor == 'A' else 'A'} is missing.")
        if factor == "A":
            pairs.append((place, other))
    return pairs


def _module(pair: tuple[_Place, _Place], config: LoraConfig, description: EngineDescription) -> ModuleSpec:
    """Raises ValidationFailed where a shape contradicts the model or the config."""
    A, B = pair
    out_features, in_features = description.target_shapes[A.target]
    rank = config.rank(A.module)
    for place, expected in ((A, (rank, in_features)), (B, (out_features, rank))):
        if place.entry.shape != expected:
            problem = f"its shape is {list(place.entry.shape)}; the model and the config's rank {rank} ask for"
            _refuse(place.entry, f"{problem} {list(expected)}.")
    return ModuleSpec(A.layer, A.target, rank, config.scale(A.module), A.entry, B.entry)


def _refuse_name(entry: TensorEntry) -> NoReturn:
    what = describe_unserved_tensor(entry.name)
    if what is not None:
        message = f"{entry.param}: not served: {what}."
        raise ValidationFailed(message, param=entry.param, code="unsupported_feature")
    _refuse(entry, "not the name of a LoRA tensor of this model, so it would not be applied.")


def _refuse(entry: TensorEntry, problem: str) -> NoReturn:
    raise ValidationFailed(f"{entry.param}: {problem}", param=entry.param)
