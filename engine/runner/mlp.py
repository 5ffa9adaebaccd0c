"""Computes the MLP of a layer: dense, or routed to experts. The decoder calls both alike.

Owns the order of operations in an MLP. Never branches by architecture: ExpertsConfig says what a routed layer computes.
Invariant: the bits of a token's result do not depend on the other tokens.
"""

from collections.abc import Callable
from statistics import NormalDist
from typing import Protocol

import torch
from torch.nn import functional

from graftwork.engine.experts.backend import ExpertBackend
from graftwork.engine.experts.choice import choose
from graftwork.engine.lora.backend import StepLora
from graftwork.engine.model.batch_invariance import pad_rows, sigmoid
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.experts import ClampedSwiGlu, ExpertsConfig
from graftwork.engine.model.mlp_weights import DenseWeights, MlpWeights, RoutedWeights, SharedWeights
from graftwork.engine.model.projections import EXPERT_GROUPS
from graftwork.engine.runner.row_ops import RowOps

Activate = Callable[[torch.Tensor], torch.Tensor]
"""Computes RowOps.activate, or that of other gates."""


class Mlp(Protocol):
    """The MLP of one layer."""

    def __call__(self, x: torch.Tensor, lora: StepLora) -> torch.Tensor:
        """Returns [num_tokens, hidden] for x [num_tokens, hidden], adapters included."""
        ...


def build_mlp(config: ModelConfig, weights: MlpWeights, layer: int, rows: RowOps, experts: type[ExpertBackend]) -> Mlp:
    """Returns the MLP of one layer. `rows` computes activations."""
    if isinstance(weights, DenseWeights):
        share = config.sparsity[layer] if config.sparsity else 0.0
        return DenseMlp(weights, layer, SparseGates(share, rows).activate if share else rows.activate)
    assert config.experts is not None
    return RoutedMlp(config.experts, weights, layer, rows, experts)


class DenseMlp:
    """An MLP that is the same for every token. `prefix` begins the names of its groups of projections."""

    def __init__(self, weights: DenseWeights, layer: int, activate: Activate, prefix: str = "") -> None:
        self._weights = weights
        self._layer = layer
        self._activate = activate
        self._gate_up, self._down = f"{prefix}gate_up", f"{prefix}down"

    def __call__(self, x: torch.Tensor, lora: StepLora) -> torch.Tensor:
        gate_up = self._weights.gate_up(x)  # [num_tokens, 2 * intermediate]
        lora.add_deltas(gate_up, x, self._layer, self._gate_up)
        inner = self._activate(gate_up)  # [num_tokens, intermediate]
        output = self._weights.down(inner)
        lora.add_deltas(output, inner, self._layer, self._down)
        return output


class SparseGates:
    """Sets a share of each token's gates to zero before they are activated, by a threshold that fits a normal distribution.

    Source: transformers' Gemma3nTextMLP (Gaussian top-k).
    """

    def __init__(self, share: float, rows: RowOps) -> None:
        self._deviations = NormalDist().inv_cdf(share)
        self._rows = rows

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Computes RowOps.activate of what exceeds the threshold. Overwrites gate_up."""
        gate = gate_up[:, : gate_up.shape[1] // 2]
        exact = gate.float()
        variance, mean = torch.var_mean(exact, dim=1, correction=0, keepdim=True)
        gate.copy_(functional.relu(exact - (mean + variance.sqrt() * self._deviations)))
        return self._rows.activate(gate_up)


class RoutedMlp:
    """An MLP that sends each token to some of its experts, and to its shared expert if it has one."""

    def __init__(
        self, config: ExpertsConfig, weights: RoutedWeights, layer: int, rows: RowOps, experts: type[ExpertBackend]
    ) -> None:
        self._config = config
        self._weights = weights
        self._layer = layer
        self._rows = rows
        self._experts = experts(weights)
        self._shared = None if weights.shared is None else SharedMlp(weights.shared, layer, rows)

    def __call__(self, x: torch.Tensor, lora: StepLora) -> torch.Tensor:
        chosen, weights = choose(self._logits(x, lora), self._config.router, self._weights.correction)
        arranged = self._experts.arrange(chosen, weights)
        to_inner, to_output = EXPERT_GROUPS
        rows = x.index_select(0, arranged.tokens)  # [num_rows, hidden]
        gate_up = arranged.multiply(rows, to_inner)  # [num_rows, 2 * intermediate]
        if lora.changes_experts:
            lora.add_routed(gate_up, rows, self._layer, to_inner, arranged.host)
        inner = self._activate(gate_up)  # [num_rows, intermediate]
        output = arranged.multiply(inner, to_output)  # [num_rows, hidden]
        if lora.changes_experts:
            lora.add_routed(output, inner, self._layer, to_output, arranged.host)
        mixed = arranged.combined(output)  # [num_tokens, hidden]
        return mixed if self._shared is None else mixed + self._shared(x, lora)

    def _logits(self, x: torch.Tensor, lora: StepLora) -> torch.Tensor:
        """Returns the router's logits: fp32 [num_tokens, experts]."""
        router, num_experts = self._weights.router, self._config.shapes.num_experts
        if router.dtype == x.dtype:
            logits = router(x)  # [num_tokens, experts], at least 16 columns
            lora.add_deltas(logits, x, self._layer, "router")
            return logits[:, :num_experts].float()
        exact = router(pad_rows(x.to(router.dtype)))[: len(x)]
        deltas = x.new_zeros(exact.shape)
        lora.add_deltas(deltas, x, self._layer, "router")
        return (exact + deltas)[:, :num_experts]

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        clamped = self._config.clamped
        return self._rows.activate(gate_up) if clamped is None else clamped_swiglu(gate_up, clamped)


class SharedMlp:
    """The expert that sees every token, with its gate."""

    def __init__(self, weights: SharedWeights, layer: int, rows: RowOps) -> None:
        self._mlp = DenseMlp(weights.mlp, layer, rows.activate, prefix="shared_")
        self._gate = weights.gate
        self._layer = layer

    def __call__(self, x: torch.Tensor, lora: StepLora) -> torch.Tensor:
        output = self._mlp(x, lora)
        if self._gate is None:
            return output
        gate = self._gate(x)  # [num_tokens, 16], of which the first column is the gate
        lora.add_deltas(gate, x, self._layer, "shared_gate")
        return sigmoid(gate[:, :1]) * output


def clamped_swiglu(gate_up: torch.Tensor, rule: ClampedSwiGlu) -> torch.Tensor:
    """Returns [num_rows, intermediate] of gate_up [num_rows, 2 * intermediate], gates first. Rounds once, at the end."""
    gate, up = gate_up.float().chunk(2, dim=1)
    gate, up = gate.clamp(max=rule.limit), up.clamp(-rule.limit, rule.limit)
    return ((up + 1) * gate * sigmoid(rule.alpha * gate)).to(gate_up.dtype)
