"""The compiled kernels against the torch oracle, at the sizes of a real model.

What the interpreter cannot show: the bits of matrix instructions, addresses beyond 2^31, graph replay.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from graftwork.engine.kernels.lora_plan import plan_for
from graftwork.engine.kernels.lora_segments import SegmentCapacity, build_segments
from graftwork.engine.kernels.random_adapters import random_slots
from graftwork.engine.kernels.reference import add_lora
from graftwork.engine.kernels.slice_table import build_table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
IN_FEATURES = 4096
WIDTHS = (4096, 1024, 1024)
RANKS = ((8, 8, 8), (16, 0, 16), (64, 3, 24), (128, 1, 12))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def lora_matmul() -> ModuleType:
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.kernels import lora_matmul

    return lora_matmul


class Layer:
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
    return [None if row % 7 == 3 else (row * row) % 5 % 4 for row in range(num_rows)]


def run(lora_matmul: ModuleType, layer: Layer, owners: Sequence[int | None], tile_rows: int = 16) -> torch.Tensor:
    y = layer.y.clone()
    capacity = SegmentCapacity(len(owners), len(RANKS), tile_rows)
    lora_matmul.apply_lora(layer.x, y, layer.table, build_segments(owners, DEVICE, capacity))
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 33, 700])
@pytest.mark.parametrize(("in_features", "widths"), [(IN_FEATURES, WIDTHS), (1000, (520, 72, 36))])
def test_the_kernels_compute_what_the_oracle_does(
    lora_matmul: ModuleType, dtype: torch.dtype, num_rows: int, in_features: int, widths: Sequence[int]
) -> None:
    """Decode and prefill, sizes that are aligned and that are not: one rounding from the fp32 sum."""
    layer = Layer(num_rows, dtype, in_features, widths)
    segments = build_segments(owners_of(num_rows), DEVICE)
    expected = add_lora(layer.x.cpu(), layer.y.cpu(), build_segments(owners_of(num_rows)), layer.slots, widths)

    lora_matmul.apply_lora(layer.x, layer.y, layer.table, segments)

    ulp = {torch.float32: 1e-4, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(layer.y.cpu(), expected, rtol=ulp, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sixteen_bit_weights_lose_nothing_on_the_way(lora_matmul: ModuleType, dtype: torch.dtype) -> None:
    """Into an fp32 output, v's own precision shows: it is not rounded to the weights' dtype between the kernels."""
    layer = Layer(48, dtype)
    y = layer.y.float()
    expected = add_lora(layer.x.cpu(), y.cpu(), build_segments(owners_of(48)), layer.slots, WIDTHS)

    lora_matmul.apply_lora(layer.x, y, layer.table, build_segments(owners_of(48), DEVICE))

    torch.testing.assert_close(y.cpu(), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(lora_matmul: ModuleType, dtype: torch.dtype) -> None:
    """Alone or among 600, decoded or prefilled, in tiles of either size, with spans in parallel or not."""
    layer = Layer(1500, dtype)
    owners = owners_of(1500)
    among_many = run(lora_matmul, layer, owners, tile_rows=32)

    for row in (0, 1, 2, 5, 1499):
        y = layer.y[row : row + 1].clone()
        segments = build_segments([owners[row]], DEVICE)
        lora_matmul.apply_lora(layer.x[row : row + 1], y, layer.table, segments)
        assert torch.equal(y[0], among_many[row])


def test_the_order_of_rows_does_not_matter(lora_matmul: ModuleType) -> None:
    """A shuffled batch gives the same rows, shuffled; and twice the same."""
    layer = Layer(300, torch.bfloat16)
    owners = owners_of(300)
    in_order = run(lora_matmul, layer, owners)
    shuffle = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    layer.x, layer.y = layer.x[shuffle.to(DEVICE)], layer.y[shuffle.to(DEVICE)]

    shuffled = run(lora_matmul, layer, [owners[row] for row in shuffle.tolist()])

    assert torch.equal(shuffled, in_order[shuffle.to(DEVICE)])
    assert torch.equal(shuffled, run(lora_matmul, layer, [owners[row] for row in shuffle.tolist()]))


def test_spans_in_parallel_or_in_turn_give_equal_bits(lora_matmul: ModuleType) -> None:
    """How many programs share a sum is a matter of speed."""
    layer = Layer(64, torch.bfloat16)
    segments = build_segments(owners_of(64), DEVICE)
    plan = plan_for(segments.num_tiles, 3, IN_FEATURES, 128, 2)
    outputs = []

    for is_parallel in (True, False):
        y = layer.y.clone()
        lora_matmul.apply_lora(layer.x, y, layer.table, segments, replace(plan, parallel_spans=is_parallel))
        outputs.append(y)

    assert torch.equal(*outputs)


def test_rows_may_lie_beyond_two_to_the_31(lora_matmul: ModuleType) -> None:
    """Offsets are 64 bits wide: the last row starts more than 2^31 elements after the first."""
    stride = 2**31 // 15 + 1
    if torch.cuda.mem_get_info()[0] < 2 * 16 * stride * 2:
        pytest.skip("needs about 10 GB of free device memory")
    layer = Layer(16, torch.bfloat16)
    expected = run(lora_matmul, layer, owners_of(16))
    x = torch.empty(16, stride, dtype=torch.bfloat16, device=DEVICE)[:, :IN_FEATURES]
    y = torch.empty(16, stride, dtype=torch.bfloat16, device=DEVICE)[:, : sum(WIDTHS)]
    x.copy_(layer.x)
    y.copy_(layer.y)

    lora_matmul.apply_lora(x, y, layer.table, build_segments(owners_of(16), DEVICE))

    assert torch.equal(y, expected)


def test_a_captured_graph_serves_other_batches_and_adapters(lora_matmul: ModuleType) -> None:
    """Replay reads the segments and the table as they are then, not as they were at capture."""
    layer = Layer(32, torch.bfloat16)
    capacity = SegmentCapacity(num_rows=32, num_slots=len(RANKS), tile_rows=16)
    segments = build_segments([0] * 32, DEVICE, capacity)
    lora_matmul.apply_lora(layer.x, layer.y.clone(), layer.table, segments)
    y = layer.y.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lora_matmul.apply_lora(layer.x, y, layer.table, segments)

    segments.refill(build_segments(owners_of(32), DEVICE, capacity))
    layer.table.replace_slot(0, layer.slots[2])
    y.copy_(layer.y)
    graph.replay()

    assert torch.equal(y, run(lora_matmul, layer, owners_of(32)))
