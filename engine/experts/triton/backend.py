"""Computes the experts of routed layers on GPUs by grouped products, which the host does not wait for.

Each layer launches two kernels that arrange the rows and one for each of the two products, whatever the router has chosen.
Codes with zero points, with sorted columns or in several parts need some more, but no fewer or more for another choice.
"""

from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from graftwork.engine.experts.routes import HostRows, combined
from graftwork.engine.experts.triton.launch import TiledRows, TileGrid, arrange_launches, empty_rows
from graftwork.engine.experts.triton.products import GroupProducts, layer_products
from graftwork.engine.model.mlp_weights import RoutedWeights


class TritonExperts:
    """Computes the experts of one layer. Their weights are plain, or codes that kernels read; they must stay where they are.

    Raises ValueError, with the reason, if the kernels cannot compute them.
    """

    uses_kernels: ClassVar[bool] = True

    def __init__(self, weights: RoutedWeights) -> None:
        self._weights = weights  # whose addresses the products have
        self._products = layer_products(weights)
        self._tile_rows = next(iter(self._products.values())).tile_rows

    def arrange(self, chosen: torch.Tensor, weights: torch.Tensor) -> "DeviceRows":
        grid = TileGrid.of(chosen, len(self._weights.experts), self._tile_rows)
        rows = empty_rows(grid, chosen.device)
        chosen = chosen.contiguous()
        for launch in arrange_launches(chosen, rows):
            launch.run()
        return DeviceRows(self._products, rows, chosen, weights)


class DeviceRows:
    """The rows of one step, arranged on the device."""

    def __init__(
        self, products: dict[str, GroupProducts], rows: TiledRows, chosen: torch.Tensor, weights: torch.Tensor
    ) -> None:
        self._products = products
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
        products = self._products[group]
        y = rows.new_empty(len(rows), products.out_features)
        products.multiply(rows, y, self._rows)
        return y

    def combined(self, outputs: torch.Tensor) -> torch.Tensor:
        return combined(outputs, self._rows.places, self._weights)
