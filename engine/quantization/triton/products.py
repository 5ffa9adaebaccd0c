"""Multiplies the rows of a step with one quantised weight on a GPU, by kernels that read its codes.

Owns the weight as the kernels read it. All rows of a step take the kernels, those of prompts too. The host waits for
nothing, so steps by CUDA graphs hold such layers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch

from graftwork.engine.quantization.triton.float8_launch import Float8Product
from graftwork.engine.quantization.triton.launch import CodesTable, Product
from graftwork.engine.quantization.weight import Codes, QuantizedWeight


class CodeProducts:
    """The products of one quantised weight."""

    rounds_rows: ClassVar[bool] = False

    def __init__(self, weight: QuantizedWeight) -> None:
        self.weight = weight.for_kernels
        self.table = CodesTable.of(self.weight)
        """The weight as the kernels read it."""

    @property
    def num_bytes(self) -> int:
        """Bytes besides those of the weight."""
        return 0 if self.table.offsets is None else self.table.offsets.nbytes

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
        """Writes x @ W.T + bias to y, [num_rows, out_features], for x [num_rows, in_features]."""
        if not len(x):
            return
        source = x.contiguous() if self.weight.order is None else x.index_select(1, self.weight.order)
        for launch in Product(source, self.table, bias, y).launches():
            launch.run()


class Float8Products:
    """The products of one weight of FLOAT8 with rows that are rounded to FLOAT8 too."""

    rounds_rows: ClassVar[bool] = True

    def __init__(self, weight: QuantizedWeight) -> None:
        self.weight = replace(weight, scales=weight.scales.t().contiguous().t())
        self.table = CodesTable.of_float8(self.weight)
        """The weight as the kernels read it."""

    @property
    def num_bytes(self) -> int:
        """Bytes besides those of the weight."""
        return 0

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
        """Writes rounded(x) @ W.T + bias to y, [num_rows, out_features], for x [num_rows, in_features]."""
        if not len(x):
            return
        for launch in Float8Product(x.contiguous(), self.table, bias, y).launches():
            launch.run()


def products_of(*, rounds_rows: bool) -> Callable[[QuantizedWeight], CodeProducts | Float8Products]:
    """Returns what makes the products of a weight. With `rounds_rows`, those of FLOAT8 round the rows of x too."""

    def products(weight: QuantizedWeight) -> CodeProducts | Float8Products:
        return Float8Products(weight) if rounds_rows and weight.kind is Codes.FLOAT8 else CodeProducts(weight)

    return products
