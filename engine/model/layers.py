"""Computes the linear layers of a decoder.

Owns the weight and the bias of each linear layer. A weight is stored as a plain matrix, or in blocks if that is faster
on this machine. Invariant: results have the same bits in both forms.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

_TYPICAL_ROWS = 32
"""The number of rows for which oneDNN chooses the blocks. A step may have any number of rows."""


_packed_product: Callable[..., torch.Tensor] = (
    torch.ops.mkldnn._linear_pointwise.default if torch._C._has_mkldnn else functional.linear
)
"""oneDNN's product with a weight in blocks, and without the search for it among its overloads that costs each call 2 µs."""


class Linear:
    """Computes a linear layer: x @ weight.T + bias, for an input x of [num_rows, in_features].

    On CPUs with bf16 instructions, `pack` stores the weight in the blocks that oneDNN uses. Without this, oneDNN
    rearranges the weight for each product. With blocks a product is twice as fast for one row, and a quarter faster for
    32 rows. The results have the same bits.
    """

    __slots__ = ("_packed", "_rows_at_once", "_weight", "bias")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """`weight` is [out_features, in_features] and `bias` is [out_features]."""
        self.bias = bias
        self._rows_at_once: int | None = None
        self._weight: torch.Tensor | None = weight
        self._packed: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The weight, [out_features, in_features]. It is a copy if the weight is stored in blocks."""
        if self._weight is not None:
            return self._weight
        assert self._packed is not None
        return self._packed.to_dense()

    @property
    def is_packed(self) -> bool:
        """Whether the weight is stored in blocks, so that oneDNN prepares each product by its number of rows."""
        return self._packed is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the layer multiplies."""
        stored = self._packed if self._weight is None else self._weight
        assert stored is not None
        return stored.dtype

    @property
    def device(self) -> torch.device:
        """The device that holds the weight."""
        stored = self._packed if self._weight is None else self._weight
        assert stored is not None
        return stored.device

    @property
    def out_features(self) -> int:
        stored = self._packed if self._weight is None else self._weight
        assert stored is not None
        return stored.shape[0]

    @property
    def in_features(self) -> int:
        stored = self._packed if self._weight is None else self._weight
        assert stored is not None
        return stored.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight and the bias."""
        stored = self._packed if self._weight is None else self._weight
        assert stored is not None
        return stored.numel() * stored.dtype.itemsize + (0 if self.bias is None else self.bias.nbytes)

    def shares(self, tensor: torch.Tensor) -> bool:
        """Returns whether the weight is `tensor` itself, in the same memory."""
        return self._weight is not None and self._weight.data_ptr() == tensor.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [num_rows, out_features] for x [num_rows, in_features]."""
        if self._rows_at_once is not None and len(x) > self._rows_at_once:
            return torch.cat([self(rows) for rows in torch.split(x, self._rows_at_once)])
        if self._packed is not None:
            product: torch.Tensor = _packed_product(x, self._packed, self.bias, "none", [], "")
            return product
        assert self._weight is not None
        return functional.linear(x, self._weight, self.bias)

    def rows(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the weight and the bias of the outputs [start, end). The weight is [end - start, in_features]."""
        return self.weight[start:end], None if self.bias is None else self.bias[start:end]

    def limit_rows(self, rows_at_once: int | None) -> None:
        """Makes each product have at most so many rows, so that their bits do not depend on it (see BatchInvariance)."""
        self._rows_at_once = rows_at_once

    def pack(self) -> None:
        """Stores the weight in the blocks that oneDNN uses, and drops the plain weight.

        Does nothing if blocks are not faster on this machine.
        """
        if self._weight is None or not _pays(self._weight):
            return
        reorder: Callable[[torch.Tensor, int], torch.Tensor] = torch.ops.mkldnn._reorder_linear_weight
        self._packed = reorder(self._weight, _TYPICAL_ROWS)
        self._weight = None


def _pays(weight: torch.Tensor) -> bool:
    """Returns whether storing a weight in blocks makes products faster.

    It does not for fp32, because these products use MKL. torch has blocks only with oneDNN, on CPUs whose bf16 products
    oneDNN computes. A weight without rows, as ranks have in place of an output head, has no blocks.
    """
    if not weight.numel() or weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch._C._has_mkldnn:
        return False
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def usual_rows(num_rows: int) -> int:
    """Returns the next number of rows for which products are prepared anyway: the one to which a step should be padded.

    oneDNN prepares a product anew for each number of rows, and keeps the latest 1,024 of all sizes. That takes about
    0.6 ms, so a step of a new size on a small model takes several milliseconds longer. With this, steps of up to 2,048
    rows have 164 sizes, and at most 16 rows of a step are padding. The bits of the other rows do not change.
    """
    for most, multiple in ((16, 1), (32, 2), (64, 4), (128, 8)):
        if num_rows <= most:
            return -(-num_rows // multiple) * multiple
    return -(-num_rows // 16) * 16
