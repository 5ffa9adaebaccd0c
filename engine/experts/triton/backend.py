"""Computes the experts of routed layers on GPUs by grouped products, which the host does not wait for.

Owns the addresses of the experts' weights. Each layer launches two kernels that arrange the rows and one for each of the
two products, whatever the router has chosen.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from graftwork.engine.experts.routes import HostRows, combined
from graftwork.engine.experts.triton.launch import (
    ExpertTable,
    TiledRows,
    TileGrid,
    arrange_launches,
    empty_rows,
    multiply_launch,
)
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import RoutedWeights
from graftwork.engine.model.projections import EXPERT_GROUPS


class TritonExperts:
    """Computes the experts of one layer. Their weights must be plain, and stay where they are."""

    uses_kernels: ClassVar[bool] = True

    def __init__(self, weights: RoutedWeights) -> None:
        groups = zip(*(expert.linears for expert in weights.experts), strict=True)
        self._num_experts = len(weights.experts)
        self._linears = [[linear for linear in group if isinstance(linear, Linear)] for group in groups]
        self._tables = {name: _table(linears) for name, linears in zip(EXPERT_GROUPS, self._linears, strict=True)}

    def arrange(self, chosen: torch.Tensor, weights: torch.Tensor) -> "DeviceRows":
        grid = TileGrid.of(chosen, self._num_experts)
        rows = empty_rows(grid, chosen.device)
        chosen = chosen.contiguous()
        for launch in arrange_launches(chosen, rows):
            launch.run()
        return DeviceRows(self._tables, rows, chosen, weights)


def _table(linears: Sequence[Linear]) -> ExpertTable:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return ExpertTable.of([linear.weight for linear in linears], biases or None)


class DeviceRows:
    """The rows of one step, arranged on the device."""

    def __init__(
        self, tables: dict[str, ExpertTable], rows: TiledRows, chosen: torch.Tensor, weights: torch.Tensor
    ) -> None:
        self._tables = tables
        self._rows = rows
        self._chosen = chosen
        self._weights = weights

    @property
    def tokens(self) -> torch.Tensor:
        return self._rows.tokens

    @cached_property
    def host(self) -> HostRows:
        experts = np.sort(self._chosen.cpu().numpy(), axis=None)
        return HostRows(np.arange(len(experts)), self._rows.tokens.cpu().numpy(), experts)

    def multiply(self, rows: torch.Tensor, group: str) -> torch.Tensor:
        table = self._tables[group]
        y = rows.new_empty(len(rows), table.out_features)
        multiply_launch(rows, y, table, self._rows).run()
        return y

    def combined(self, outputs: torch.Tensor) -> torch.Tensor:
        return combined(outputs, self._rows.places, self._weights)
