"""Computes the experts of routed layers one after another, on any device: the host reads the router's choice.

Owns how long the run of an expert must be, so that the bits of a row do not depend on how many other rows chose the same
expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from graftwork.engine.experts.routes import HostRows, Routes
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.layers import Linear, usual_rows
from graftwork.engine.model.mlp_weights import AnyLinear, RoutedWeights
from graftwork.engine.model.projections import EXPERT_GROUPS
from graftwork.engine.quantization.linear import QuantizedLinear


class ExpertLoop:
    """Computes the experts of one layer, plain or quantised, one product for each expert that has rows."""

    uses_kernels: ClassVar[bool] = False

    def __init__(self, weights: RoutedWeights) -> None:
        groups = zip(*(expert.linears for expert in weights.experts), strict=True)
        self._linears: dict[str, tuple[AnyLinear, ...]] = dict(zip(EXPERT_GROUPS, groups, strict=True))
        self._step_kinds = weights.step_kinds
        first = weights.experts[0].gate_up
        every = [linear for linears in self._linears.values() for linear in linears]
        self._run_length = run_length(BatchInvariance.of(first.dtype, first.device), every)

    def arrange(self, chosen: torch.Tensor, weights: torch.Tensor) -> "LoopRows":
        routes = Routes.of(chosen, weights, self._run_length)
        return LoopRows(self._linears, routes, self._step_kinds.are_prompts(routes.host_tokens))


@dataclass(frozen=True, slots=True)
class LoopRows:
    """The rows of one step."""

    linears: dict[str, tuple[AnyLinear, ...]]
    """By group of projections, the layer of each expert of the model."""
    routes: Routes
    are_prompts: NDArray[np.bool_]  # [num_rows]
    """Quantised layers compute the rows of prompts in another way than decoding rows."""

    @property
    def tokens(self) -> torch.Tensor:
        return self.routes.tokens

    @property
    def host(self) -> HostRows:
        return self.routes.host

    def multiply(self, rows: torch.Tensor, group: str) -> torch.Tensor:
        linears = self.linears[group]
        return torch.cat(
            [
                _product(linears[run.expert], rows[run.start : run.end], self.are_prompts[run.start : run.end])
                for run in self.routes.runs
            ]
        )

    def combined(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.routes.combined(outputs)


def _product(linear: AnyLinear, rows: torch.Tensor, are_prompts: NDArray[np.bool_]) -> torch.Tensor:
    return linear.of_some(rows, are_prompts) if isinstance(linear, QuantizedLinear) else linear(rows)


def run_length(rules: BatchInvariance, linears: Sequence[AnyLinear]) -> Callable[[int], int]:
    """Returns a function that gives the length of a run of so many rows, with padding.

    With weights in blocks, lengths are those for which products are prepared anyway (see `usual_rows`). Quantised layers
    pad their products themselves.
    """
    plain = [linear for linear in linears if isinstance(linear, Linear)]
    is_packed = any(linear.is_packed for linear in plain)

    def padded(num_rows: int) -> int:
        if not plain:
            return num_rows
        least = rules.rows(num_rows)
        return usual_rows(least) if is_packed else least

    return padded
