"""The linear layers of the base model, in the memory layout that the machine multiplies fastest.

Owns the weight and the bias of one layer.
Invariant: both layouts give results with the same bits.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

_TYPICAL_ROWS = 32
"""A hint for the layout. A step may have any number of rows."""


class Linear:
    """y = x @ weight.T + bias.

    On CPUs with bf16 instructions, `pack` stores the weight in the blocks that oneDNN multiplies, instead of
    rearranging it in every product: twice as fast for one row, a quarter faster for 32 rows, with the same bits.
    """

    __slots__ = ("_packed", "_weight", "bias")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [out_features, in_features], bias: [out_features]."""
        self.bias = bias
        self._weight: torch.Tensor | None = weight
        self._packed: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features]; a copy if the weight is stored in blocks."""
        if self._weight is not None:
            return self._weight
        assert self._packed is not None
        return self._packed.to_dense()

    @property
    def out_features(self) -> int:
        stored = self._packed if self._weight is None else self._weight
        assert stored is not None
        return stored.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, in_features]; returns [num_rows, out_features]."""
        if self._packed is not None:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return product
        assert self._weight is not None
        return functional.linear(x, self._weight, self.bias)

    def rows(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the weight [end - start, in_features] and bias of outputs [start, end)."""
        return self.weight[start:end], None if self.bias is None else self.bias[start:end]

    def pack(self) -> None:
        """Stores the weight in blocks, if that is faster, and drops the plain copy."""
        if self._weight is None or not _pays(self._weight):
            return
        reorder: Callable[[torch.Tensor, int], torch.Tensor] = torch.ops.mkldnn._reorder_linear_weight
        self._packed = reorder(self._weight, _TYPICAL_ROWS)
        self._weight = None


def _pays(weight: torch.Tensor) -> bool:
    """Returns whether blocks are faster. fp32 products use MKL, which does not gain; torch without oneDNN has no
    blocks.
    """
    has_blocks = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and has_blocks
