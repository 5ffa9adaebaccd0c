"""Lists the groups of projections. A group is the linear layers with the same input, such as q, k and v.

One matrix product computes a whole group. Owns the names and the order of the groups. Never imports torch and never
holds weights, so that the code for adapters can use it without torch.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from graftwork.engine.model.config import ModelConfig

HEAD_LAYER = -1
"""The layer number of the output head."""
MODEL_LAYER = -2
"""The layer number of the linear layers beside the decoder layers and the head. Each is a group of its own name."""


@dataclass(frozen=True, slots=True)
class ProjectionGroup:
    """A group of linear layers with the same input. `targets` are the names of the layers, such as "q_proj"."""

    name: str
    targets: tuple[str, ...]


_ATTENTION_GROUPS = (
    ProjectionGroup("qkv", ("q_proj", "k_proj", "v_proj")),
    ProjectionGroup("o", ("o_proj",)),
)
_RECURRENT_GROUPS = (
    ProjectionGroup("recurrent_in", ("in_proj",)),
    ProjectionGroup("recurrent_out", ("out_proj",)),
)
_DENSE_GROUPS = (
    ProjectionGroup("gate_up", ("gate_proj", "up_proj")),
    ProjectionGroup("down", ("down_proj",)),
)
_ROUTED_GROUPS = (
    ProjectionGroup("router", ("router",)),
    ProjectionGroup("shared_gate_up", ("shared_gate_proj", "shared_up_proj")),
    ProjectionGroup("shared_down", ("shared_down_proj",)),
    ProjectionGroup("shared_gate", ("shared_gate",)),
)
_STREAM_GROUPS = tuple(
    ProjectionGroup(name, (name,))
    for name in (
        *("modality_router", "prediction_coefs", "correction_coefs"),
        *("linear_left", "linear_right", "per_layer_input_gate", "per_layer_projection"),
    )
)
GROUPS = (*_ATTENTION_GROUPS, *_RECURRENT_GROUPS, *_DENSE_GROUPS, *_ROUTED_GROUPS, *_STREAM_GROUPS)
"""The groups that decoder layers have. No layer has all of them."""

EXPERT_GROUPS = ("experts_gate_up", "experts_down")
"""What routed layers have besides: the projections of all experts, one of which is chosen for each row."""

_LEAST_WIDTH = 16
_NARROW_INPUTS = ("prediction_coefs", "correction_coefs")
NARROW_TARGETS = ("router", "shared_gate", "modality_router", *_NARROW_INPUTS)
"""What is computed with outputs of zeros behind its own, and is never served as codes."""


HEAD = ProjectionGroup("head", ("lm_head",))


def joined_projections(model: ModelConfig) -> dict[str, tuple[tuple[str, int], ...]]:
    """Returns the tensors of the model's files that hold projections under another name than the projections' own: the
    name, such as `qkv_proj` or `shared_mlp.input_linear`, and for each projection in it the name and the number of rows.
    """
    shapes, modules = model.target_shapes, model.block.modules
    targets = {f"{group.name}_proj": group.targets for group in GROUPS if group.name in model.block.joined_groups}
    if modules is not None:
        targets |= {f"{modules.mlp}.{name}": inside for name, inside in modules.targets.items()}

    def rows(target: str) -> int:
        return (shapes.get(target) or shapes[f"shared_{target}"])[0]

    return {name: tuple((target, rows(target)) for target in inside) for name, inside in targets.items()}


def layer_groups(model: ModelConfig, layer: int) -> tuple[ProjectionGroup, ...]:
    """Returns the groups of one layer, without those of its experts, each with the targets that the layer has.

    MODEL_LAYER has those beside the decoder layers.
    """
    return model_groups(model.model_shapes) if layer == MODEL_LAYER else groups_with(model.layer_shapes(layer))


def place_of(layer: int, inside: str) -> str:
    """Returns how messages name a linear layer, or several: "layer 3, q_proj", or its name alone beside the layers."""
    return inside if layer in (HEAD_LAYER, MODEL_LAYER) else f"layer {layer}, {inside}"


def model_groups(targets: Iterable[str]) -> tuple[ProjectionGroup, ...]:
    """Returns the groups of the linear layers beside the decoder layers."""
    return tuple(ProjectionGroup(target, (target,)) for target in targets)


def groups_with(targets: Container[str]) -> tuple[ProjectionGroup, ...]:
    """Returns the groups that have some of the given targets, with those alone."""
    found = ((group, tuple(target for target in group.targets if target in targets)) for group in GROUPS)
    return tuple(group if own == group.targets else replace(group, targets=own) for group, own in found if own)


def stored_width(target: str, out_features: int) -> int:
    """Returns with how many outputs a linear layer is computed.

    Narrow ones get outputs of zeros: a product in fp32 with few columns rounds in another way (see BatchInvariance).
    """
    return least_width(out_features) if target in NARROW_TARGETS else out_features


def stored_inputs(target: str, in_features: int) -> int:
    """Returns with how many inputs a linear layer is computed. Those beyond its own are zeros."""
    return least_width(in_features) if target in _NARROW_INPUTS else in_features


def least_width(out_features: int) -> int:
    """Returns with how many outputs, or inputs, a narrow layer is computed."""
    return max(out_features, _LEAST_WIDTH)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The numbers of input and output features of the linear layers in one group (layers with the same input)."""

    in_features: int
    widths: tuple[int, ...]
    """Output features of each projection, in the group's order."""

    @classmethod
    def of(cls, model: ModelConfig, targets: Sequence[str], layer: int | None = None) -> "GroupShape":
        """Returns the shape of one group of linear layers in a layer of a model. `targets` are their names, such as
        "q_proj". Without a layer, the shape is that of the widest.

        The features are those with which the layers are computed (see `stored_width` and `stored_inputs`).
        """
        of_layer = model.target_shapes if layer in (None, MODEL_LAYER) else model.layer_shapes(layer)
        shapes = {target: of_layer[target] for target in targets}
        in_features = stored_inputs(targets[0], shapes[targets[0]][1])
        return cls(in_features, tuple(stored_width(target, shape[0]) for target, shape in shapes.items()))


def group_shapes(model: ModelConfig) -> dict[tuple[int, str], GroupShape]:
    """Returns the shapes of all groups of a model, by (layer, group name), without those of experts and of the head."""
    return {
        (layer, group.name): GroupShape.of(model, group.targets, layer)
        for layer in (*range(model.num_layers), MODEL_LAYER)
        for group in layer_groups(model, layer)
    }
