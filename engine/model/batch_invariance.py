"""Keeps the bits of a row independent of the other rows: measures how large matrix products must be for it.

A library for matrix products picks another kernel for few rows or few columns, and kernels add up in different orders.
Which sizes share one order depends on the processor, so an engine measures its own at start, in some 50 ms. A row is
one token of a step.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional

from graftwork.engine.model.layers import Linear

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_ROWS = (*range(1, 18), 20, 24, 28, 31, 32, 33, 40, 47, 48, 63, 64)
_COLUMNS = (8, 16, 24, 32, 40, 48, 64)
_FEATURES = (56, 512, 1408)
_OUTPUTS = 256
_MANY = 128
"""The rows of the product whose bits all others must have. Prompts have more, and the same kernels."""
_VECTOR = 64
"""A multiple of the elements that torch computes at once on any CPU."""
BLOCK_ROWS = 8
"""The rows of one block in which plain torch applies adapters (a pack, see engine/lora/packs.py). Fewer rows waste less
work on other adapters' ranks; more rows fill the product better.
"""


@dataclass(frozen=True, slots=True)
class BatchInvariance:
    """The sizes of a matrix product for which the bits of one row do not depend on the other rows.

    Measured with torch 2.13: on x86 with AVX-512, products in bf16 may have any size, and products in fp32 need 4 rows
    and 16 columns. With AMX, products in bf16 need 34 rows or one, and products in fp32 need 13.
    In fp32 attention, the order of a sum depends on the number of keys after padding.
    """

    min_rows: int
    min_columns: int
    allows_one_row: bool = False
    """Whether one row alone has the same bits too, although `min_rows` is more."""
    attends_in_any_shape: bool = False
    """Whether attention over more keys that are masked leaves the bits of a row as they are."""

    def rows(self, num_rows: int) -> int:
        """Returns how many rows a product of `num_rows` needs: as many, or the fewest that do."""
        if num_rows == 1 and self.allows_one_row:
            return 1
        return max(num_rows, self.min_rows)

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device = _CPU) -> "BatchInvariance":
        """Returns what products in `dtype` need: measured once in each process on a CPU, assumed on other devices."""
        if device.type != "cpu":
            return cls(4, 16) if dtype == torch.float32 else cls(1, 1, attends_in_any_shape=True)
        return measured_rules(dtype)


@cache
def measured_rules(dtype: torch.dtype) -> BatchInvariance:
    rows = {size for x, weight in _operands(dtype) for size in _rows_that_matter(x, weight)}
    min_rows = _next_of(_ROWS, rows)
    few_rows = max(BLOCK_ROWS, min_rows)
    columns = {size for x, weight in _operands(dtype) for size in _columns_that_matter(x[:few_rows], weight)}
    if max(_ROWS) in rows or max(_COLUMNS) in columns:
        _log.warning(
            "batch_invariance_missing",
            extra={"dtype": str(dtype), "loss": "a row's last bits may depend on how many rows stand beside it"},
        )
    return BatchInvariance(
        min_rows,
        _next_of((1, *_COLUMNS), columns),
        allows_one_row=1 not in rows and all(_one_row_is_as_in_a_block(x, weight) for x, weight in _operands(dtype)),
        attends_in_any_shape=dtype != torch.float32,
    )


def _next_of(sizes: Sequence[int], bad: Collection[int]) -> int:
    """Returns the smallest of the sizes above all bad ones; the largest of all if that is bad too."""
    return next((size for size in sizes if size > max(bad, default=0)), sizes[-1])


def _rows_that_matter(x: torch.Tensor, weight: torch.Tensor) -> Iterator[int]:
    """Yields numbers of rows whose bits are not those that the rows have among many, as a plain or a packed product."""
    packed = Linear(weight)
    packed.pack()
    for product in (Linear(weight), packed) if packed.is_packed else (packed,):
        whole = product(x)
        yield from (size for size in _ROWS if not torch.equal(product(x[3 : 3 + size]), whole[3 : 3 + size]))


def _columns_that_matter(x: torch.Tensor, weight: torch.Tensor) -> Iterator[int]:
    """Yields numbers of columns whose bits are not those that the columns have among many."""
    matrix = weight.t().contiguous()
    whole = torch.mm(x, matrix)
    for size in _COLUMNS:
        if not torch.equal(torch.mm(x, matrix[:, 8 : 8 + size].contiguous()), whole[:, 8 : 8 + size]):
            yield size


def _one_row_is_as_in_a_block(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether one row has the bits that it has in a block of an adapter's product."""
    matrix = weight.t().contiguous().unsqueeze(0)
    block = torch.bmm(x[:BLOCK_ROWS].unsqueeze(0), matrix)
    return torch.equal(torch.bmm(x[:1].unsqueeze(0), matrix), block[:, :1])


def _operands(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields x [many rows, features] and a weight [outputs, features], for several numbers of features."""
    generator = torch.Generator().manual_seed(0)
    for features in _FEATURES:
        x = torch.randn(_MANY, features, generator=generator).to(dtype)
        yield x, torch.randn(_OUTPUTS, features, generator=generator).to(dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Returns the sigmoid of x [num_rows, columns]. The bits of a row do not depend on the number of rows.

    torch computes what is left over after whole vectors in another way, which rounds otherwise on some processors. So
    each row gets whole vectors.
    """
    missing = -x.shape[1] % _VECTOR
    return torch.sigmoid(functional.pad(x, (0, missing)))[:, : x.shape[1]] if missing else torch.sigmoid(x)


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x [num_rows, …] with rows of zeros at its end, as many as products in its dtype need."""
    missing = BatchInvariance.of(x.dtype, x.device).rows(len(x)) - len(x)
    return functional.pad(x, (0, 0, 0, missing)) if missing > 0 else x
