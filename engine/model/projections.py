"""Lists the groups of projections. A group is the linear layers with the same input, such as q, k and v.

One matrix product computes a whole group. Owns the names and the order of the groups. Never imports torch and never
holds weights, so that the code for adapters can use it without torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from graftwork.engine.model.config import ModelConfig

HEAD_LAYER = -1
"""The layer number of the output head."""


@dataclass(frozen=True, slots=True)
class ProjectionGroup:
    """A group of linear layers with the same input. `targets` are the names of the layers, such as "q_proj"."""

    name: str
    targets: tuple[str, ...]


GROUPS = (
    ProjectionGroup("qkv", ("q_proj", "k_proj", "v_proj")),
    ProjectionGroup("o", ("o_proj",)),
    ProjectionGroup("gate_up", ("gate_proj", "up_proj")),
    ProjectionGroup("down", ("down_proj",)),
)
"""The groups of one decoder layer, in the order in which they are computed."""


HEAD = ProjectionGroup("head", ("lm_head",))


def joined_projections(model: ModelConfig) -> dict[str, tuple[tuple[str, int], ...]]:
    """Returns the groups that the model's files hold as one tensor: its name, such as `qkv_proj`, and for each of its
    projections the name and the number of rows.
    """
    shapes = model.target_shapes
    return {
        f"{group.name}_proj": tuple((target, shapes[target][0]) for target in group.targets)
        for group in GROUPS
        if group.name in model.block.joined_groups
    }


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The numbers of input and output features of the linear layers in one group (layers with the same input)."""

    in_features: int
    widths: tuple[int, ...]
    """Output features of each projection, in the group's order."""

    @classmethod
    def of(cls, model: ModelConfig, targets: Sequence[str]) -> "GroupShape":
        """Returns the shape of one group of linear layers in a model. `targets` are their names, such as "q_proj"."""
        shapes = [model.target_shapes[target] for target in targets]
        return cls(shapes[0][1], tuple(out_features for out_features, _ in shapes))
