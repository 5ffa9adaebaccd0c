"""Tests the CPU kernel at the engine's start, before any request uses it.

The test checks three things: the kernel compiles, its results are right, and the result for a token does not depend on
the other tokens of the step. The kernel computes tokens in pairs. numba compiles for the processor of this machine, and
the compiler chooses the order of sums. So only a test can show whether a token gets the same bits in both places of a
pair.

The test also compiles the kernel, or loads it from numba's cache, so that no request waits for that.
"""

import torch

from graftwork.engine.lora.cpu_backend import AddressTables, CpuLora
from graftwork.engine.lora.packs import AdapterMix, PackCache
from graftwork.engine.lora.resident_adapter import GroupDelta, ResidentAdapter, SliceDelta, compacted
from graftwork.engine.lora.segments import Segment
from graftwork.engine.lora.torch_backend import TorchLora
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.projections import GroupShape

_SEED = 20262
_KEY = (0, "trial")
_IN_FEATURES = 77
_WIDTHS = (131, 29)
"""Output widths of the slices. They are no multiples of the vector length, so the last elements of a row are tested
too.
"""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""The largest error, relative to the largest value: one rounding of the output, and a margin for another order of the
sums.
"""

_SCALE = 1.7


def why_cpu_kernel_fails(dtype: torch.dtype) -> str | None:
    """Returns what is wrong with the compiled CPU kernel on this machine, as a text for the log, or None.

    Checks that the results are right, and that a token gets the same bits beside any other token.
    """
    try:
        return _failure(dtype)
    except Exception as error:  # noqa: BLE001 - a compiler and its libraries fail in ways of their own
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        return f"{type(error).__name__}: {first_line}"


def _failure(dtype: torch.dtype) -> str | None:
    generator = torch.Generator().manual_seed(_SEED)
    adapters = [_adapter(str(rank), rank, dtype, generator) for rank in (8, 24)]
    rules = BatchInvariance.of(dtype)
    tables = AddressTables({_KEY: GroupShape(_IN_FEATURES, _WIDTHS)}, dtype)
    lora = CpuLora(tables, TorchLora(PackCache(0, rules.min_columns), rules))
    for adapter in adapters:
        lora.place(adapter)
    mixes = [AdapterMix(((adapters[0], 1.0),)), AdapterMix(((adapters[0], 0.5), (adapters[1], -0.25)))]
    x = torch.randn(4, _IN_FEATURES, generator=generator).to(dtype)
    y = torch.randn(4, sum(_WIDTHS), generator=generator).to(dtype)
    for mix in mixes:
        alone = torch.cat([_applied(lora, mix, y[row : row + 1], x[row : row + 1]) for row in range(4)])
        error = _error(alone, y.double() + _delta(mix, x.double()))
        if not error <= _TOLERANCE[dtype]:
            return f"results differ from plain torch by {error:.3g} of the largest"
        together = _applied(lora, mix, y, x)
        turned = _applied(lora, mix, y.flip(0), x.flip(0)).flip(0)
        if not (torch.equal(together, alone) and torch.equal(turned, alone)):
            return "a row's result depends on its neighbour"
    return None


def _adapter(digest: str, rank: int, dtype: torch.dtype, generator: torch.Generator) -> ResidentAdapter:
    """Returns an adapter of two slices with the same rank, with scales."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator)
        return values.mul_(columns**-0.5).to(dtype)

    ends = (_WIDTHS[0], sum(_WIDTHS))
    slices = [
        SliceDelta(matrix(rank, width), place * rank, (place + 1) * rank, end - width, end, _SCALE)
        for place, (width, end) in enumerate(zip(_WIDTHS, ends, strict=True))
    ]
    delta = GroupDelta(matrix(2 * rank, _IN_FEATURES), torch.full((2 * rank,), _SCALE), tuple(slices))
    return compacted(digest, {_KEY: delta}, None, None, None)


def _applied(lora: CpuLora, mix: AdapterMix, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns the kernel's y for rows that all use the same mix."""
    rows = tuple(range(len(x)))
    result = y.clone()
    lora.step([Segment(0, len(x), mix, decoding=rows)], len(x)).add_deltas(result, x, *_KEY)
    return result


def _delta(mix: AdapterMix, x: torch.Tensor) -> torch.Tensor:
    """Returns the delta of a mix, in fp64: [rows, sum of widths]."""
    total = torch.zeros(len(x), sum(_WIDTHS), dtype=torch.float64)
    for adapter, weight in mix.parts:
        delta = adapter.deltas[_KEY]
        assert delta.scales is not None
        v = x @ delta.A.double().t() * delta.scales.double() * weight
        for part in delta.slices:
            total[:, part.out_start : part.out_end] += v[:, part.rank_start : part.rank_end] @ part.B.double()
    return total


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()
