"""Carries the hidden states of a step from layer to layer: what a layer gets, and how what it computes is added.

ResidualStream is the interface. PlainResidual has one vector for each token, as most models have; altup.py has several.
Never computes attention or an MLP: the decoder does, between the calls. A row is one token of the step.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from graftwork.engine.lora.backend import StepLora
from graftwork.engine.model.weights import LayerWeights
from graftwork.engine.runner.row_ops import RowOps


class ResidualStream(Protocol):
    """The hidden states of one step. The decoder calls the methods in order, the first three for each layer."""

    hidden: torch.Tensor
    """The hidden states that the present layer changes: [num_tokens, hidden]. Only to be read."""

    def enter(self, layer: int) -> torch.Tensor:
        """Returns the input of a layer's attention: [num_tokens, hidden]."""
        ...

    def add_mixed(self, layer: int, delta: torch.Tensor) -> torch.Tensor:
        """Adds the output of a layer's attention, [num_tokens, hidden]. Returns the input of its MLP."""
        ...

    def add_mlp(self, layer: int, delta: torch.Tensor) -> None:
        """Adds the output of a layer's MLP, [num_tokens, hidden]."""
        ...

    def leave(self) -> torch.Tensor:
        """Returns the hidden states after the last layer, before the last norm: [num_tokens, hidden]."""
        ...


class Residuals(Protocol):
    """Begins the hidden states of steps."""

    def begin(self, hidden: torch.Tensor, token_ids: torch.Tensor, lora: StepLora) -> ResidualStream:
        """Begins a step with the embeddings of its tokens, [num_tokens, hidden], which it may overwrite."""
        ...


class PlainResiduals:
    """Begins steps with one vector for each token."""

    def __init__(self, rows: RowOps, layers: Sequence[LayerWeights]) -> None:
        self._rows = rows
        self._layers = layers

    def begin(self, hidden: torch.Tensor, token_ids: torch.Tensor, lora: StepLora) -> "PlainResidual":
        return PlainResidual(self._rows, self._layers, hidden)


class PlainResidual:
    """One vector for each token. A sum and the norm after it are one operation, also where the next layer has the norm."""

    __slots__ = ("_layers", "_rows", "_x", "hidden")

    def __init__(self, rows: RowOps, layers: Sequence[LayerWeights], hidden: torch.Tensor) -> None:
        self._rows = rows
        self._layers = layers
        self.hidden = hidden
        first = layers[0].attention_norm
        self._x = hidden if first is None else rows.norm(hidden, first)

    def enter(self, layer: int) -> torch.Tensor:
        return self._x

    def add_mixed(self, layer: int, delta: torch.Tensor) -> torch.Tensor:
        own = self._layers[layer]
        self.hidden, after = self._rows.add_norm(self.hidden, delta, own.mlp_norm, own.attention_post_norm)
        return after

    def add_mlp(self, layer: int, delta: torch.Tensor) -> None:
        layers, post_norm = self._layers, self._layers[layer].mlp_post_norm
        if layer + 1 < len(layers):
            following = layers[layer + 1].attention_norm
            self.hidden, self._x = self._rows.add_norm(self.hidden, delta, following, post_norm)
        else:
            self.hidden = self._rows.add(self.hidden, delta, post_norm)

    def leave(self) -> torch.Tensor:
        return self.hidden
