"""Shows torch's tensors to the compiled kernel, which reads memory by addresses (see cpu_kernel.py).

Owns nothing: the caller must keep each tensor alive as long as its address is used.
"""

import numpy as np
import torch

from graftwork.engine.lora.cpu_kernel import Matrix

LIKE = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
"""By dtype of the matrices, a value of the numpy type with which the kernel reads their elements."""


def matrix_of(rows: torch.Tensor) -> Matrix:
    """Returns a tensor [num_rows, columns] as the kernel's Matrix. Its rows may have any stride."""
    row_stride, element_stride = rows.stride()
    assert element_stride == 1
    return rows.data_ptr(), row_stride, rows.shape[1]


def address_of(matrix: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Returns the address of a matrix. The matrix must be contiguous, because an entry holds no strides."""
    assert matrix.shape == shape
    assert matrix.dtype == dtype
    assert matrix.is_contiguous()
    return matrix.data_ptr()
