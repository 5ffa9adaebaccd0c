"""Checks an adapter's two files, the configuration and the weights, against the model.

Owns the rule that every tensor belongs to a module of the model, and has the right shape and scale for this module.
Never imports torch, and never opens a file: the caller passes the content.
Invariant: an adapter is accepted completely, or refused with the name of the wrong tensor or field. No tensor is
padded, and none is skipped that would change an answer.
"""

from collections.abc import Iterable
from typing import NoReturn, TypeVar

from graftwork.adapters.format.adapter_spec import AdapterSpec, BiasSpec, ModuleSpec, target_order
from graftwork.adapters.format.expert_names import find_routed_place
from graftwork.adapters.format.expert_reader import TENSORS_OF_EXPERT, read_experts
from graftwork.adapters.format.lora_config import LoraConfig, read_lora_config
from graftwork.adapters.format.module_reader import FoundModule, ModuleReader, refuse
from graftwork.adapters.format.safetensors_file import MAX_TENSORS, Readable, TensorEntry, read_entries
from graftwork.adapters.format.specs import shown
from graftwork.adapters.format.target_names import check_module_names
from graftwork.adapters.format.tensor_names import Part, find_place
from graftwork.adapters.format.unsupported import describe_unserved_tensor
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import ValidationFailed

InLayer = TypeVar("InLayer", ModuleSpec, BiasSpec)


def parse_adapter(config: bytes, weights: Readable, description: EngineDescription) -> AdapterSpec:
    """Checks the configuration and the weights file of an upload, and returns the adapter.

    Also checks the values of the tensors: NaN and infinity are refused.
    Raises ValidationFailed with the name of the wrong tensor or field.
    """
    spec = read_layout(config, weights, description)
    for entry in spec.entries:
        if not entry.is_finite(weights):
            refuse(entry, "holds NaN or an infinity.")
    return spec


def read_layout(config: bytes, weights: Readable, description: EngineDescription) -> AdapterSpec:
    """Checks the two files like `parse_adapter`, but does not check the values of the tensors.

    Reads only the header of `weights` and the total length, not the tensors. Raises ValidationFailed.
    """
    lora_config = read_lora_config(config, description.max_lora_rank)
    if lora_config.base_fingerprint not in (None, description.fingerprint):
        message = f"config.base_fingerprint: the adapter belongs to another base than {description.fingerprint}."
        raise ValidationFailed(message, param="config.base_fingerprint", code="wrong_base")
    check_module_names(lora_config, description)
    entries = read_entries(weights, most_tensors(description))
    if not entries:
        raise ValidationFailed("weights: the file holds no tensor, so the adapter would do nothing.", param="weights")
    reader = ModuleReader(lora_config, description)
    experts, others = read_experts(entries, lora_config, description)
    found = _group(others, reader, description)
    modules = [module for group in found for module in reader.read_lora(group)]
    _check_once(modules)
    if not modules and not experts:
        raise ValidationFailed("weights: the file holds no lora_A and lora_B.", param="weights")
    biases = [bias for group in found if (bias := reader.read_bias(group))]
    saved = [matrix for group in found if (matrix := reader.read_saved(group))]
    _check_saved(lora_config, found)
    return AdapterSpec(
        lora_config.r,
        _in_order(modules),
        _in_order(biases),
        tuple(sorted(saved, key=lambda part: target_order(part.target))),
        experts,
    )


def most_tensors(description: EngineDescription) -> int:
    """Returns the most tensors that a file may hold. An adapter of experts may have several for each of them."""
    experts = description.experts
    own = 0 if experts is None else experts.num_experts * len(experts.layers) * TENSORS_OF_EXPERT
    return MAX_TENSORS + own


def _group(entries: Iterable[TensorEntry], reader: ModuleReader, description: EngineDescription) -> list[FoundModule]:
    """Returns the tensors by module.

    Raises ValidationFailed for a tensor that has no place in the model, or if two tensors have the same place.
    """
    found: dict[tuple[int | None, str], FoundModule] = {}
    for entry in entries:
        place = find_routed_place(entry.name, description.experts) or find_place(entry.name)
        if place is None:
            _refuse_name(entry)
        if reader.changes_nothing(place):
            continue
        reader.check_place(place, entry)
        group = found.setdefault((place.layer, place.target), FoundModule(place, {}))
        first = group.entries.setdefault(place.part, entry)
        if first is not entry:
            refuse(entry, f"'{shown(first.name)}' is the same tensor in another spelling.")
    return list(found.values())


def _check_once(modules: list[ModuleSpec]) -> None:
    """Checks that no module is in the file twice: once in a fused tensor and once alone. Raises ValidationFailed."""
    seen: dict[tuple[int | None, str], ModuleSpec] = {}
    for module in modules:
        first = seen.setdefault((module.layer, module.target), module)
        if first is not module:
            refuse(module.A, f"'{shown(first.A.name)}' is for the same module.")


def _check_saved(config: LoraConfig, found: list[FoundModule]) -> None:
    """Checks that the file contains every saved matrix that the configuration names. Raises ValidationFailed."""
    held = {group.place.target for group in found if Part.MATRIX in group.entries}
    for name in config.saved_modules:
        if name not in held:
            param = "config.modules_to_save"
            raise ValidationFailed(f"{param}: the file holds no {name}.weight.", param=param)


def _in_order(parts: list[InLayer]) -> tuple[InLayer, ...]:
    """Sorts parts of an adapter by layer. Parts outside the layers come last."""
    return tuple(sorted(parts, key=lambda part: (part.layer is None, part.layer or 0, target_order(part.target))))


def _refuse_name(entry: TensorEntry) -> NoReturn:
    what = describe_unserved_tensor(entry.name)
    if what is not None:
        message = f"{entry.param}: not served: {what}."
        raise ValidationFailed(message, param=entry.param, code="unsupported_feature")
    refuse(entry, "not the name of a LoRA tensor of this model, so it would not be applied.")
