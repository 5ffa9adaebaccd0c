"""Checks the tensors of one module against the model and the adapter's configuration.

A module is one projection of a layer, the embedding (embed_tokens) or the output head (lm_head). Owns two rules for
each tensor of a module: the shape fits the model, and PEFT would apply the tensor too. Never reads the values of a
tensor.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NoReturn

from graftwork.adapters.format.adapter_spec import EMBEDDING, HEAD, INPUT_EMBEDDING, BiasSpec, ModuleSpec, SavedSpec
from graftwork.adapters.format.lora_config import LoraConfig
from graftwork.adapters.format.module_names import Modules, all_modules, modules_of, reads_others, shape_of
from graftwork.adapters.format.safetensors_file import TensorEntry
from graftwork.adapters.format.tensor_names import PARENTS, ROUTED, Part, Place
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import ValidationFailed


@dataclass(frozen=True, slots=True)
class FoundModule:
    """One module, with those of its tensors that the weights file contains."""

    place: Place
    """The module's name, layer and target, taken from one of the tensors. They are the same for all tensors of the
    module.
    """
    entries: dict[Part, TensorEntry]

    @property
    def has_lora(self) -> bool:
        return Part.A in self.entries or Part.B in self.entries


class ModuleReader:
    """Reads the modules of one adapter.

    Every method raises ValidationFailed with the name of the tensor that is wrong.
    """

    def __init__(self, config: LoraConfig, description: EngineDescription) -> None:
        self._config = config
        self._description = description
        self._all_modules = all_modules(description)
        self._modules_by_layer: dict[int, Modules] = {}

    def check_place(self, place: Place, entry: TensorEntry) -> None:
        """Checks that the model has the module and the layer that the tensor's name contains. Raises ValidationFailed."""
        if place.layer is None:
            self._check_beside(place, entry)
            return
        name = place.in_layer
        shapes, is_routed_part = self._description.target_shapes, place.parent == ROUTED
        known = PARENTS[ROUTED] & shapes.keys() if is_routed_part else self._all_modules.keys()
        if (place.target if is_routed_part else name) not in known:
            refuse(entry, f"the model has no module '{name}' for it; it has {', '.join(shapes)}.")
        if place.layer >= self._description.num_layers:
            refuse(entry, f"the model has {self._description.num_layers} layers, counted from 0.")
        experts = self._description.experts
        is_routed = experts is not None and place.layer in experts.layers
        if is_routed_part and not is_routed:
            refuse(entry, f"layer {place.layer} has no experts, and so no such module.")
        if not is_routed_part and name not in self._modules_of(place.layer):
            others = "experts" if place.parent == "mlp" else ", ".join(self._modules_of(place.layer))
            refuse(entry, f"layer {place.layer} has {others} in place of this module.")

    def _check_beside(self, place: Place, entry: TensorEntry) -> None:
        """Checks that the model has a module outside the layers."""
        modules = self._description.modules
        beside = () if modules is None else modules.beside
        beside += () if modules is None or modules.input_table is None else (INPUT_EMBEDDING,)
        if place.target not in (EMBEDDING, HEAD, *beside):
            others = ", ".join([EMBEDDING, HEAD, *beside])
            refuse(entry, f"the model has no module '{place.target}' for it; outside its layers it has {others}.")

    def changes_nothing(self, place: Place) -> bool:
        """Returns whether a tensor would change keys or values of a layer that reads those of another one.

        Older versions of transformers give such layers modules that they never call, so adapters have tensors for them.
        """
        return place.layer is not None and reads_others(self._description, place.layer, place.in_layer)

    def read_lora(self, found: FoundModule) -> list[ModuleSpec]:
        """Returns the LoRA of the module.

        A normal module gives one entry. A fused module such as `qkv_proj` gives one entry for each of q, k and v. A
        module without LoRA gives an empty list.
        """
        place, entries = found.place, found.entries
        if not found.has_lora:
            self._refuse_lone(found)
            return []
        name = self._targeted_name(place)
        if name is None:
            entry = entries.get(Part.A) or entries[Part.B]
            refuse(entry, "the config's target_modules, exclude_modules or layers_to_transform leave this module out.")
        for part, other in ((Part.A, Part.B), (Part.B, Part.A)):
            if other not in entries:
                refuse(entries[part], f"its counterpart {other} is missing.")
        out_features, in_features = self._shape(place)
        rank = self._config.rank(name)
        self._check_factor(entries[Part.A], (rank, in_features), rank)
        self._check_factor(entries[Part.B], (out_features, rank), rank)
        whole = ModuleSpec(
            place.layer,
            place.target,
            rank,
            self._config.scale(name),
            entries[Part.A],
            entries[Part.B],
            self._optional(found, Part.MAGNITUDE, "use_dora", self._config.use_dora),
            self._optional(found, Part.LORA_BIAS, "lora_bias", self._config.lora_bias),
        )
        return self._split(place, whole)

    def read_bias(self, found: FoundModule) -> BiasSpec | None:
        """Returns the trained bias that replaces the base model's bias of this module; None if the file contains no
        such bias.
        """
        entry, place = found.entries.get(Part.BIAS), found.place
        if entry is None or place.layer is None:
            return None
        if self._config.bias == "none":
            refuse(entry, "the config's bias is 'none', so it would not be applied.")
        if place.target not in self._description.biased_targets:
            refuse(entry, "the base model has no bias there that it could replace.")
        check_shape(entry, (self._shape(place)[0],), "the model asks for")
        return BiasSpec(place.layer, place.target, entry)

    def read_saved(self, found: FoundModule) -> SavedSpec | None:
        """Returns the trained matrix that replaces the base model's matrix of this module; None if the file contains no
        such matrix.
        """
        alone, beneath = found.entries.get(Part.MATRIX), found.entries.get(Part.BASE_MATRIX)
        if alone is not None and (found.has_lora or beneath is not None):
            refuse(alone, "the file changes this module in another way as well, and PEFT would apply only one of them.")
        if beneath is not None and not found.has_lora:
            refuse(beneath, "the module has no LoRA that this could lie beneath, so it would not be applied.")
        entry = alone or beneath
        if entry is None:
            return None
        shape = (self._description.vocab_size, self._description.hidden_size)
        check_shape(entry, shape, "the model's vocabulary and width ask for")
        return SavedSpec(found.place.target, entry)

    def _targeted_name(self, place: Place) -> str | None:
        """Returns the name by which the configuration gives a module LoRA: its own, or that of its weight. None if the
        configuration leaves the module out.
        """
        if self._config.targets(place.module, place.layer):
            return place.module
        weight = f"{place.module}.weight"
        return weight if self._config.targets_parameter(weight) else None

    def _modules_of(self, layer: int) -> Modules:
        """Returns the modules of a layer and their targets. They are found once for each layer."""
        if layer not in self._modules_by_layer:
            self._modules_by_layer[layer] = modules_of(self._description, layer)
        return self._modules_by_layer[layer]

    def _targets(self, place: Place) -> tuple[str, ...]:
        """Returns the targets that a module holds, in the order of its rows."""
        if place.parent == ROUTED or place.layer is None:
            return (place.target,)
        return self._modules_of(place.layer)[place.in_layer]

    def _shape(self, place: Place) -> tuple[int, int]:
        """Returns (out_features, in_features) of the module in the model."""
        vocab_size, hidden_size = self._description.vocab_size, self._description.hidden_size
        modules = self._description.modules
        if place.target == EMBEDDING:
            return hidden_size, vocab_size
        if place.target == INPUT_EMBEDDING and modules is not None and modules.input_table is not None:
            return modules.input_table[1], modules.input_table[0]
        if place.target == HEAD:
            return vocab_size, hidden_size
        shapes = [shape_of(self._description, place.layer, part) for part in self._targets(place)]
        return sum(shape[0] for shape in shapes), shapes[0][1]

    def _check_factor(self, entry: TensorEntry, expected: tuple[int, int], rank: int) -> None:
        check_shape(entry, expected, f"the model and the config's rank {rank} ask for")

    def _optional(self, found: FoundModule, part: Part, field: str, is_configured: bool) -> TensorEntry | None:
        """Returns an optional tensor.

        It must be in the file if the config's `field` says so, and must be absent otherwise.
        """
        entry = found.entries.get(part)
        target = found.place.target
        if target in (EMBEDDING, INPUT_EMBEDDING) and is_configured:
            message = f"config.{field}: not served on {target}, which the adapter changes as well."
            raise ValidationFailed(message, param=f"config.{field}", code="unsupported_feature")
        if entry is None and is_configured:
            refuse(found.entries[Part.B], f"the config's {field} asks for a {part} beside it, which is missing.")
        if entry is not None:
            if not is_configured:
                refuse(entry, f"the config does not set {field}, so it would not be applied.")
            check_shape(entry, (self._shape(found.place)[0],), "the model asks for")
        return entry

    def _refuse_lone(self, found: FoundModule) -> None:
        for part in (Part.MAGNITUDE, Part.LORA_BIAS):
            if part in found.entries:
                refuse(found.entries[part], "the lora_A and lora_B that it belongs to are missing.")

    def _split(self, place: Place, whole: ModuleSpec) -> list[ModuleSpec]:
        """Splits a module into its targets. All targets share A, and each has its own rows of B."""
        targets = self._targets(place)
        if targets == (whole.target,):
            return [whole]
        widths = (shape_of(self._description, place.layer, target)[0] for target in targets)
        borders = accumulate(widths, initial=0)
        return [
            ModuleSpec(
                whole.layer,
                target,
                whole.rank,
                whole.scale,
                whole.A,
                whole.B.rows(first, end),
                whole.magnitude and whole.magnitude.rows(first, end),
                whole.bias and whole.bias.rows(first, end),
            )
            for target, (first, end) in zip(targets, pairwise(borders), strict=True)
        ]


def refuse(entry: TensorEntry, problem: str) -> NoReturn:
    """Raises ValidationFailed for a wrong tensor. The error message is the tensor's name and then `problem`."""
    raise ValidationFailed(f"{entry.param}: {problem}", param=entry.param)


def check_shape(entry: TensorEntry, expected: tuple[int, ...], who_asks: str) -> None:
    """Raises ValidationFailed if a tensor has another shape."""
    if entry.shape != expected:
        refuse(entry, f"its shape is {list(entry.shape)}; {who_asks} {list(expected)}.")
