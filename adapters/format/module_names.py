"""Lists the modules of a base model's layers that can have LoRA, and the targets that each of them holds.

A module may hold several targets, such as `qkv_proj`: they share one matrix A, and the rows of B are theirs in order. Owns
what layers of each kind have: attention or a recurrent part, and a dense or a routed MLP. The parts inside a routed block are
in expert_names.py.
"""

from collections.abc import Iterator, Mapping

from graftwork.adapters.format.tensor_names import FUSED, PARENTS
from graftwork.engine.core.layer_modules import RECURRENT_TARGETS
from graftwork.engine.core.stats import EngineDescription

Modules = Mapping[str, tuple[str, ...]]
"""By the name of a module within its layer, such as `self_attn.q_proj`, its targets."""


def modules_of(description: EngineDescription, layer: int) -> Modules:
    """Returns the modules of one layer, without those inside a routed block."""
    experts = description.experts
    is_routed = experts is not None and layer in experts.layers
    found = dict([*_mixer(description, is_recurrent=is_recurrent(description, layer)), *_mlp(description, is_routed)])
    if description.modules is not None:
        found |= {name: (name.rpartition(".")[2],) for name in description.modules.further}
    return {name: targets for name, targets in found.items() if not reads_others(description, layer, name)}


def reads_others(description: EngineDescription, layer: int, name: str) -> bool:
    """Returns whether a module would compute keys or values in a layer that reads those of another layer."""
    modules = description.modules
    return modules is not None and layer in modules.query_layers and name in ("self_attn.k_proj", "self_attn.v_proj")


def shape_of(description: EngineDescription, layer: int | None, target: str) -> tuple[int, int]:
    """Returns (out_features, in_features) of a target in one layer."""
    out_features, in_features = description.target_shapes[target]
    widths = () if description.modules is None else description.modules.mlp_widths
    if not widths or layer is None:
        return out_features, in_features
    return {
        "gate_proj": (widths[layer], in_features),
        "up_proj": (widths[layer], in_features),
        "down_proj": (out_features, widths[layer]),
    }.get(target, (out_features, in_features))


def all_modules(description: EngineDescription) -> Modules:
    """Returns the modules that any layer has, each once."""
    layers = range(description.num_layers)
    return {name: targets for layer in layers for name, targets in modules_of(description, layer).items()}


def is_recurrent(description: EngineDescription, layer: int) -> bool:
    """Returns whether a layer has a recurrent part in place of attention."""
    return description.modules is not None and layer in description.modules.recurrent_layers


def _mixer(description: EngineDescription, *, is_recurrent: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    if is_recurrent and description.modules is not None:
        yield from ((f"{description.modules.recurrent}.{target}", (target,)) for target in RECURRENT_TARGETS)
        return
    yield from _named_as_llama("self_attn", description)


def _mlp(description: EngineDescription, is_routed: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    modules = description.modules
    if modules is None or not modules.targets:
        yield from () if is_routed else _named_as_llama("mlp", description)
        return
    prefix = "shared_" if is_routed else ""
    for name, targets in modules.targets.items():
        yield f"{modules.mlp}.{name}", tuple(f"{prefix}{target}" for target in targets)


def _named_as_llama(parent: str, description: EngineDescription) -> Iterator[tuple[str, tuple[str, ...]]]:
    for target in sorted(PARENTS[parent]):
        targets = FUSED.get(target, (target,))
        if all(part in description.target_shapes for part in targets):
            yield f"{parent}.{target}", targets
