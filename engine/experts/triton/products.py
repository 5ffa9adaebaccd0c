"""The products of one group of projections of all experts of a layer: with plain weights, or with codes.

Owns where the weights are. Weights and codes stay where they are: in the experts' linear layers.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from graftwork.engine.experts.triton.code_launch import CodeExpertProduct, CodeExpertTable
from graftwork.engine.experts.triton.float8_launch import Float8ExpertProduct
from graftwork.engine.experts.triton.launch import ExpertTable, TiledRows, multiply_launch
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import AnyLinear, RoutedWeights
from graftwork.engine.model.projections import EXPERT_GROUPS
from graftwork.engine.quantization.linear import QuantizedLinear
from graftwork.engine.quantization.triton.float8_launch import TILE_ROWS as FLOAT8_TILE_ROWS
from graftwork.engine.quantization.triton.products import CodeProducts, Float8Products


class GroupProducts(Protocol):
    """The products of rows with one group of projections, such as experts_down."""

    @property
    def out_features(self) -> int: ...

    @property
    def tile_rows(self) -> int | None:
        """The rows that all tiles must have; None if their number may follow from the step."""
        ...

    def multiply(self, x: torch.Tensor, y: torch.Tensor, rows: TiledRows) -> None:
        """Writes each row's product with the weight of its expert to y, [num_rows, out_features].

        x: [num_rows, in_features], in the order of `rows`.
        """
        ...


def layer_products(layer: RoutedWeights) -> dict[str, GroupProducts]:
    """Returns the products of a routed layer, by group. Raises ValueError, with the reason, if kernels cannot compute them."""
    groups = zip(*(expert.linears for expert in layer.experts), strict=True)
    found = {name: group_products(group) for name, group in zip(EXPERT_GROUPS, groups, strict=True)}
    if len({products.tile_rows for products in found.values()}) > 1:
        raise ValueError("rows are rounded for some of an expert's weights alone")
    return found


def group_products(linears: Sequence[AnyLinear]) -> GroupProducts:
    """Returns the products of one projection, which has a linear layer for each expert. Raises ValueError as above."""
    plain = [linear for linear in linears if isinstance(linear, Linear)]
    return PlainProducts(plain) if len(plain) == len(linears) else CodeGroupProducts(_code_layers(linears))


class PlainProducts:
    """The products with plain weights."""

    tile_rows: ClassVar[int | None] = None

    def __init__(self, linears: Sequence[Linear]) -> None:
        if any(linear.is_packed for linear in linears):
            raise ValueError("the weights are in the CPU's blocks")
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self._table = ExpertTable.of([linear.weight for linear in linears], biases or None)

    @property
    def out_features(self) -> int:
        return self._table.out_features

    def multiply(self, x: torch.Tensor, y: torch.Tensor, rows: TiledRows) -> None:
        multiply_launch(x, y, self._table, rows).run()


class CodeGroupProducts:
    """The products with codes. A linear layer has several parts if gate and up have different forms or orders."""

    def __init__(self, linears: Sequence[QuantizedLinear]) -> None:
        parts = _parts(linears)
        self._tables: list[CodeExpertTable] = []
        self._product = Float8ExpertProduct if parts[0][0].rounds_rows else CodeExpertProduct
        self.out_features = linears[0].out_features
        self.tile_rows = FLOAT8_TILE_ROWS if parts[0][0].rounds_rows else None
        start = 0
        for part in parts:
            end = start + part[0].table.out_features
            biases = [linear.bias[start:end] for linear in linears if linear.bias is not None]
            tables, orders = [one.table for one in part], [one.weight.order for one in part]
            self._tables.append(CodeExpertTable.of(tables, orders, biases or None))
            start = end

    def multiply(self, x: torch.Tensor, y: torch.Tensor, rows: TiledRows) -> None:
        start = 0
        for table in self._tables:
            end = start + table.out_features
            for launch in self._product(x, table, y[:, start:end], rows).launches():
                launch.run()
            start = end


def _code_layers(linears: Sequence[AnyLinear]) -> list[QuantizedLinear]:
    """Returns layers of which kernels read all codes. Raises ValueError if there is another one."""
    layers = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    if len(layers) < len(linears):
        raise ValueError("some of a layer's experts are quantised, and others are not")
    if not all(layer.has_kernels for layer in layers):
        raise ValueError("the kernels of quantised weights are not in use")
    if any(len(layer.kernels) != len(layers[0].kernels) for layer in layers):
        raise ValueError("the quantised weights of a layer's experts have different forms")
    if any(sum(one.weight.out_features for one in layer.kernels) != layer.out_features for layer in layers):
        raise ValueError("an expert is quantised in part")
    return layers


def _parts(linears: Sequence[QuantizedLinear]) -> list[list[CodeProducts | Float8Products]]:
    """Returns for each part of the layers its products of all experts. Raises ValueError if only some round rows."""
    parts = [
        [one for one in products if isinstance(one, CodeProducts | Float8Products)]
        for products in zip(*(linear.kernels for linear in linears), strict=True)
    ]
    if len({one.rounds_rows for part in parts for one in part}) > 1:
        raise ValueError("rows are rounded for some of an expert's weights alone")
    return parts
