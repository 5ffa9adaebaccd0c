"""Checks that the modules that an adapter's configuration targets or excludes exist in the base model.

PEFT ignores a name in target_modules that fits no module, as long as another name fits one, and only warns if no name in
exclude_modules fits one. A misspelt name would so give an adapter that changes less, or more, than its author wanted.
This server refuses both. It accepts a name in exclude_modules that fits no module beside one that fits: a list of what to
leave out may be made for several models, and the tensors show what was trained.
Owns the list of a base model's module names. Never reads a tensor: `module_reader.py` does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from graftwork.adapters.format.adapter_spec import EMBEDDING, HEAD, INPUT_EMBEDDING
from graftwork.adapters.format.expert_names import routed_targets
from graftwork.adapters.format.expert_reader import JOINED_PARAMETERS
from graftwork.adapters.format.lora_config import LoraConfig, ModulePattern
from graftwork.adapters.format.module_names import is_recurrent, modules_of
from graftwork.adapters.format.specs import shown
from graftwork.engine.core.expert_shapes import ExpertShapes
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import ValidationFailed

_OTHERS_IN_LAYERS = (
    *("self_attn", "self_attn.q_norm", "self_attn.k_norm", "mlp", "mlp.act_fn", "mlp.activation_fn"),
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *("post_self_attn_layernorm", "post_mlp_layernorm", "resid_attn_dropout", "resid_mlp_dropout"),
)
_OTHERS_WITH_STREAMS = (
    *(
        "altup",
        "altup.router_norm",
        "laurel",
        "laurel.post_laurel_norm",
        "post_per_layer_input_norm",
        "act_fn",
        "self_attn.v_norm",
    ),
)
"""Those of layers with several residual streams."""
_AROUND_STREAMS = ("altup_projections", "altup_unembed_projections", "per_layer_projection_norm")
_PREFIXES = ("model.", "", "model.language_model.")
"""What names begin with in a model with an output head, in one that was trained without it, and in one that also sees."""
_OTHERS = ("layers", "norm", "rotary_emb")
"""The modules of the served architectures that cannot have LoRA. It changes nothing to exclude them, but it is no mistake."""


def check_module_names(config: LoraConfig, description: EngineDescription) -> None:
    """Raises ValidationFailed if a name in target_modules fits no module of the base model, or none in exclude_modules
    fits one, or one of these fields is a pattern that fits none.

    A name fits a module if it is the module's whole name or the end of it after a dot, as in PEFT. The layers of
    `layers_to_transform` do not count: a name fits if any layer has the module. Only exclude_modules may name modules
    that cannot have LoRA, such as a norm.
    """
    targets = list(_target_names(description))
    wrong = _wrong_names(config.target_modules, targets)
    if wrong:
        raise _refused("config.target_modules", wrong[0], description)
    wrong = _wrong_names(config.target_parameters, list(_parameter_names(description, targets)))
    if wrong:
        raise _refused("config.target_parameters", wrong[0], description)
    excluded = config.exclude_modules
    wrong = _wrong_names(excluded, [*targets, *_other_names(description)])
    if wrong and (isinstance(excluded, ModulePattern) or len(wrong) == len(excluded or ())):
        raise _refused("config.exclude_modules", wrong[0], description)


def _wrong_names(chosen: tuple[str, ...] | ModulePattern | None, names: Sequence[str]) -> list[str]:
    """Returns what is wrong with each of the chosen names that fits no module, or with a pattern that fits none."""
    if isinstance(chosen, ModulePattern):
        return [] if any(chosen.matches(name) for name in names) else ["the pattern matches no module"]
    known = {end for name in names for end in _ends(name)}
    return [f"'{shown(name)}' names no module" for name in chosen or () if name not in known]


def _target_names(description: EngineDescription) -> Iterator[str]:
    """Yields the names of the modules that can have LoRA, fused ones included.

    Yields each name with each of `_PREFIXES`.
    """
    shapes, experts, modules = description.target_shapes, description.experts, description.modules
    for prefix in _PREFIXES:
        yield from (f"{prefix}{name}" for name in (EMBEDDING, *(() if modules is None else modules.beside)))
        if modules is not None and modules.input_table is not None:
            yield f"{prefix}{INPUT_EMBEDDING}"
        for layer in range(description.num_layers):
            yield from (f"{prefix}layers.{layer}.{module}" for module in modules_of(description, layer))
            if experts is not None and layer in experts.layers:
                yield from _routed_names(f"{prefix}layers.{layer}", experts, shapes)
    yield HEAD


def _routed_names(layer: str, experts: ExpertShapes, shapes: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Yields the names of the modules of a routed layer that can have LoRA, also as older files name them."""
    for block in experts.names.blocks:
        for inside, target in routed_targets(experts).items():
            if target in shapes:
                yield f"{layer}.{block}.{inside}"
        for number in range(experts.num_experts):
            for projection in experts.names.projections:
                yield f"{layer}.{block}.experts.{number}.{projection}"


def _parameter_names(description: EngineDescription, targets: Iterable[str]) -> Iterator[str]:
    """Yields the names of the parameters that can have LoRA of their own: weights, and those of all experts."""
    yield from (f"{target}.weight" for target in targets)
    experts = description.experts
    if experts is not None:
        for prefix in _PREFIXES:
            for layer in experts.layers:
                experts_module = f"{prefix}layers.{layer}.{experts.names.blocks[0]}.experts"
                yield from (f"{experts_module}.{name}" for name in JOINED_PARAMETERS)


def _other_names(description: EngineDescription) -> Iterator[str]:
    """Yields the names of the modules that cannot have LoRA, with each of `_PREFIXES`."""
    yield "model"
    has_streams = description.modules is not None and bool(description.modules.further)
    for prefix in _PREFIXES:
        yield from (f"{prefix}{name}" for name in (*_OTHERS, *(_AROUND_STREAMS if has_streams else ())))
        for layer in range(description.num_layers):
            yield f"{prefix}layers.{layer}"
            yield from (f"{prefix}layers.{layer}.{name}" for name in _OTHERS_IN_LAYERS)
            if has_streams:
                yield from (f"{prefix}layers.{layer}.{name}" for name in _OTHERS_WITH_STREAMS)
            modules = description.modules
            if modules is not None:
                yield f"{prefix}layers.{layer}.{modules.mlp}"
                yield from _recurrent_names(f"{prefix}layers.{layer}", description, layer)
        if description.experts is not None:
            block = description.experts.names.blocks[0]
            yield from (f"{prefix}layers.{layer}.{block}.experts" for layer in description.experts.layers)


def _recurrent_names(prefix: str, description: EngineDescription, layer: int) -> Iterator[str]:
    """Yields the names of the modules of a recurrent layer that cannot have LoRA."""
    if description.modules is not None and is_recurrent(description, layer):
        module = f"{prefix}.{description.modules.recurrent}"
        yield from (module, f"{module}.conv1d", f"{module}.norm", f"{module}.act")


def _ends(name: str) -> Iterator[str]:
    """Yields the name, and each end of it after a dot."""
    parts = name.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def _refused(param: str, problem: str, description: EngineDescription) -> ValidationFailed:
    known = ", ".join([*description.target_shapes, EMBEDDING, HEAD])
    layers = f"in {description.num_layers} layers, counted from 0"
    message = f"{param}: {problem} of the base model; it has {known}, {layers}."
    return ValidationFailed(message, param=param)
