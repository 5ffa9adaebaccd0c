"""Keeps the bits of a row independent of the other rows: measures how large matrix products must be for it.

A library for matrix products picks another kernel for few rows or few columns, and kernels add up in different orders.
Which sizes share one order depends on the processor, so an engine measures its own at start, in 0.1 to 0.3 s. A row is
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
_FEW_ROWS = (*range(1, 7), 8, 10, 12, 14, 15, 16, 24, 31)
_SHARED_ROWS = 32
"""The rows of the product whose bits all others must have. Wide steps of a batch have as many."""
_MANY_ROWS = (37, 64, 200)
_COLUMNS = (8, 16, 24, 32, 40, 48, 64)
_SHAPES = ((128, 256), (480, 256), (512, 640), (1408, 256))
"""The (features, outputs) of the measured products. Products with fewer features are those of toys."""
_EXPONENTS = 4
"""Values differ in size by up to 2 ** 8."""
_VECTOR = 64
"""A multiple of the elements that torch computes at once on any CPU."""
BLOCK_ROWS = 8
"""The rows of one block in which plain torch applies adapters (a pack, see engine/lora/packs.py). Fewer rows waste less
work on other adapters' ranks; more rows fill the product better.
"""


@dataclass(frozen=True, slots=True)
class BatchInvariance:
    """The sizes of a matrix product for which the bits of one row do not depend on the other rows.

    Measured with torch 2.13 on x86 with AMX: products in fp32 need 16 rows; products in bf16 may have at most 32 if the
    input has more than 480 features. Without AMX, products in fp32 need 4 rows and 16 columns, in bf16 nothing.
    In fp32 attention, the order of a sum depends on the number of keys after padding.
    """

    min_rows: int
    min_columns: int
    allows_one_row: bool = False
    """Whether one row alone has the same bits too, although `min_rows` is more."""
    attends_in_any_shape: bool = False
    """Whether attention over more keys that are masked leaves the bits of a row as they are."""
    max_rows: int | None = None
    """The most rows of a product whose input has more than `narrow_features`. None if any number has the same bits."""
    narrow_features: int = 0

    def rows(self, num_rows: int) -> int:
        """Returns how many rows a product of `num_rows` needs: as many, or the fewest that do."""
        if num_rows == 1 and self.allows_one_row:
            return 1
        return max(num_rows, self.min_rows)

    def rows_at_once(self, features: int) -> int | None:
        """Returns the most rows of one product with an input of so many features. None if it may have any number."""
        return self.max_rows if features > self.narrow_features else None

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device = _CPU) -> "BatchInvariance":
        """Returns what products in `dtype` need: measured once in each process on a CPU, assumed on other devices."""
        if device.type != "cpu":
            return cls(4, 16) if dtype == torch.float32 else cls(1, 1, attends_in_any_shape=True)
        return measured_rules(dtype)


@cache
def measured_rules(dtype: torch.dtype) -> BatchInvariance:
    shapes = list(_operands(dtype))
    few = {size for x, weight in shapes for size in _rows_that_matter(x, weight, _FEW_ROWS)}
    too_wide = [x.shape[1] for x, weight in shapes if any(_rows_that_matter(x, weight, _MANY_ROWS))]
    narrow = [features for features, _ in _SHAPES if features < min(too_wide, default=0)]
    min_rows = _next_of((*_FEW_ROWS, _SHARED_ROWS), few)
    few_rows = max(BLOCK_ROWS, min_rows)
    columns = {size for x, weight in shapes for size in _columns_that_matter(x[:few_rows], weight)}
    if min_rows == _SHARED_ROWS or max(_COLUMNS) in columns:
        _log.warning(
            "batch_invariance_missing",
            extra={"dtype": str(dtype), "loss": "a row's last bits may depend on how many rows stand beside it"},
        )
    return BatchInvariance(
        min_rows,
        _next_of((1, *_COLUMNS), columns),
        allows_one_row=1 not in few and all(_one_row_is_as_in_a_block(x, weight) for x, weight in shapes),
        attends_in_any_shape=dtype != torch.float32,
        max_rows=_SHARED_ROWS if too_wide else None,
        narrow_features=max(narrow, default=0),
    )


def _next_of(sizes: Sequence[int], bad: Collection[int]) -> int:
    """Returns the smallest of the sizes above all bad ones; the largest of all if that is bad too."""
    return next((size for size in sizes if size > max(bad, default=0)), sizes[-1])


def _rows_that_matter(x: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int]) -> Iterator[int]:
    """Yields numbers of rows whose bits are not those that the rows have among 32, as a plain or a packed product."""
    packed = Linear(weight)
    packed.pack()
    for product in (Linear(weight), packed) if packed.is_packed else (packed,):
        shared = product(x[:_SHARED_ROWS])
        yield from (size for size in sizes if not torch.equal(product(x[:size])[:_SHARED_ROWS], shared[:size]))


def _columns_that_matter(x: torch.Tensor, weight: torch.Tensor) -> Iterator[int]:
    """Yields numbers of columns whose bits are not those that the columns have among many."""
    matrix = weight.t().contiguous()
    whole = torch.mm(x, matrix)
    for size in _COLUMNS:
        if size < len(weight) and not torch.equal(torch.mm(x, matrix[:, :size].contiguous()), whole[:, :size]):
            yield size


def _one_row_is_as_in_a_block(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether one row has the bits that it has in a block of an adapter's product."""
    matrix = weight.t().contiguous().unsqueeze(0)
    block = torch.bmm(x[:BLOCK_ROWS].unsqueeze(0), matrix)
    return torch.equal(torch.bmm(x[:1].unsqueeze(0), matrix), block[:, :1])


def _operands(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields x [rows, features] and a weight [outputs, features] for each shape.

    All sums are 0 but for rounding: each product has its negative at a random place. So every order of a sum leaves
    another rest, where with plain random numbers the result in bf16 would hide most of the differences.
    """
    generator = torch.Generator().manual_seed(0)

    def half(rows: int, features: int) -> torch.Tensor:
        sizes = torch.randint(-_EXPONENTS, _EXPONENTS + 1, (rows, features // 2), generator=generator)
        return torch.randn(rows, features // 2, generator=generator) * torch.exp2(sizes.float())

    for features, outputs in _SHAPES:
        x, weight = half(max(_MANY_ROWS), features), half(outputs, features)
        places = torch.randperm(features, generator=generator)
        yield torch.cat([x, x], dim=1)[:, places].to(dtype), torch.cat([weight, -weight], dim=1)[:, places].to(dtype)


def multiply(x: torch.Tensor, matrix: torch.Tensor, rows_at_once: int | None) -> torch.Tensor:
    """Returns x @ matrix, of at most `rows_at_once` rows at a time: [num_rows, columns]."""
    if rows_at_once is None or len(x) <= rows_at_once:
        return torch.mm(x, matrix)
    return torch.cat([torch.mm(rows, matrix) for rows in torch.split(x, rows_at_once)])


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
