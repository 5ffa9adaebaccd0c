"""Checks that the target modules of an adapter's configuration exist in the base model.

PEFT ignores a name in target_modules that fits no module, as long as another name fits one. A misspelt name would so
give an adapter that changes less than its author wanted. This server refuses the name instead.
Owns the list of a base model's module names. Never reads a tensor: `module_reader.py` does.
"""

from collections.abc import Iterator

from graftwork.adapters.format.adapter_spec import EMBEDDING, HEAD
from graftwork.adapters.format.lora_config import LoraConfig, ModulePattern
from graftwork.adapters.format.specs import shown
from graftwork.adapters.format.tensor_names import FUSED, PARENTS
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import ValidationFailed

_PARAM = "config.target_modules"


def check_targets(config: LoraConfig, description: EngineDescription) -> None:
    """Raises ValidationFailed if a name of target_modules, or target_modules as one pattern, fits no module of the
    base model.

    A name fits a module if it is the module's whole name or the end of it after a dot, as in PEFT. The layers of
    `layers_to_transform` do not count: a name fits if any layer has the module.
    """
    targets = config.target_modules
    if targets is None:
        return
    if isinstance(targets, ModulePattern):
        if not any(targets.matches(name) for name in _module_names(description)):
            raise _refused("the pattern matches no module", description)
        return
    known = {end for name in _module_names(description) for end in _ends(name)}
    for target in targets:
        if target not in known:
            raise _refused(f"'{shown(target)}' names no module", description)


def _module_names(description: EngineDescription) -> Iterator[str]:
    """Yields the names of the modules that can have LoRA, fused ones included.

    Yields each name in both forms: as in a model with an output head, and as in a model that was trained without it.
    """
    shapes = description.target_shapes
    for prefix in ("model.", ""):
        yield f"{prefix}{EMBEDDING}"
        for layer in range(description.num_layers):
            for parent, targets in PARENTS.items():
                for target in sorted(targets):
                    if all(part in shapes for part in FUSED.get(target, (target,))):
                        yield f"{prefix}layers.{layer}.{parent}.{target}"
    yield HEAD


def _ends(name: str) -> Iterator[str]:
    """Yields the name, and each end of it after a dot."""
    parts = name.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def _refused(problem: str, description: EngineDescription) -> ValidationFailed:
    known = ", ".join([*description.target_shapes, EMBEDDING, HEAD])
    layers = f"in {description.num_layers} layers, counted from 0"
    message = f"{_PARAM}: {problem} of the base model; it has {known}, {layers}."
    return ValidationFailed(message, param=_PARAM)
