"""What a row's bits depend on in this machine's matrix products, and the rules that keep neighbours out of them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BatchInvariance:
    """Sizes from which on a product gives each row the same bits whatever stands beside it.

    Measured on x86 with torch 2.13 (benchmarks/row_bits.py): bf16 products always do; fp32 ones below four rows or
    sixteen columns take other code paths, and fp32 attention sums in an order that follows from the padded length.
    """

    min_rows: int
    min_columns: int

    @property
    def is_free(self) -> bool:
        """Whether any shape will do."""
        return self.min_rows <= 1

    @classmethod
    def of(cls, dtype: torch.dtype) -> "BatchInvariance":
        return cls(4, 16) if dtype == torch.float32 else cls(1, 1)
