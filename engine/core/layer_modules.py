"""Describes the modules of a model's layers to those who check adapters, where their names are not those of Llama.

Only names and numbers: the gateway reads them too. Never imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerModules:
    """How an architecture names the parts of its layers, in checkpoints and in adapters."""

    mlp: str = "mlp"
    """The dense MLP."""
    gate_up: str | None = None
    """The module in the MLP that holds gates and ups together, gates first. None if the MLP is that of Llama."""
    down: str | None = None
    recurrent: str | None = None
    """The recurrent part of a layer, with the linear layers in_proj and out_proj. It stands in place of self_attn."""
    recurrent_layers: tuple[int, ...] = ()
    """The layers that have this part, ascending."""
    further: tuple[str, ...] = ()
    """The linear layers that each layer has besides, such as "laurel.linear_left". The last word is the LoRA target."""
    beside: tuple[str, ...] = ()
    """The linear layers of the model beside its decoder layers and its output head, such as "altup_projections.0"."""
    input_table: tuple[int, int] | None = None
    """The shape [vocabulary, features] of the table that gives each layer an input of its own; None if there is none."""
    query_layers: tuple[int, ...] = ()
    """The layers with queries alone, ascending: they read the keys and values of earlier layers."""
    mlp_widths: tuple[int, ...] = ()
    """The width of each layer's dense MLP, where they differ."""

    @property
    def targets(self) -> dict[str, tuple[str, ...]]:
        """By the name of a module in the MLP, the LoRA targets that it holds, in the order of its rows."""
        if self.gate_up is None or self.down is None:
            return {}
        return {self.gate_up: ("gate_proj", "up_proj"), self.down: ("down_proj",)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "LayerModules":
        """Reads the form that `dataclasses.asdict` and JSON give."""
        own: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**own)


RECURRENT_TARGETS = ("in_proj", "out_proj")
"""The linear layers of a recurrent layer's own part."""
