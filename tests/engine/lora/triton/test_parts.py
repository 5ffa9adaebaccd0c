"""Tests of rows with several adapters by weight, and of columns that are scaled and shifted."""

from types import ModuleType

import pytest
import torch
from torch.nn import functional

from graftwork.engine.lora.triton.random_adapters import random_slots, with_random_columns
from graftwork.engine.lora.triton.reference import add_lora
from graftwork.engine.lora.triton.slice_table import SliceTerms, SlotPairs, build_table
from graftwork.engine.lora.triton.tiles import RowOwner, SegmentCapacity, build_segments
from tests.engine.lora.triton.fused_layer import (
    IN_FEATURES,
    OWNERS,
    SPLIT_PLAN,
    WAYS,
    WIDTHS,
    FusedLayer,
    assert_bits_equal,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.parametrize("tile_rows", WAYS, ids=["row-wise", "grouped"]),
]

MIXTURE = ((2, 0.5), (0, 1.5), (1, -0.25), (0, 0.125))


def test_mixtures_and_single_adapters_share_a_batch(lora_matmul: ModuleType, tile_rows: int) -> None:
    """Mixtures of two to four adapters, single adapters and base rows in one batch each get their own sum."""
    layer = FusedLayer()
    owners: list[RowOwner | None] = [MIXTURE, 1, None, MIXTURE[:2], ((2, 0.75),), MIXTURE, MIXTURE[1:], MIXTURE[:2]]
    expected = add_lora(layer.x, layer.y, build_segments(owners), layer.slots, WIDTHS)

    actual = layer.run(lora_matmul, owners, tile_rows)

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_mixture_is_rounded_once(lora_matmul: ModuleType, tile_rows: int) -> None:
    """A mixture of four adapters in bf16 is off the fp32 sum by one rounding."""
    layer = FusedLayer(torch.bfloat16)
    owners = [MIXTURE] * 2 + [None] * 6
    oracle = add_lora(layer.x, layer.y.float(), build_segments(owners), layer.slots, WIDTHS)

    actual = layer.run(lora_matmul, owners, tile_rows).float()

    off = (actual - oracle).abs()
    assert (off <= oracle.abs() * 2**-7 + 1e-4).all()


def test_a_mixtures_bits_are_its_own(lora_matmul: ModuleType, tile_rows: int) -> None:
    """A mixture has the same bits in every run and batch, and a mixture of one has the bits of that adapter."""
    layer = FusedLayer()
    among_some = layer.run(lora_matmul, [MIXTURE, ((1, 1.0),), 0, 1, None, None, 2, 2], tile_rows)
    alone = layer.run(lora_matmul, [MIXTURE, 1, *[None] * 6], tile_rows)
    layer.x, layer.y = layer.x.flip(0), layer.y.flip(0)

    flipped = layer.run(lora_matmul, [None, None, None, *[MIXTURE[:3]] * 3, 1, MIXTURE], tile_rows)

    assert_bits_equal(alone[:2], among_some[:2])
    assert_bits_equal(flipped[[7, 6]], among_some[:2])


def test_no_part_beyond_a_rows_own_is_touched(lora_matmul: ModuleType, tile_rows: int) -> None:
    """Scratch and slots of parts that a row does not have are neither read nor written."""
    layer = FusedLayer()
    poison = [pair and type(pair)(pair.A * float("nan"), pair.B, 1.0) for pair in layer.slots[0]]
    table = build_table([poison, *layer.slots[1:]], WIDTHS, IN_FEATURES, torch.float32, "cpu")
    owners = [((1, 0.5), (2, 0.5)), 1, 2, *[None] * 5]
    segments = build_segments(owners, capacity=SegmentCapacity(8, 3, tile_rows, has_mixtures=True))
    expected = add_lora(layer.x, layer.y, segments, layer.slots, WIDTHS)
    planes = lora_matmul.empty_planes(table, segments, SPLIT_PLAN, rank=64).fill_(float("nan"))

    lora_matmul.lora_shrink(layer.x, planes, table, segments, SPLIT_PLAN)
    lora_matmul.lora_expand(planes, layer.y, table, segments, SPLIT_PLAN, has_columns=False)

    torch.testing.assert_close(layer.y, expected, rtol=1e-5, atol=1e-5)
    by_part = planes.view(*planes.shape[:2], 4, -1)  # [planes, positions, parts, ranks of all slices]
    assert by_part[:, 0, :2].isfinite().any(dim=-1).all()
    assert by_part[:, 3:].isnan().all()
    assert by_part[:, :, 2:].isnan().all()
    assert by_part[:, 1:3, 1:].isnan().all()


def test_columns_are_scaled_and_shifted_before_the_delta_is_added(lora_matmul: ModuleType, tile_rows: int) -> None:
    """Rows whose adapter has scales, shifts, both or none equal the reference."""
    layer = FusedLayer()
    generator = torch.Generator().manual_seed(3)
    shift_only = [SliceTerms(column_shift=torch.randn(width, generator=generator)) for width in WIDTHS]
    slots: list[SlotPairs] = [with_random_columns(layer.slots[0], WIDTHS, generator), shift_only, layer.slots[2]]
    layer.table = build_table(slots, WIDTHS, IN_FEATURES, torch.float32, "cpu")
    assert layer.table.has_columns
    expected = add_lora(layer.x, layer.y, build_segments(OWNERS), slots, WIDTHS)

    actual = layer.run(lora_matmul, OWNERS, tile_rows)

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_without_columns_keeps_its_bits_beside_one_with(lora_matmul: ModuleType, tile_rows: int) -> None:
    """A row without columns has the same bits beside rows with columns."""
    layer = FusedLayer()
    expected = layer.run(lora_matmul, OWNERS, tile_rows)
    layer.table.replace_slot(0, with_random_columns(layer.slots[0], WIDTHS, torch.Generator().manual_seed(3)))

    actual = layer.run(lora_matmul, OWNERS, tile_rows)

    others = [row for row, owner in enumerate(OWNERS) if owner != 0]
    assert_bits_equal(actual[others], expected[others])


def test_columns_serve_dora(lora_matmul: ModuleType, tile_rows: int) -> None:
    """With DoRA's columns the kernels give x times the renormalised weight plus the bias."""
    generator = torch.Generator().manual_seed(5)
    pair = random_slots([(8,)], 96, (80,), torch.float32, generator)[0][0]
    assert pair is not None
    W, bias = torch.randn(80, 96, generator=generator), torch.randn(80, generator=generator)
    magnitude = 1 + torch.rand(80, generator=generator)
    x = torch.randn(5, 96, generator=generator)
    adapted = W + pair.scale * pair.B @ pair.A
    expected = functional.linear(x, magnitude[:, None] * functional.normalize(adapted, dim=1), bias)
    column_scale = magnitude / adapted.norm(dim=1)
    scaled = type(pair)(pair.A, pair.B * column_scale[:, None], pair.scale)
    table = build_table(
        [[SliceTerms(scaled, column_scale, bias * (1 - column_scale))]], (80,), 96, torch.float32, "cpu"
    )
    y = functional.linear(x, W, bias)

    lora_matmul.apply_lora(x, y, table, build_segments([0] * 5, tile_rows=tile_rows))

    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
