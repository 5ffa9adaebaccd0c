"""Holds the weights of a layer's MLP: a dense one, or a router with its experts.

Each linear layer is plain or quantised by itself, those of experts too. Never reads a file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from graftwork.engine.model.layers import Linear
from graftwork.engine.quantization.linear import LinearWeight, QuantizedLinear, StepKinds

AnyLinear = Linear | QuantizedLinear
"""A linear layer with plain weights or with quantised ones."""


def joined_linear(
    weights: Sequence[LinearWeight], bias: torch.Tensor | None, dtype: torch.dtype, kinds: StepKinds
) -> AnyLinear:
    """Joins the weights of projections with the same input into one layer. Plain ones are of `dtype`, the model's."""
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(plain) < len(weights):
        return QuantizedLinear(weights, bias, dtype, kinds)
    return Linear(plain[0] if len(plain) == 1 else torch.cat(plain), bias)


def placed(weight: LinearWeight, device: torch.device, dtype: torch.dtype) -> LinearWeight:
    """Returns a weight on the device. A plain one is of `dtype`."""
    return weight.to(device, dtype) if isinstance(weight, torch.Tensor) else weight.to(device)


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """The weights of an MLP, or of one expert. Gate and up are joined."""

    gate_up: AnyLinear  # [2 * intermediate, hidden]
    down: AnyLinear  # [hidden, intermediate]

    @property
    def linears(self) -> tuple[AnyLinear, ...]:
        return self.gate_up, self.down

    @property
    def others(self) -> tuple[torch.Tensor, ...]:
        """The tensors that belong to no linear layer."""
        return ()

    def group(self, name: str) -> AnyLinear:
        return {"gate_up": self.gate_up, "down": self.down}[name]


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """The weights of the expert that sees every token."""

    mlp: DenseWeights
    gate: Linear | None  # [16, hidden]: one output, and outputs of zeros (see projections.stored_width)


@dataclass(frozen=True, slots=True)
class RoutedWeights:
    """The weights of a routed layer."""

    router: Linear  # [experts, hidden], at least 16 outputs; fp32 where the router multiplies in fp32
    correction: torch.Tensor | None  # [experts] fp32, added to the scores for the choice alone
    experts: tuple[DenseWeights, ...]
    shared: SharedWeights | None
    step_kinds: StepKinds = field(default_factory=StepKinds)
    """Which rows of the step decode, for quantised experts."""

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


MlpWeights = DenseWeights | RoutedWeights
