"""Describes the modules of a model's layers to those who check adapters, where their names are not those of Llama.

Only names and numbers: the gateway reads them too. Never imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerModules:
    """How an architecture names the parts of its layers, in checkpoints and in adapters."""

    mlp: str
    """The dense MLP, which is "mlp" in Llama."""
    gate_up: str
    """The module in the MLP that holds gates and ups together, gates first."""
    down: str
    recurrent: str
    """The recurrent part of a layer, with the linear layers in_proj and out_proj. It stands in place of self_attn."""
    recurrent_layers: tuple[int, ...] = ()
    """The layers that have this part, ascending."""

    @property
    def targets(self) -> dict[str, tuple[str, ...]]:
        """By the name of a module in the MLP, the LoRA targets that it holds, in the order of its rows."""
        return {self.gate_up: ("gate_proj", "up_proj"), self.down: ("down_proj",)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "LayerModules":
        """Reads the form that `dataclasses.asdict` and JSON give."""
        return cls(**{**fields, "recurrent_layers": tuple(fields["recurrent_layers"])})


RECURRENT_TARGETS = ("in_proj", "out_proj")
"""The linear layers of a recurrent layer's own part."""
