"""Checks the LoRA of experts against the model and the adapter's configuration.

PEFT gives experts LoRA in two forms. If the model holds all experts in one parameter, `target_parameters` names it, and A
and B have the factors of all experts: A expert by expert, B rank by rank. If a module targets two parameters, the first
one is wrapped by the second, so the tensors' names alone do not tell them apart. If each expert is a module,
`target_modules` names its projections. Never reads the values of a tensor.

Source: peft/tuners/lora/layer.py, ParamWrapper (PEFT 0.21).
"""

from collections.abc import Iterable, Iterator

from graftwork.adapters.format.adapter_spec import JOINED_EXPERTS, SINGLE_EXPERTS, ExpertSpec, target_order
from graftwork.adapters.format.expert_names import ExpertPlace, find_expert_place
from graftwork.adapters.format.lora_config import LoraConfig
from graftwork.adapters.format.module_reader import check_shape, refuse
from graftwork.adapters.format.safetensors_file import TensorEntry
from graftwork.adapters.format.specs import shown
from graftwork.adapters.format.tensor_names import Part
from graftwork.adapters.format.unsupported import unserved
from graftwork.engine.core.expert_shapes import ExpertShapes
from graftwork.engine.core.stats import EngineDescription

JOINED_PARAMETERS = ("gate_up_proj", "down_proj")
"""The parameters of all experts, in the order in which PEFT wraps them. JOINED_EXPERTS are their targets."""
TENSORS_OF_EXPERT = 2 * len(SINGLE_EXPERTS)

_Pairs = dict[tuple[int, bool, int | None, str | None], dict[Part, tuple[ExpertPlace, TensorEntry]]]


def read_experts(
    entries: Iterable[TensorEntry], config: LoraConfig, description: EngineDescription
) -> tuple[tuple[ExpertSpec, ...], list[TensorEntry]]:
    """Returns the LoRA of experts, and the tensors that belong to other modules.

    Raises ValidationFailed with the name of the tensor or field that is wrong.
    """
    shapes, rest = description.experts, list[TensorEntry]()
    pairs: _Pairs = {}
    for entry in entries:
        place = find_expert_place(entry.name, shapes)
        if place is None:
            rest.append(entry)
            continue
        _check_place(place, entry, description)
        key = place.layer, place.is_wrapped, place.expert, place.projection
        first = pairs.setdefault(key, {}).setdefault(place.part, (place, entry))
        if first[1] is not entry:
            refuse(entry, f"'{shown(first[1].name)}' is the same tensor in another spelling.")
    if not pairs:
        return (), rest
    assert shapes is not None
    _refuse_unserved(config)
    found = list(_Reader(shapes, config, pairs).specs())
    return tuple(sorted(found, key=lambda part: (part.layer, target_order(part.target), part.expert or 0))), rest


def _check_place(place: ExpertPlace, entry: TensorEntry, description: EngineDescription) -> None:
    """Raises ValidationFailed if the model has no such expert, or if the tensor is neither A nor B."""
    shapes = description.experts
    assert shapes is not None
    if place.layer >= description.num_layers:
        refuse(entry, f"the model has {description.num_layers} layers, counted from 0.")
    if place.layer not in shapes.layers:
        refuse(entry, f"layer {place.layer} has no experts.")
    if place.expert is not None and place.expert >= shapes.num_experts:
        refuse(entry, f"the model has {shapes.num_experts} experts, counted from 0.")
    if place.projection is not None and place.projection not in shapes.names.projections:
        refuse(entry, f"an expert of the model has {', '.join(shapes.names.projections)}.")
    if place.part not in (Part.A, Part.B):
        raise unserved(entry.param, f"a {place.part} of experts")


def _refuse_unserved(config: LoraConfig) -> None:
    for field, is_set in (("use_dora", config.use_dora), ("lora_bias", config.lora_bias)):
        if is_set:
            raise unserved(f"config.{field}", f"{field} on experts")


class _Reader:
    """Turns pairs of A and B into specs."""

    def __init__(self, shapes: ExpertShapes, config: LoraConfig, pairs: _Pairs) -> None:
        self._shapes = shapes
        self._config = config
        self._pairs = pairs

    def specs(self) -> Iterator[ExpertSpec]:
        is_joined: dict[int, bool] = {}
        for parts in self._pairs.values():
            place, entry = next(iter(parts.values()))
            if is_joined.setdefault(place.layer, place.expert is None) is not (place.expert is None):
                refuse(entry, f"layer {place.layer} has LoRA of single experts and of all experts together.")
            A, B = self._pair(parts)
            yield self._joined(place, A, B) if place.expert is None else self._single(place, A, B)

    def _pair(self, parts: dict[Part, tuple[ExpertPlace, TensorEntry]]) -> tuple[TensorEntry, TensorEntry]:
        for part, other in ((Part.A, Part.B), (Part.B, Part.A)):
            if other not in parts:
                refuse(parts[part][1], f"its counterpart {other} is missing.")
        return parts[Part.A][1], parts[Part.B][1]

    def _joined(self, place: ExpertPlace, A: TensorEntry, B: TensorEntry) -> ExpertSpec:
        """Reads the LoRA of one parameter of all experts."""
        names = [name for name in JOINED_PARAMETERS if self._config.targets_parameter(f"{place.module}.{name}")]
        wanted = {True: 0, False: 1} if len(names) == len(JOINED_PARAMETERS) else {False: 0}
        if not names or place.is_wrapped not in wanted:
            has = " and ".join(names) or "no parameter of these experts"
            refuse(A, f"the config's target_parameters name {has}, so this would not be applied.")
        if len(wanted) == 2 and (place.layer, not place.is_wrapped, None, None) not in self._pairs:
            refuse(A, f"the config's target_parameters name {' and '.join(names)}, and only one of the two is here.")
        name = names[wanted[place.is_wrapped]]
        parameter, count = f"{place.module}.{name}", self._shapes.num_experts
        out_features, in_features = self._shape(is_input=name == JOINED_PARAMETERS[0])
        rank = self._config.rank(parameter)
        asks = f"{count} experts of the model and the config's rank {rank} ask for"
        check_shape(A, (count * rank, in_features), asks)
        check_shape(B, (out_features, rank * count), asks)
        target = JOINED_EXPERTS[JOINED_PARAMETERS.index(name)]
        return ExpertSpec(place.layer, target, None, rank, self._config.scale(parameter), A, B)

    def _single(self, place: ExpertPlace, A: TensorEntry, B: TensorEntry) -> ExpertSpec:
        """Reads the LoRA of one projection of one expert."""
        assert place.projection is not None
        if not self._config.targets(place.module, place.layer):
            refuse(A, "the config's target_modules, exclude_modules or layers_to_transform leave this module out.")
        number = self._shapes.names.projections.index(place.projection)
        target, is_input = SINGLE_EXPERTS[number], number < 2
        out_features, in_features = self._shape(is_input=is_input)
        rank = self._config.rank(place.module)
        asks = f"the model and the config's rank {rank} ask for"
        check_shape(A, (rank, in_features), asks)
        check_shape(B, (out_features // 2 if is_input else out_features, rank), asks)
        return ExpertSpec(place.layer, target, place.expert, rank, self._config.scale(place.module), A, B)

    def _shape(self, *, is_input: bool) -> tuple[int, int]:
        return self._shapes.gate_up if is_input else self._shapes.down
