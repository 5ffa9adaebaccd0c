import torch

from graftwork.engine.kernels.lora_segments import build_segments
from graftwork.engine.kernels.random_adapters import random_slots
from graftwork.engine.kernels.reference import add_lora, lora_delta


def test_the_delta_of_each_row_is_its_own_adapters(generator: torch.Generator) -> None:
    """Row by row in float64, without tiles, the same numbers come out; rows of the base get none."""
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
    """A bf16 output is the fp32 sum rounded at the end, and a base row keeps its very bits, NaN or not."""
    slots = random_slots([(8,)], 32, (16,), torch.bfloat16, generator)
    x = torch.randn(2, 32, generator=generator).bfloat16()
    y = torch.randn(2, 16, generator=generator).bfloat16()
    y[1] = float("nan")
    segments = build_segments([0, None])

    out = add_lora(x, y, segments, slots, (16,))

    assert torch.equal(out[0], (y[0].float() + lora_delta(x, segments, slots, (16,))[0]).bfloat16())
    assert torch.isnan(out[1]).all()
