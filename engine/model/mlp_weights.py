"""Holds the weights of a layer's MLP: a dense one, or a router with its experts.

Each linear layer is a Linear of its own, so that whatever stores weights in another form serves experts too. Never reads
a file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from graftwork.engine.model.layers import Linear
from graftwork.engine.quantization.linear import QuantizedLinear

AnyLinear = Linear | QuantizedLinear
"""A linear layer with plain weights or with quantised ones."""


L = TypeVar("L", Linear, AnyLinear)


@dataclass(frozen=True, slots=True)
class DenseWeights(Generic[L]):
    """The weights of an MLP, or of one expert. Gate and up are joined."""

    gate_up: L  # [2 * intermediate, hidden]
    down: L  # [hidden, intermediate]

    @property
    def linears(self) -> tuple[L, ...]:
        return self.gate_up, self.down

    @property
    def others(self) -> tuple[torch.Tensor, ...]:
        """The tensors that belong to no linear layer."""
        return ()

    def group(self, name: str) -> L:
        return {"gate_up": self.gate_up, "down": self.down}[name]


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """The weights of the expert that sees every token."""

    mlp: DenseWeights[AnyLinear]
    gate: Linear | None  # [16, hidden]: one output, and outputs of zeros (see projections.stored_width)


@dataclass(frozen=True, slots=True)
class RoutedWeights:
    """The weights of a routed layer."""

    router: Linear  # [experts, hidden], at least 16 outputs; fp32 where the router multiplies in fp32
    correction: torch.Tensor | None  # [experts] fp32, added to the scores for the choice alone
    experts: tuple[DenseWeights[Linear], ...]
    shared: SharedWeights | None

    @property
    def linears(self) -> tuple[AnyLinear, ...]:
        return tuple(self._linears())

    @property
    def others(self) -> tuple[torch.Tensor, ...]:
        return () if self.correction is None else (self.correction,)

    def group(self, name: str) -> AnyLinear:
        """Returns one joined linear layer by its name, such as "router" or "shared_down"."""
        if name == "router":
            return self.router
        assert self.shared is not None, f"the layer has no {name}"
        if name == "shared_gate":
            assert self.shared.gate is not None, f"the layer has no {name}"
            return self.shared.gate
        return self.shared.mlp.group(name.removeprefix("shared_"))

    def _linears(self) -> Iterator[AnyLinear]:
        yield self.router
        for expert in self.experts:
            yield from expert.linears
        if self.shared is not None:
            yield from self.shared.mlp.linears
            if self.shared.gate is not None:
                yield self.shared.gate


MlpWeights = DenseWeights[AnyLinear] | RoutedWeights
