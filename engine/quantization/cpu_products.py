"""Multiplies the rows of one step with quantised weights on a CPU, and makes weights dense there.

Owns the addresses and the shapes that the compiled kernel takes. Never chooses which rows it serves: linear.py does.
Importing this file loads numba, so import it only on CPUs.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch

from graftwork.engine.quantization.cpu_kernel import BLOCK, LANES, ROWS, expand, products, subtract_offsets
from graftwork.engine.quantization.weight import Codes, QuantizedWeight

_LIKE = {Codes.INT4: np.uint8(0), Codes.INT8: np.int8(0), Codes.FLOAT8: np.int16(0)}
"""By kind of codes, a value of the type that tells the kernel of it."""
_BETWEEN = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0), torch.float16: np.int16(0)}
"""By dtype of the scales, a value of the type that tells the kernel of it."""
_ONE_SCALE, _FOUR_SCALES = np.int32(1), np.int64(4)
_WHOLE_ROW_SHIFT = 62


class CpuProducts:
    """The products of one quantised weight."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self._weight = weight
        by_quarter = weight.group_size < BLOCK
        self._quarters = _FOUR_SCALES if by_quarter else _ONE_SCALE
        columns = BLOCK // 4 if by_quarter else BLOCK
        is_whole = weight.group_size >= weight.in_features
        self._shift = _WHOLE_ROW_SHIFT if is_whole else (weight.group_size // columns).bit_length() - 1
        self._offsets = None if weight.zeros is None else _offsets(weight)
        packed, scales = weight.packed, weight.scales
        assert packed.is_contiguous()
        assert scales.is_contiguous()
        self._matrix = (packed.data_ptr(), packed.shape[1], scales.data_ptr(), scales.shape[1], self._shift)

    @property
    def num_bytes(self) -> int:
        """Bytes besides those of the weight."""
        return 0 if self._offsets is None else self._offsets.nbytes

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x @ W.T in fp32, [num_rows, out_features], for x [num_rows, in_features]."""
        weight, num_rows = self._weight, len(x)
        padded_rows = num_rows if num_rows <= 1 else -(-num_rows // ROWS) * ROWS
        width = -(-weight.in_features // BLOCK) * BLOCK
        source = x if weight.order is None else x[:, weight.order]
        if (padded_rows, width) == tuple(x.shape):
            wide = source.float().contiguous()
        else:
            wide = torch.zeros(padded_rows, width)
            wide[:num_rows, : weight.in_features] = source
        y = torch.empty(padded_rows, weight.out_features)
        if num_rows:
            _on_threads(weight.out_features, lambda outputs: self._multiply(outputs, wide, y))
        return y[:num_rows]

    def dense(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the outputs [start, end) of the weight as QuantizedWeight.dense does. `dtype` is fp32 or bf16."""
        weight = self._weight
        address, row_bytes, _, _, _ = self._matrix
        values = torch.empty(end - start, row_bytes // weight.kind.block_bytes * BLOCK, dtype=dtype)
        zeros = np.empty((0, 0), np.int16) if weight.zeros is None else weight.zeros[start:end].numpy()
        target = values.numpy() if dtype == torch.float32 else values.view(torch.uint16).numpy()
        kinds = _LIKE[weight.kind], _BETWEEN[weight.scale_dtype], self._quarters
        scales = weight.scales[start:end].numpy()
        expand(address + start * row_bytes, row_bytes, scales, zeros, self._shift, target, *kinds)
        return weight.sorted_back(values[:, : weight.in_features])

    def _multiply(self, outputs: tuple[int, int], x: torch.Tensor, y: torch.Tensor) -> None:
        rows, result = x.numpy(), y.numpy()
        products(self._matrix, outputs, rows, result, _LIKE[self._weight.kind], self._quarters)
        if self._offsets is not None:
            group = min(self._weight.group_size, rows.shape[1])
            subtract_offsets(self._offsets.numpy(), outputs, group, rows, result)


def _offsets(weight: QuantizedWeight) -> torch.Tensor:
    """Returns scale * zero point, [out_features, groups padded to a multiple of LANES] fp32."""
    assert weight.zeros is not None
    offsets = weight.scales * weight.zeros
    return torch.nn.functional.pad(offsets, (0, -offsets.shape[1] % LANES)).contiguous()


def _on_threads(outputs: int, compute: Callable[[tuple[int, int]], None]) -> None:
    """Divides the outputs of a product between torch's threads. The bits of an output do not depend on it."""
    threads = min(torch.get_num_threads(), -(-outputs // _LEAST_OUTPUTS))
    if threads <= 1:
        compute((0, outputs))
        return
    size = -(-outputs // threads)
    pieces = [(start, min(start + size, outputs)) for start in range(0, outputs, size)]
    list(_pool().map(compute, pieces))


_LEAST_OUTPUTS = 256
"""The fewest outputs for which a thread is worth its wake-up."""


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="quantised-product")
