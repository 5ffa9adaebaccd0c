"""Defines how large a matrix product must be so that each of its rows has the same bits in every batch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BatchInvariance:
    """The smallest sizes of a matrix product for which the bits of one row do not depend on the other rows.

    Measured on x86 with torch 2.13 (benchmarks/row_bits.py). Products in bf16 are always invariant. Products in fp32
    with fewer than 4 rows or 16 columns take other code paths, which give other bits. The order of fp32 sums in
    attention depends on the padded length.
    """

    min_rows: int
    min_columns: int

    @property
    def allows_any_shape(self) -> bool:
        """Whether a row of a matrix product has the same bits in every batch, even in the smallest product."""
        return self.min_rows <= 1

    @classmethod
    def of(cls, dtype: torch.dtype) -> "BatchInvariance":
        return cls(4, 16) if dtype == torch.float32 else cls(1, 1)
