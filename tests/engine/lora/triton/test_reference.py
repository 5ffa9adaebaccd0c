"""Tests of the torch reference of the kernels."""

import torch

from graftwork.engine.lora.triton.random_adapters import random_slots, with_random_columns
from graftwork.engine.lora.triton.reference import add_lora, lora_delta
from graftwork.engine.lora.triton.tiles import build_segments


def test_the_delta_of_each_row_is_its_own_adapters(generator: torch.Generator) -> None:
    """The reference equals a float64 computation row by row, and base rows get no delta."""
    widths = (24, 8, 8)
    owners = [1, None, 0, 2, 1, None, 2, 2] * 5
    slots = random_slots([(3, 8, 1), (16, 0, 4), (0, 0, 0)], 48, widths, torch.float32, generator)
    x = torch.randn(len(owners), 48, generator=generator)

    delta = lora_delta(x, build_segments(owners), slots, widths)

    expected = torch.zeros(len(owners), sum(widths), dtype=torch.float64)
    for row, owner in enumerate(owners):
        parts = [torch.zeros(width, dtype=torch.float64) for width in widths]
        for index, pair in enumerate(slots[owner] if owner is not None else ()):
            if pair is not None:
                parts[index] = pair.scale * (pair.B.double() @ (pair.A.double() @ x[row].double()))
        expected[row] = torch.cat(parts)
    torch.testing.assert_close(delta.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_sum_is_rounded_once(generator: torch.Generator) -> None:
    """A bf16 output is the fp32 sum rounded once, and a base row keeps its bits, NaN included."""
    slots = random_slots([(8,)], 32, (16,), torch.bfloat16, generator)
    x = torch.randn(2, 32, generator=generator).bfloat16()
    y = torch.randn(2, 16, generator=generator).bfloat16()
    y[1] = float("nan")
    segments = build_segments([0, None])

    out = add_lora(x, y, segments, slots, (16,))

    assert torch.equal(out[0], (y[0].float() + lora_delta(x, segments, slots, (16,))[0]).bfloat16())
    assert torch.isnan(out[1]).all()


def test_a_mixture_is_the_weighted_sum(generator: torch.Generator) -> None:
    """A mixture's delta is the weighted sum of its adapters' deltas."""
    slots = random_slots([(8, 3), (4, 0)], 32, (16, 8), torch.float32, generator)
    x = torch.randn(3, 32, generator=generator)
    first = lora_delta(x, build_segments([0] * 3), slots, (16, 8))
    second = lora_delta(x, build_segments([1] * 3), slots, (16, 8))

    mixed = lora_delta(x, build_segments([((0, 0.5), (1, -2.0)), None, ((1, 3.0),)]), slots, (16, 8))

    torch.testing.assert_close(mixed[0], 0.5 * first[0] - 2 * second[0])
    torch.testing.assert_close(mixed[2], 3 * second[2])
    assert not mixed[1].any()


def test_columns_change_the_base_and_not_the_delta(generator: torch.Generator) -> None:
    """y is scaled and shifted by column before the delta is added, and other rows do not change."""
    (pairs,) = random_slots([(8, 0)], 32, (16, 8), torch.float32, generator)
    slots = [with_random_columns(pairs, (16, 8), generator)]
    x, y = torch.randn(2, 32, generator=generator), torch.randn(2, 24, generator=generator)
    segments = build_segments([None, 0])

    out = add_lora(x, y, segments, slots, (16, 8))

    scale = torch.cat([entry.column_scale for entry in slots[0] if entry.column_scale is not None])
    shift = torch.cat([entry.column_shift for entry in slots[0] if entry.column_shift is not None])
    torch.testing.assert_close(out[1], scale * y[1] + shift + lora_delta(x, segments, [pairs], (16, 8))[1])
    assert torch.equal(out[0], y[0])
