"""The projections of a decoder layer that share an input, and so one matrix product."""

from dataclasses import dataclass

HEAD_LAYER = -1
"""The `layer` of the output head, whose group is the same for all."""


@dataclass(frozen=True, slots=True)
class ProjectionGroup:
    """Linear layers that read the same input and are computed by one GEMM."""

    name: str
    targets: tuple[str, ...]


GROUPS = (
    ProjectionGroup("qkv", ("q_proj", "k_proj", "v_proj")),
    ProjectionGroup("o", ("o_proj",)),
    ProjectionGroup("gate_up", ("gate_proj", "up_proj")),
    ProjectionGroup("down", ("down_proj",)),
)


HEAD = ProjectionGroup("head", ("lm_head",))
