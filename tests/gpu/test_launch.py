"""Tests of the compiled kernels against the torch reference, at the sizes of a real model."""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from graftwork.engine.lora.triton.launch_plan import ROW_WISE, LaunchBounds, LaunchShape, plan_for
from graftwork.engine.lora.triton.random_adapters import random_slots, with_random_columns
from graftwork.engine.lora.triton.reference import add_lora
from graftwork.engine.lora.triton.slice_table import SlotPairs, build_table
from graftwork.engine.lora.triton.tiles import RowOwner, SegmentCapacity, build_segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
IN_FEATURES = 4096
WIDTHS = (4096, 1024, 1024)
RANKS = ((8, 8, 8), (16, 0, 16), (64, 3, 24), (128, 1, 12))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WAYS = pytest.mark.parametrize("tile_rows", [ROW_WISE, 16], ids=["row-wise", "grouped"])


@pytest.fixture
def lora_matmul() -> ModuleType:
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.lora.triton import launch as lora_matmul

    return lora_matmul


class FusedLayer:
    """A fused qkv layer with four adapters."""

    def __init__(
        self, num_rows: int, dtype: torch.dtype, in_features: int = IN_FEATURES, widths: Sequence[int] = WIDTHS
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.slots = random_slots(RANKS, in_features, widths, dtype, generator)
        self.table = build_table(self.slots, widths, in_features, dtype, DEVICE)
        self.x = torch.randn(num_rows, in_features, generator=generator).to(DEVICE, dtype)
        self.y = torch.randn(num_rows, sum(widths), generator=generator).to(DEVICE, dtype)
        self.widths = widths


def owners_of(num_rows: int) -> list[int | None]:
    """Rows of four adapters and of the base, unevenly."""
    return [None if row % 7 == 3 else (5 * row + row // 3) % 4 for row in range(num_rows)]


def run(lora_matmul: ModuleType, layer: FusedLayer, owners: Sequence[int | None], tile_rows: int) -> torch.Tensor:
    y = layer.y.clone()
    capacity = SegmentCapacity(len(owners), len(RANKS), tile_rows)
    lora_matmul.apply_lora(layer.x, y, layer.table, build_segments(owners, DEVICE, capacity))
    return y


@WAYS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 33, 700])
@pytest.mark.parametrize(("in_features", "widths"), [(IN_FEATURES, WIDTHS), (1000, (520, 72, 36))])
def test_the_kernels_compute_what_the_oracle_does(
    lora_matmul: ModuleType,
    dtype: torch.dtype,
    num_rows: int,
    in_features: int,
    widths: Sequence[int],
    tile_rows: int,
) -> None:
    """Decode and prefill rows of aligned and unaligned sizes are one rounding from the fp32 sum."""
    layer = FusedLayer(num_rows, dtype, in_features, widths)
    segments = build_segments(owners_of(num_rows), DEVICE, tile_rows=tile_rows)
    expected = add_lora(layer.x.cpu(), layer.y.cpu(), build_segments(owners_of(num_rows)), layer.slots, widths)

    lora_matmul.apply_lora(layer.x, layer.y, layer.table, segments)

    rounding = {torch.float32: 1e-4, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(layer.y.cpu(), expected, rtol=rounding, atol=1e-3)


@WAYS
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixtures_and_columns_are_the_oracles(lora_matmul: ModuleType, dtype: torch.dtype, tile_rows: int) -> None:
    """Rows of up to four adapters, beside rows with columns, equal the reference."""
    layer = FusedLayer(48, dtype)
    columns = with_random_columns(layer.slots[0], WIDTHS, torch.Generator().manual_seed(3))
    slots: list[SlotPairs] = [columns, *layer.slots[1:]]
    table = build_table(slots, WIDTHS, IN_FEATURES, dtype, DEVICE)
    mixture = ((1, 0.5), (3, 0.25), (2, -1.0), (1, 0.125))
    kinds: list[RowOwner | None] = [0, None, mixture, mixture[:2], 3]
    owners = [kinds[row % 5] for row in range(48)]
    expected = add_lora(layer.x.cpu(), layer.y.cpu(), build_segments(owners), slots, WIDTHS)

    lora_matmul.apply_lora(layer.x, layer.y, table, build_segments(owners, DEVICE, tile_rows=tile_rows))

    rounding = {torch.float32: 1e-4, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(layer.y.cpu(), expected, rtol=rounding, atol=2e-3)


@WAYS
@pytest.mark.parametrize("dtype", DTYPES)
def test_sixteen_bit_weights_lose_nothing_on_the_way(
    lora_matmul: ModuleType, dtype: torch.dtype, tile_rows: int
) -> None:
    """The intermediate v is not rounded to the weights' dtype between the kernels."""
    layer = FusedLayer(48, dtype)
    y = layer.y.float()
    expected = add_lora(layer.x.cpu(), y.cpu(), build_segments(owners_of(48)), layer.slots, WIDTHS)

    lora_matmul.apply_lora(layer.x, y, layer.table, build_segments(owners_of(48), DEVICE, tile_rows=tile_rows))

    torch.testing.assert_close(y.cpu(), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_grouped_row_has_the_same_bits_in_every_batch(lora_matmul: ModuleType, dtype: torch.dtype) -> None:
    """A grouped row has the same bits alone or among 1,500 rows, with tiles of either size and any spans."""
    layer = FusedLayer(1500, dtype)
    owners = owners_of(1500)
    among_many = run(lora_matmul, layer, owners, tile_rows=32)

    for row in (0, 1, 2, 5, 1499):
        y = layer.y[row : row + 1].clone()
        segments = build_segments([owners[row]], DEVICE, tile_rows=16)
        lora_matmul.apply_lora(layer.x[row : row + 1], y, layer.table, segments)
        assert torch.equal(y[0], among_many[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_taken_by_itself_has_the_same_bits_in_every_batch(lora_matmul: ModuleType, dtype: torch.dtype) -> None:
    """A row-wise row has the same bits alone or among 300 rows, with any spans, beside any adapters."""
    layer = FusedLayer(300, dtype)
    owners = owners_of(300)
    columns = with_random_columns(layer.slots[0], WIDTHS, torch.Generator().manual_seed(3))
    table = build_table([columns, *layer.slots[1:]], WIDTHS, IN_FEATURES, dtype, DEVICE)
    beside: list[RowOwner | None] = [owner if owner is not None else ((1, 0.5), (2, 0.5)) for owner in owners]
    among_many = layer.y.clone()
    lora_matmul.apply_lora(layer.x, among_many, table, build_segments(beside, DEVICE, tile_rows=ROW_WISE))

    for row in [row for row, owner in enumerate(owners) if owner not in (None, 0)][::60]:
        y = layer.y[row : row + 1].clone()
        segments = build_segments([owners[row]], DEVICE, tile_rows=ROW_WISE)
        lora_matmul.apply_lora(layer.x[row : row + 1], y, layer.table, segments)
        assert torch.equal(y[0], among_many[row])


@WAYS
def test_the_order_of_rows_does_not_matter(lora_matmul: ModuleType, tile_rows: int) -> None:
    """A shuffled batch gives the same rows in the shuffled order, in two runs."""
    layer = FusedLayer(300, torch.bfloat16)
    owners = owners_of(300)
    in_order = run(lora_matmul, layer, owners, tile_rows)
    shuffle = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    layer.x, layer.y = layer.x[shuffle.to(DEVICE)], layer.y[shuffle.to(DEVICE)]
    shuffled_owners = [owners[row] for row in shuffle.tolist()]

    shuffled = run(lora_matmul, layer, shuffled_owners, tile_rows)

    assert torch.equal(shuffled, in_order[shuffle.to(DEVICE)])
    assert torch.equal(shuffled, run(lora_matmul, layer, shuffled_owners, tile_rows))


@WAYS
def test_what_is_launched_does_not_matter(lora_matmul: ModuleType, tile_rows: int) -> None:
    """The number of programs that share a sum, and the largest rank, change no bit."""
    layer = FusedLayer(64, torch.bfloat16)
    segments = build_segments(owners_of(64), DEVICE, tile_rows=tile_rows)
    plan = plan_for(LaunchShape(segments.num_tiles, tile_rows, 3, IN_FEATURES, 128, 128, 2))
    outputs = []

    for is_parallel in (True, False):
        for bounds in (LaunchBounds(128, has_columns=False), LaunchBounds(200, has_columns=True)):
            y = layer.y.clone()
            launched = replace(plan, parallel_spans=is_parallel)
            lora_matmul.apply_lora(layer.x, y, layer.table, segments, launched, bounds)
            outputs.append(y)

    assert all(torch.equal(y, outputs[0]) for y in outputs)


@WAYS
def test_rows_may_lie_beyond_two_to_the_31(lora_matmul: ModuleType, tile_rows: int) -> None:
    """Offsets are 64 bits wide: the last row starts more than 2^31 elements after the first."""
    stride = 2**31 // 15 + 1
    if torch.cuda.mem_get_info()[0] < 2 * 16 * stride * 2:
        pytest.skip("needs about 10 GB of free device memory")
    layer = FusedLayer(16, torch.bfloat16)
    expected = run(lora_matmul, layer, owners_of(16), tile_rows)
    x = torch.empty(16, stride, dtype=torch.bfloat16, device=DEVICE)[:, :IN_FEATURES]
    y = torch.empty(16, stride, dtype=torch.bfloat16, device=DEVICE)[:, : sum(WIDTHS)]
    x.copy_(layer.x)
    y.copy_(layer.y)

    lora_matmul.apply_lora(x, y, layer.table, build_segments(owners_of(16), DEVICE, tile_rows=tile_rows))

    assert torch.equal(y, expected)


@WAYS
def test_a_captured_graph_serves_other_batches_and_adapters(lora_matmul: ModuleType, tile_rows: int) -> None:
    """A replay reads the segments and the table as they are at the replay."""
    layer = FusedLayer(32, torch.bfloat16)
    capacity = SegmentCapacity(num_rows=32, num_slots=len(RANKS), tile_rows=tile_rows)
    segments = build_segments([0] * 32, DEVICE, capacity)
    lora_matmul.apply_lora(layer.x, layer.y.clone(), layer.table, segments)
    y = layer.y.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lora_matmul.apply_lora(layer.x, y, layer.table, segments)

    segments.refill(build_segments(owners_of(32), capacity=capacity))
    layer.table.replace_slot(0, layer.slots[2])
    y.copy_(layer.y)
    graph.replay()

    assert torch.equal(y, run(lora_matmul, layer, owners_of(32), tile_rows))
