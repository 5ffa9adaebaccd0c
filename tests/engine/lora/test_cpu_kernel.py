"""Tests of the CPU kernel against fp64, with NaN in everything that it must not read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from graftwork.engine.lora.cpu_kernel import FIRST_SLICE, SCRATCH_ROWS, SLICE_FIELDS, add_to_rows, narrow, widen
from graftwork.engine.lora.cpu_memory import LIKE
from tests.hypothesis_profiles import examples

LOWER_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
"""Nothing, next to nothing, just below a tie, a tie, just above one, nearly one more."""
UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
"""The most that one rounding of the output changes it, of itself."""
SUM_ERROR = 1e-5
"""And what the sums may be off, of the sum of their absolute terms."""


@pytest.mark.parametrize("lower", LOWER_HALVES)
def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even(lower: int) -> None:
    """Rounding to bfloat16 equals torch's for each of the 65,536 upper halves, and every NaN stays NaN."""
    bits = (np.arange(2**16, dtype=np.uint32) << 16) | np.uint32(lower)
    values = bits.view(np.float32)
    rounded = np.zeros(2**16, np.uint16)

    narrow(values, rounded)

    expected = torch.from_numpy(values).to(torch.bfloat16)
    actual = torch.from_numpy(rounded.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(actual.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(actual.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


def test_every_bfloat16_is_widened_exactly() -> None:
    """All 65,536 bfloat16 values are widened to the bits that torch gives."""
    widened = np.zeros(2**16, np.float32)

    widen(np.arange(2**16, dtype=np.uint16), widened)

    expected = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).float()
    assert torch.equal(torch.from_numpy(widened).view(torch.int32), expected.view(torch.int32))


@dataclass(frozen=True)
class AdapterFactors:
    """An adapter's factors of one group."""

    A: torch.Tensor  # [ranks of all slices, in_features]
    B: list[torch.Tensor | None]  # [ranks, columns] of each slice
    scales: torch.Tensor | None
    weight: float


@dataclass(frozen=True)
class KernelCall:
    """The input and output of a kernel call, and the adapters that it applies."""

    x: torch.Tensor
    y: torch.Tensor
    widths: tuple[int, ...]
    parts: list[AdapterFactors]


def poisoned(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the same matrix with NaN before and behind it, aligned to its elements only."""
    before, behind = 37, 3000
    memory = torch.full((before + matrix.numel() + behind,), torch.nan, dtype=matrix.dtype)
    return memory[before : before + matrix.numel()].view(matrix.shape).copy_(matrix)


def scattered(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the same rows as every other row of a wider matrix of NaN."""
    rows, columns = matrix.shape
    memory = torch.full((2 * rows + 1, columns + 5), torch.nan, dtype=matrix.dtype)
    memory[1::2, :columns] = matrix
    return memory[:, :columns]


def entry_of(part: AdapterFactors) -> list[int]:
    """Returns an adapter's entry as native_rows reads it."""
    entry = [part.A.data_ptr(), 0 if part.scales is None else part.scales.data_ptr(), len(part.A)]
    start = 0
    for B in part.B:
        entry += [0, 0, 0] if B is None else [B.data_ptr(), start, len(B)]
        start += 0 if B is None else len(B)
    return entry


def computed(call: KernelCall, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns y after the kernel has computed pairs of its rows. Asserts that the NaN around the rows stays."""
    x, y = scattered(call.x), scattered(call.y)
    untouched = y.clone()
    parts = [
        AdapterFactors(poisoned(one.A), [None if B is None else poisoned(B) for B in one.B], one.scales, one.weight)
        for one in call.parts
    ]
    table = np.zeros((len(parts) + 1, FIRST_SLICE + SLICE_FIELDS * len(call.widths)), np.int64)
    table[: len(parts)] = [entry_of(one) for one in parts]
    ends = np.cumsum(call.widths)
    rows: NDArray[np.int64] = np.array([(2 * a + 1, 2 * b + 1, 0, len(parts)) for a, b in pairs], np.int64)
    ranks = sum(len(one.A) for one in parts)
    scratch = np.full((SCRATCH_ROWS, max(ranks, x.shape[1], *call.widths)), np.nan, np.float32)

    add_to_rows(
        (y.data_ptr(), y.stride(0), y.shape[1]),
        (x.data_ptr(), x.stride(0), x.shape[1]),
        (table, np.stack([ends - call.widths, ends], axis=1).astype(np.int64)),
        (rows, np.arange(len(parts)), np.array([one.weight for one in parts], np.float32)),
        scratch,
        LIKE[y.dtype],
    )

    assert y[0::2].isnan().all()
    others = [2 * row + 1 for row in range(len(call.y)) if row not in {row for pair in pairs for row in pair}]
    assert torch.equal(y[others], untouched[others])
    return y[1::2]


def oracle(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns y in fp64, and the same sums over absolute values."""
    value, size = call.y.double(), call.y.double().abs()
    for one in call.parts:
        factor = one.weight * (torch.ones(1) if one.scales is None else one.scales).double()
        v = factor * (call.x.double() @ one.A.double().t())
        v_size = factor.abs() * (call.x.double().abs() @ one.A.double().abs().t())
        start = column = 0
        for width, B in zip(call.widths, one.B, strict=True):
            if B is not None:
                value[:, column : column + width] += v[:, start : start + len(B)] @ B.double()
                size[:, column : column + width] += v_size[:, start : start + len(B)] @ B.double().abs()
                start += len(B)
            column += width
    return value, size


@st.composite
def kernel_calls(draw: st.DrawFn) -> KernelCall:
    dtype = draw(st.sampled_from(list(LIKE)))
    in_features = draw(st.integers(1, 100))
    widths = tuple(draw(st.lists(st.integers(1, 80), min_size=1, max_size=3)))
    rows = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    parts = []
    for weight in draw(st.lists(st.sampled_from((1.0, 0.5, -1.3)), min_size=1, max_size=3)):
        ranks = [8 * draw(st.sampled_from((0, 1, 1, 2, 3, 16))) for _ in widths]
        scales = torch.rand(sum(ranks), generator=generator) if draw(st.booleans()) else None
        B = [matrix(rank, width) if rank else None for rank, width in zip(ranks, widths, strict=True)]
        parts.append(AdapterFactors(matrix(sum(ranks), in_features), B, scales, weight))
    return KernelCall(matrix(rows, in_features), matrix(rows, sum(widths)), widths, parts)


@given(kernel_calls())
@settings(max_examples=examples(150))
def test_rows_are_what_fp64_says_and_nothing_else_is_read(call: KernelCall) -> None:
    """Rows of any size, with one adapter or a mixture, equal fp64 within one rounding of the output."""
    rows = range(len(call.x))

    actual = computed(call, [*zip(rows[::2], [*rows[1::2], rows[-1]], strict=False)]).double()

    value, size = oracle(call)
    assert ((actual - value).abs() <= UNIT[call.y.dtype] * value.abs() + SUM_ERROR * size).all()


WIDE = KernelCall(
    torch.ones(5, 64), torch.zeros(5, 33), (33,), [AdapterFactors(torch.ones(8, 64), [torch.ones(8, 33)], None, 1.0)]
)


@given(kernel_calls())
@example(WIDE)
@settings(max_examples=examples(100))
def test_a_row_has_the_same_bits_in_either_place_of_a_pair_and_beside_any_other(call: KernelCall) -> None:
    """A row has the same bits alone, in either place of a pair, beside any other row, and in a second run."""
    rows = range(len(call.x))
    alone = computed(call, [(row, row) for row in rows])

    for first in rows:
        for second in rows:
            pair = computed(call, [(first, second)])
            assert torch.equal(pair[[first, second]], alone[[first, second]])
    assert torch.equal(computed(call, [(row, row) for row in reversed(rows)]), alone)
