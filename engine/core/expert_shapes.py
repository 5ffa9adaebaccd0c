"""Describes the experts of a model's routed layers to those who check adapters: sizes, layers and module names.

Only names and numbers: the gateway reads them too. Never imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How an architecture names the parts of a routed layer, in checkpoints and in adapters."""

    blocks: tuple[str, ...] = ("mlp",)
    """What a layer calls its MLP: the name in transformers' modules, and older names in files."""
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The linear layers of one expert: gate, up and down."""
    shared: str = "shared_expert"
    """The expert that sees every token, if there is one."""
    shared_gate: str = "shared_expert_gate"


LLAMA_EXPERTS = ExpertNames()


@dataclass(frozen=True, slots=True)
class ExpertShapes:
    """The sizes of a model's experts. They are the same in all routed layers."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[int, ...]
    """The routed layers, ascending. The others have a dense MLP."""
    names: ExpertNames = LLAMA_EXPERTS
    interleaves: bool = False
    """Whether gates and ups take turns in the joined tensors of files, and so in adapters of them."""

    @property
    def gate_up(self) -> tuple[int, int]:
        """(out_features, in_features) of the gate and up projections of one expert together."""
        return 2 * self.intermediate_size, self.hidden_size

    @property
    def down(self) -> tuple[int, int]:
        return self.hidden_size, self.intermediate_size

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ExpertShapes":
        """Reads the form that `dataclasses.asdict` and JSON give."""
        names = fields["names"]
        own = ExpertNames(**names | {name: tuple(names[name]) for name in ("blocks", "projections")})
        return cls(**{**fields, "layers": tuple(fields["layers"]), "names": own})
