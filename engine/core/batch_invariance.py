"""Defines how large a matrix product must be so that the bits of a token's result do not depend on the other tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BatchInvariance:
    """The smallest sizes of a matrix product for which the bits of one row do not depend on the other rows.

    A row is one token of a step. Measured on x86 with torch 2.13 (benchmarks/row_bits.py). Products in bf16 may have
    any size. Products in fp32 with fewer than 4 rows or 16 columns are computed in another way, which gives other bits.
    In fp32 attention, the order of a sum depends on the number of keys after padding.
    """

    min_rows: int
    min_columns: int

    @property
    def allows_any_shape(self) -> bool:
        """Whether the bits of a row never depend on the other rows, whatever the size of the matrix product."""
        return self.min_rows <= 1

    @classmethod
    def of(cls, dtype: torch.dtype) -> "BatchInvariance":
        return cls(4, 16) if dtype == torch.float32 else cls(1, 1)
